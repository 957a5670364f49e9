"""What the monitor keeps from one run to the next: the test, and which requests it has counted."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from evaluation.monitor.bets import Bets
from handover.durable import temporary_beside
from handover.errors import ConfigError

_MOST_SEEN = 1 << 16
_OWNERS_ALONE = 0o600


@dataclass(frozen=True)
class State:
    """The test of one deployment.

    Attributes:
        subject: digest of what is tested: source, served model, number formats and limits.
        time_ns: of the newest request that was counted.
        seen: digests of requests that were, the newest last.
        reason: why the alarm was raised; empty: it was not.
    """

    subject: str
    bets: Bets = field(default_factory=Bets)
    time_ns: int = 0
    seen: tuple[str, ...] = ()
    reason: str = ""


def subject_of(*parts: str | float) -> str:
    """Return the digest of what is tested."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_state(path: Path, subject: str) -> State:
    """Read a test's state; another subject's is the beginning of a new test.

    Raises:
        ConfigError: the file is not a monitor's.
    """
    if not path.exists():
        return State(subject)
    try:
        found = json.loads(path.read_text())
        bets = Bets(int(found["bets"]["count"]), tuple(found["bets"]["staked"]), float(found["bets"]["most"]))
        state = State(found["subject"], bets, int(found["time_ns"]), tuple(found["seen"]), found["reason"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is not what a monitor keeps: {error}", "give another state, or remove it") from error
    return state if state.subject == subject else State(subject)


def write_state(path: Path, state: State, more: Sequence[str]) -> None:
    """Write a test's state, with the digests of more requests."""
    kept = {**asdict(state), "seen": [*state.seen, *more][-_MOST_SEEN:]}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNERS_ALONE)
    with os.fdopen(number, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(kept) + "\n")
    os.replace(temporary, path)
