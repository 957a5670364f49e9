"""What was submitted, on disk: status, logs and cancel need nothing but the results directory.

Standard library only.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from handover.durable import write_atomically
from handover.errors import ArtefactError, reason_of
from handover.progress import human_time

FILE_NAME = "jobs.json"
STAGES_FILE = "stages.json"
_ALIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESIZING")
_TAIL_LINES = 20


@dataclass(frozen=True)
class SubmittedJob:
    """One Slurm job of a run: its id, the stages that it runs, and what it waits for."""

    job_id: str
    stages: tuple[str, ...]
    dependency: str
    log: str


@dataclass(frozen=True)
class SlurmState:
    """What sacct or squeue says of a job."""

    state: str
    exit_code: str = ""
    elapsed: str = ""


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
    alive = [job for job in jobs if states.get(job.job_id, SlurmState("")).state in _ALIVE]
    if not alive:
        for file in (logs / FILE_NAME, logs / STAGES_FILE):
            file.unlink(missing_ok=True)
        return
    write_jobs(logs, alive)
    stages = {stage for job in alive for stage in job.stages}
    kept = [entry for entry in json.loads((logs / STAGES_FILE).read_text()) if entry["stage"] in stages]
    write_atomically(logs / STAGES_FILE, json.dumps(kept, indent=1) + "\n")


def find_logs(results: Path) -> list[Path]:
    """Directories with a run's logs in or below a results directory, newest last.

    Raises:
        ArtefactError: there is none.
    """
    found = sorted(results.rglob(f"logs/{STAGES_FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ArtefactError(f"there is no run in {results}", "give the results directory of a run: .../export_tp1_...")
    return [path.parent for path in found]


def status(results: Path) -> list[str]:
    """One line a stage: its state, Slurm's state and exit code, elapsed time, the last line of its error."""
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
            slurm = states.get(job.job_id, SlurmState("unknown")) if job else None
            if counts[entry["stage"]] > 1:  # evaluations, which their logs are named after
                entry["stage"] = Path(entry["log"]).stem
            lines.append(_status_line(entry, job, slurm))
    return lines


def _status_line(entry: Mapping[str, str | float], job: SubmittedJob | None, slurm: SlurmState | None) -> str:
    state = str(entry["state"])
    if slurm and state in ("running", "not run") and slurm.state not in ("RUNNING", "PENDING", "COMPLETING", "unknown"):
        state = "lost" if state == "running" else state
    elapsed = human_time(float(entry["elapsed_s"])) if entry["elapsed_s"] else ""
    where = f"job {job.job_id} {slurm.state} {slurm.exit_code} {slurm.elapsed}".rstrip() if job and slurm else ""
    return f"  {entry['stage']:<10} {state:<12} {elapsed:>8}  {where}  {reason_of(str(entry['error']))}".rstrip()


def slurm_states(job_ids: Sequence[str]) -> dict[str, SlurmState]:
    """Ask sacct, and squeue for what it does not know yet; empty without Slurm."""
    if not job_ids:
        return {}
    states: dict[str, SlurmState] = {}
    ids = ",".join(job_ids)
    for line in _lines("squeue", "-h", "-t", "all", "-j", ids, "-o", "%i|%T|%M"):
        job_id, state, elapsed = line.split("|")
        states[job_id] = SlurmState(state, "", elapsed)
    for line in _lines("sacct", "-n", "-P", "-X", "-j", ids, "-o", "JobID,State,ExitCode,Elapsed"):
        job_id, state, exit_code, elapsed = line.split("|")
        states[job_id] = SlurmState(state.split()[0], exit_code, elapsed)
    return states


def cancel(results: Path) -> list[str]:
    """Cancel the jobs of the newest run that have not ended; returns one line a job."""
    jobs = read_jobs(find_logs(results)[-1])
    states = slurm_states([job.job_id for job in jobs])
    waiting = [job for job in jobs if states.get(job.job_id, SlurmState("PENDING")).state in _ALIVE]
    if waiting:
        subprocess.run(["scancel", *(job.job_id for job in waiting)], check=False)
    return [f"  cancelled  job {job.job_id}  {'+'.join(job.stages)}" for job in waiting] or ["  nothing to cancel"]


def logs(results: Path) -> list[str]:
    """The last lines of each stage's log of the newest run, under its path."""
    lines = []
    for entry in json.loads((find_logs(results)[-1] / STAGES_FILE).read_text()):
        path = Path(entry["log"])
        lines.append(f"==> {path}")
        if path.is_file():
            lines += [f"  {line}" for line in path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]]
    return lines


def _lines(*command: str) -> list[str]:
    if not shutil.which(command[0]):
        return []
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return [line for line in finished.stdout.splitlines() if line.strip()] if finished.returncode == 0 else []
