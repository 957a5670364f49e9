"""What was submitted, on disk: status, logs and cancel need nothing but the results directory."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from evaluation.arguments import POINTS_NAME
from handover.durable import write_atomically
from handover.errors import ArtefactError, SlipwayError
from handover.progress import human_time
from handover.reasons import reason_of
from launcher.submit.kubernetes.kubectl import Kubectl
from launcher.submit.schedulers import JobState, Scheduler, tail
from launcher.submit.slurm_states import SlurmJobs

FILE_NAME = "jobs.json"
STAGES_FILE = "stages.json"
SCHEDULERS: Mapping[str, Scheduler] = {"slurm": SlurmJobs(), "kubernetes": Kubectl()}
"""By the name that a job's record has."""


@dataclass(frozen=True)
class SubmittedJob:
    """One job of a run: its id, the stages that it runs, what it waits for, where its output goes, and who runs it."""

    job_id: str
    stages: tuple[str, ...]
    dependency: str
    log: str
    scheduler: str = "slurm"

    @property
    def errors(self) -> Path:
        """What the job itself printed as errors: Slurm, the lines of ``cluster.setup``, the runner."""
        return Path(self.log).with_suffix(".err")


def write_jobs(logs: Path, jobs: Sequence[SubmittedJob]) -> None:
    """Remember the jobs of a run beside its logs."""
    write_atomically(logs / FILE_NAME, json.dumps([asdict(job) for job in jobs], indent=1) + "\n")


def read_jobs(logs: Path) -> list[SubmittedJob]:
    """The jobs of a run; empty for one that ran here, and where these are a copy of another run's logs."""
    try:
        content = json.loads((logs / FILE_NAME).read_text())
    except FileNotFoundError:
        return []
    jobs = [SubmittedJob(**{**job, "stages": tuple(job["stages"])}) for job in content]
    return [job for job in jobs if not _is_elsewhere(Path(job.log).parent, logs)]


def _is_elsewhere(folder: Path, logs: Path) -> bool:
    """Whether a job writes to a folder that is there, and not below these logs: the job is that of the original."""
    return folder.is_dir() and not folder.resolve().is_relative_to(logs.resolve())


def forget_ended(logs: Path) -> None:
    """Make room for a new run in the same directory: only jobs that have not ended stay, such as a server.

    Their stages keep their results too, so that status, logs and cancel find them beside those of the new run.
    """
    jobs = read_jobs(logs)
    absent = {name for name in _names(jobs) if SCHEDULERS[name].absence()}  # such as of moved results: nothing is known
    jobs = [job for job in jobs if job.scheduler not in absent]
    states = _states(jobs)
    alive = [job for job in jobs if not states[job.job_id].has_ended]
    if not alive:
        for file in (logs / FILE_NAME, logs / STAGES_FILE):
            file.unlink(missing_ok=True)
        return
    write_jobs(logs, alive)
    stages = {stage for job in alive for stage in job.stages}
    kept = [entry for entry in json.loads((logs / STAGES_FILE).read_text()) if entry["stage"] in stages]
    write_atomically(logs / STAGES_FILE, json.dumps(kept, indent=1) + "\n")


@contextlib.contextmanager
def kept_if_refused(logs: Path) -> Iterator[None]:
    """Put back what is known of the run before, where the new one is refused."""
    files = [logs / FILE_NAME, logs / STAGES_FILE]
    before = {file: file.read_text() if file.is_file() else None for file in files}
    try:
        yield
    except SlipwayError:
        for file, text in before.items():
            if text is None:
                file.unlink(missing_ok=True)
            else:
                write_atomically(file, text)
        raise


def find_logs(results: Path) -> list[Path]:
    """Directories with a run's logs in or below a results directory, newest last; of a sweep's, those of its points.

    Raises:
        ArtefactError: there is none.
    """
    points = _points(results / POINTS_NAME)
    found = [path / STAGES_FILE for path in points] or list(results.rglob(f"logs/{STAGES_FILE}"))
    found = sorted((path for path in found if path.is_file()), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ArtefactError(f"there is no run in {results}", "give the results directory of a run: .../export_tp1_...")
    return [path.parent for path in found]


def newest_run(results: Path) -> list[Path]:
    """Directories with the logs of what was started last: of one run, or of every point of its sweep."""
    found = find_logs(results)
    if (results / POINTS_NAME).is_file():
        return found
    sweeps = sorted(results.rglob(f"sweeps/*/{POINTS_NAME}"), key=lambda path: path.stat().st_mtime)
    for points in map(_points, reversed(sweeps)):
        if found[-1].absolute() in points:
            return [logs for logs in found if logs.absolute() in points]
    return found[-1:]


def _points(file: Path) -> list[Path]:
    """Directories with the logs of a sweep's points; of one that could not be planned there are none."""
    try:
        points = json.loads(file.read_text())
    except FileNotFoundError:
        return []
    return [Path(point["results"]) / "logs" for point in points if point["results"]]


def _names(jobs: Sequence[SubmittedJob]) -> list[str]:
    return list(dict.fromkeys(job.scheduler for job in jobs))


def _states(jobs: Sequence[SubmittedJob]) -> dict[str, JobState]:
    """Ask each scheduler for its jobs."""
    found: dict[str, JobState] = {}
    for name in _names(jobs):
        found |= SCHEDULERS[name].states([job.job_id for job in jobs if job.scheduler == name])
    return found


def status(results: Path) -> list[str]:
    """One line a stage: its state, that of its job with the exit code, elapsed time, what its error comes to."""
    lines = []
    for logs in find_logs(results):
        lines.append(str(logs.parent))
        jobs = read_jobs(logs)
        states = _states(jobs)
        job_of = {stage: job for job in jobs for stage in job.stages}
        entries = json.loads((logs / STAGES_FILE).read_text())
        counts = Counter(entry["stage"] for entry in entries)
        for entry in entries:
            job = job_of.get(entry["stage"])
            found = states[job.job_id] if job else None
            if counts[entry["stage"]] > 1:  # evaluations, which their logs are named after
                entry["stage"] = Path(entry["log"]).stem
            lines.append(_status_line(entry, job, found))
    return lines


def _status_line(entry: Mapping[str, str | float], job: SubmittedJob | None, found: JobState | None) -> str:
    state = str(entry["state"])
    is_lost = state == "running" and found is not None and found.has_ended
    elapsed = human_time(float(entry["elapsed_s"])) if entry["elapsed_s"] else ""
    where = f"job {job.job_id} {found}" if job and found else ""
    reason = reason_of(str(entry["error"]))
    if job and found and found.has_ended and not reason and (is_lost or state == "not run"):
        printed = job.errors.read_text(errors="replace") if job.errors.is_file() else None
        reason = SCHEDULERS[job.scheduler].reason(found, printed, job.errors)
    state = "lost" if is_lost else state
    return f"  {entry['stage']:<10} {state:<12} {elapsed:>8}  {where}  {reason}".rstrip()


def cancel(results: Path) -> list[str]:
    """Cancel the jobs of the newest run, or of its whole sweep, that have not ended; returns one line a job.

    One that is ending is left alone: its processes have been told already, and Slurm ends them.

    Raises:
        SlipwayError: who runs them does not answer.
    """
    jobs = [job for logs in newest_run(results) for job in read_jobs(logs)]
    states = _states(jobs)
    waiting = [job for job in jobs if not (states[job.job_id].has_ended or states[job.job_id].is_ending)]
    for name in _names(waiting):
        SCHEDULERS[name].cancel([job.job_id for job in waiting if job.scheduler == name])
    return [f"  cancelled  job {job.job_id}  {'+'.join(job.stages)}" for job in waiting] or ["  nothing to cancel"]


def logs(results: Path) -> list[str]:
    """The last lines of each stage's log of the newest run, under its path; of its job's, where there is none."""
    lines = []
    newest = find_logs(results)[-1]
    job_of = {stage: job for job in read_jobs(newest) for stage in job.stages}
    shown: set[str] = set()
    for entry in json.loads((newest / STAGES_FILE).read_text()):
        path, job = newest / Path(entry["log"]).name, job_of.get(entry["stage"])  # these, also where they were moved to
        lines += tail(path)
        if job and not path.is_file() and job.job_id not in shown:
            shown.add(job.job_id)
            lines += SCHEDULERS[job.scheduler].output(job.job_id, (Path(job.log), job.errors))
    return lines
