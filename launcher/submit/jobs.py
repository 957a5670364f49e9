"""What was submitted, on disk: status, logs and cancel need nothing but the results directory."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from evaluation.arguments import POINTS_NAME
from handover.durable import write_atomically
from handover.errors import ArtefactError, SlipwayError
from handover.progress import human_time
from handover.reasons import reason_in, reason_of
from launcher.submit.slurm_states import SlurmState, cancel_jobs, slurm_states

FILE_NAME = "jobs.json"
STAGES_FILE = "stages.json"
_TAIL_LINES = 20
_NO_OUTPUT_FILE = "0:53"  # what slurmd makes of an output file that it cannot open


@dataclass(frozen=True)
class SubmittedJob:
    """One Slurm job of a run: its id, the stages that it runs, what it waits for, and where its output goes."""

    job_id: str
    stages: tuple[str, ...]
    dependency: str
    log: str

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
    states = slurm_states([job.job_id for job in jobs])
    has_slurm = bool(shutil.which("squeue"))  # where there is none, such as of moved results, nothing is known
    alive = [job for job in jobs if has_slurm and not states[job.job_id].has_ended]
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


def status(results: Path) -> list[str]:
    """One line a stage: its state, Slurm's state and exit code, elapsed time, what its error comes to."""
    lines = []
    for logs in find_logs(results):
        lines.append(str(logs.parent))
        jobs = read_jobs(logs)
        states = slurm_states([job.job_id for job in jobs])
        job_of = {stage: job for job in jobs for stage in job.stages}
        entries = json.loads((logs / STAGES_FILE).read_text())
        counts = Counter(entry["stage"] for entry in entries)
        for entry in entries:
            job = job_of.get(entry["stage"])
            slurm = states[job.job_id] if job else None
            if counts[entry["stage"]] > 1:  # evaluations, which their logs are named after
                entry["stage"] = Path(entry["log"]).stem
            lines.append(_status_line(entry, job, slurm))
    return lines


def _status_line(entry: Mapping[str, str | float], job: SubmittedJob | None, slurm: SlurmState | None) -> str:
    state = str(entry["state"])
    is_lost = state == "running" and slurm is not None and slurm.has_ended
    elapsed = human_time(float(entry["elapsed_s"])) if entry["elapsed_s"] else ""
    where = f"job {job.job_id} {slurm}" if job and slurm else ""
    reason = reason_of(str(entry["error"]))
    if job and slurm and not reason and (is_lost or state == "not run"):
        reason = _reason_of_job(job, slurm)
    state = "lost" if is_lost else state
    return f"  {entry['stage']:<10} {state:<12} {elapsed:>8}  {where}  {reason}".rstrip()


def _reason_of_job(job: SubmittedJob, slurm: SlurmState) -> str:
    """Why a job ended before its runner could say it: what it printed, or what Slurm's exit code means."""
    if not slurm.has_ended or slurm.state == "CANCELLED":
        return ""
    if job.errors.is_file():
        reason = reason_in(job.errors.read_text(errors="replace").splitlines())
        return f"{reason}  ({job.errors})" if reason else ""
    if slurm.exit_code == _NO_OUTPUT_FILE:
        return f"the node cannot write {job.errors}: base_results_dir must be on storage that the nodes share"
    return ""


def cancel(results: Path) -> list[str]:
    """Cancel the jobs of the newest run, or of its whole sweep, that have not ended; returns one line a job.

    One that is ending is left alone: its processes have been told already, and Slurm ends them.

    Raises:
        SlipwayError: Slurm does not answer.
    """
    jobs = [job for logs in newest_run(results) for job in read_jobs(logs)]
    states = slurm_states([job.job_id for job in jobs])
    waiting = [job for job in jobs if not (states[job.job_id].has_ended or states[job.job_id].is_ending)]
    if waiting:
        cancel_jobs([job.job_id for job in waiting])
    return [f"  cancelled  job {job.job_id}  {'+'.join(job.stages)}" for job in waiting] or ["  nothing to cancel"]


def logs(results: Path) -> list[str]:
    """The last lines of each stage's log of the newest run, under its path; of its job's, where there is none."""
    lines = []
    newest = find_logs(results)[-1]
    job_of = {stage: job for job in read_jobs(newest) for stage in job.stages}
    shown: set[Path] = set()
    for entry in json.loads((newest / STAGES_FILE).read_text()):
        path, job = newest / Path(entry["log"]).name, job_of.get(entry["stage"])  # these, also where they were moved to
        lines += _tail(path)
        if job and not path.is_file() and job.errors not in shown:
            shown.add(job.errors)
            lines += [line for file in (Path(job.log), job.errors) for line in _tail(file)]
    return lines


def _tail(path: Path) -> list[str]:
    if not path.is_file():
        return [f"==> {path}  (not there)"]
    return [f"==> {path}", *(f"  {line}" for line in path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])]
