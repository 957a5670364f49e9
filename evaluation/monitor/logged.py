"""The requests that a deployment has noted: ``deployment.openai.sample_log`` writes them, a JSON line each."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handover.errors import ConfigError

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Logged:
    """One request.

    Attributes:
        time_ns: when its answer was complete, since 1970.
        prompt, tokens: ids of the prompt and of the answer.
        log_probs: that the deployment gave the answer's tokens.
    """

    time_ns: int
    prompt: Ids
    tokens: Ids
    log_probs: tuple[float, ...]

    @property
    def ids(self) -> Ids:
        """The prompt and the answer."""
        return self.prompt + self.tokens

    @property
    def digest(self) -> str:
        """The beginning of its SHA-256: the same tokens are the same evidence, and count once."""
        return hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Chosen:
    """Requests that are scored.

    Attributes:
        requests: in the order of time.
        left_out: why others are not, with their numbers.
    """

    requests: tuple[Logged, ...]
    left_out: dict[str, int]


def choose(path: Path, after_ns: int, seen: Collection[str], model_digest: str, longest: int, samples: int) -> Chosen:
    """Choose the newest requests that were not scored, whatever their log probabilities are."""
    left_out, known = dict[str, int](), set(seen)
    newest = deque[Logged](maxlen=samples)

    def leave(why: str) -> None:
        left_out[why] = left_out.get(why, 0) + 1

    for line in _lines(path):
        entry = _read(line)
        if entry is None:
            leave("that are damaged")
            continue
        found, digest = entry
        if found.time_ns <= after_ns:
            continue
        if digest != model_digest:
            leave("of another model")
        elif len(found.ids) > longest or len(found.ids) < 2 or not found.prompt:
            leave("that are too long")
        elif found.digest in known:
            leave("that are a repetition")
        else:
            known.add(found.digest)
            if len(newest) == samples:
                leave("beyond the newest ones")
            newest.append(found)
    return Chosen(tuple(sorted(newest, key=lambda each: each.time_ns)), left_out)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of the older file, if there is one, and of the file."""
    for each in (path.with_name(f"{path.name}.1"), path):
        if each.is_file():
            try:
                with each.open(encoding="utf-8", errors="replace") as stream:
                    yield from stream
            except OSError as error:
                raise ConfigError(f"{each} cannot be read: {error.strerror}", "it is its owner's alone") from error


def _read(line: str) -> tuple[Logged, str] | None:
    """Return a request and the digest of its model; None: the line is not one."""
    try:
        entry: dict[str, Any] = json.loads(line)
        tokens, log_probs = tuple(map(int, entry["tokens"])), tuple(map(float, entry["log_probs"]))
        found = Logged(int(entry["time_ns"]), tuple(map(int, entry["prompt"])), tokens, log_probs)
        digest = str(entry.get("model_digest", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return (found, digest) if tokens and len(tokens) == len(log_probs) else None
