"""Recorded traces: when requests came, how long they were, and which beginnings they shared, in Mooncake's JSON lines.

A line holds ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens) and, optionally,
``hash_ids``: one number for each block of 512 tokens of the prompt, the last of which may be shorter. Prompts whose
first numbers are equal begin with the same tokens.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.speed.prompts.workload import DrawingContext, LoadPrompt, fit_lengths, seeded
from handover.errors import ConfigError
from handover.regular_file import read_text

_HINT = "a line is a JSON object with timestamp (ms), input_length, output_length and, optionally, hash_ids"


@dataclass(frozen=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        due_ms: milliseconds after the first request.
        input_length, output_length: in tokens.
        hash_ids: numbers of the prompt's blocks; empty if unknown.
    """

    due_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """A recorded trace.

    Attributes:
        requests: in the order of their time stamps, at least one.
        block_size: tokens of a block.
    """

    requests: tuple[TraceRequest, ...]
    block_size: int

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last."""
        return self.requests[-1].due_ms / 1000

    def rate_per_s(self, speed: float) -> float:
        """Return the mean rate of requests of a replay."""
        return len(self.requests) * speed / max(self.duration_s, 0.001)

    def arrivals_ns(self, speed: float) -> Iterator[int]:
        """Yield the due times of a replay in nanoseconds after its start."""
        return (round(request.due_ms * 1e6 / speed) for request in self.requests)

    def prompts(self, context: DrawingContext, seed: int) -> Iterator[LoadPrompt]:
        """Draw the prompts; the tokens of a block depend on its number and the seed alone."""
        for number, request in enumerate(self.requests):
            recorded = request.input_length, request.output_length
            length, answer = fit_lengths(*recorded, context.most)
            tokens: list[int] = []
            for block in request.hash_ids:
                if len(tokens) >= length:
                    break
                tokens += context.tokens.draw(self.block_size, seeded(seed, "block", block))
            # What no block covers belongs to this request alone.
            tokens += context.tokens.draw(max(0, length - len(tokens)), seeded(seed, "own", number))
            prompt = context.tokens.prompt(tokens[:length], answer)
            yield dataclasses.replace(prompt, is_clipped=(length, answer) != recorded)


def read_trace(path: Path, block_size: int) -> Trace:
    """Read a trace.

    Args:
        path: path of the file.
        block_size: tokens of a block; Mooncake's have 512.

    Raises:
        ConfigError: there is no such file, a line is no such object, or there is no request.
    """
    if not path.is_file():
        raise ConfigError(f"there is no trace {path}")
    lines = [(number, line) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    requests = sorted((_read(line, f"{path.name}:{number}", block_size) for number, line in lines), key=_due_ms)
    if not requests:
        raise ConfigError(f"{path} has no request", _HINT)
    first_ms = requests[0].due_ms
    shifted = (dataclasses.replace(request, due_ms=request.due_ms - first_ms) for request in requests)
    return Trace(tuple(shifted), block_size)


def _due_ms(request: TraceRequest) -> float:
    return request.due_ms


def _read(line: str, where: str, block_size: int) -> TraceRequest:
    try:
        content: dict[str, Any] = json.loads(line)
        request = TraceRequest(
            float(content["timestamp"]),
            int(content["input_length"]),
            int(content["output_length"]),
            tuple(map(int, content.get("hash_ids") or ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{where} is no request of a trace: {error!r}", _HINT) from error
    if not math.isfinite(request.due_ms) or request.input_length < 1 or request.output_length < 1:
        raise ConfigError(f"{where}: timestamps are finite, lengths at least 1", _HINT)
    _check_blocks(request.hash_ids, request.input_length, block_size, where)
    return request


def _check_blocks(hash_ids: Sequence[int], input_length: int, block_size: int, where: str) -> None:
    most = math.ceil(input_length / block_size)
    if len(hash_ids) > most:
        raise ConfigError(
            f"{where} has {len(hash_ids)} hash_ids, but {input_length} tokens are {most} blocks of {block_size}",
            "give the trace's own block size: benchmark.load.trace_block_size",
        )
