"""What became of the stages of a run, in memory and in ``stages.json``. Standard library only."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handover.durable import write_atomically
from launcher.config.choices import Stage
from launcher.plan.plan import REPLICA

_ORDER = (*(stage.name for stage in Stage), "report", "tracking", "gate")


@dataclass
class StageResult:
    """What became of one stage.

    Attributes:
        state: running, done, skipped, failed, interrupted or not run.
        error: the reason, with the last lines it printed; empty unless failed.
        exit_status: of the command that failed, 1 for any other failure, else 0.
    """

    stage: str
    name: str
    state: str = "not run"
    elapsed_s: float = 0.0
    error: str = ""
    log: str = ""
    output: str = ""
    exit_status: int = 0


def _position(entry: Mapping[str, Any]) -> tuple[int, str]:
    """Return the order of an entry; servers that are jobs of their own come before their router."""
    stage = str(entry["stage"])
    return (_ORDER.index(Stage.deploy.name), stage) if stage.startswith(REPLICA) else (_ORDER.index(stage), "~")


def failure_status(results: Sequence[StageResult]) -> int:
    """Exit status of the first stage that failed; 0 if none did."""
    return next((result.exit_status for result in results if result.state == "failed"), 0)


def write_results(file: Path, results: Sequence[StageResult]) -> None:
    """Update the results of these stages in the file; those of other jobs of the run stay, which may write at once.

    A stage may have several: each evaluation has a log of its own.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(file):
        _write(file, results)


@contextlib.contextmanager
def _one_at_a_time(file: Path) -> Iterator[None]:
    """Wait for others who write the file; on a file system without locks one may forget what another has noted."""
    with file.with_name(f".{file.name}.lock").open("w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(file: Path, results: Sequence[StageResult]) -> None:
    ours = [dataclasses.asdict(result) for result in results]
    known = {(entry["stage"], entry["log"]) for entry in ours}
    try:
        others = [entry for entry in json.loads(file.read_text()) if (entry["stage"], entry["log"]) not in known]
    except (OSError, ValueError, KeyError, TypeError):
        others = []
    entries = sorted([*others, *ours], key=_position)
    write_atomically(file, json.dumps(entries, indent=1) + "\n")
