"""Score passages by a network that is read layer by layer, all passages through a layer before the next one is read.

Between two layers the hidden states of all passages are in a file, and a second file takes those behind the next layer:
a run that is killed continues behind the last layer that was whole.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import linear

from evaluation.divergence.stage import Ids, LayeredModel, Stage, in_batches
from handover.durable import write_atomically
from handover.progress import Progress, human_bytes, human_time

_DONE = "done.json"
_LOGIT_NUMBERS = 1 << 26  # logits that are held at once: 256 MiB
_PROBE = 1024  # rows and columns of the product that says how fast this machine is


@dataclass(frozen=True)
class Scores:
    """What a model says of each scored token, those of one passage behind those of another.

    Attributes:
        log_probs: float32 [N], of the token itself.
        top_ids: int32 [N, K], the most probable tokens, in descending order; -1 where there are fewer.
        top: float32 [N, K], their log probabilities.
    """

    log_probs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top: npt.NDArray[np.float32]

    def cut(self, most: int) -> Scores:
        """Return the same with fewer of the most probable tokens."""
        return Scores(self.log_probs, self.top_ids[:, :most], self.top[:, :most])

    def as_told(self, other: Scores, tokens: npt.NDArray[np.int64]) -> Scores:
        """Return the same with as many of the most probable tokens in each place as other scores have there.

        Args:
            other: what a server tells.
            tokens: [N], that were scored; one that comes last is there because it was scored, as most servers do.
        """
        counts = np.isfinite(other.top).sum(1)
        last = np.take_along_axis(other.top_ids, np.maximum(counts - 1, 0)[:, None], 1)[:, 0]
        is_told = np.arange(self.top.shape[1]) < (counts - (last == tokens))[:, None]
        return Scores(self.log_probs, self.top_ids, np.where(is_told, self.top, -np.inf).astype(np.float32))


def stream(model: LayeredModel, passages: Sequence[Ids], top: int, work: Path, label: str) -> Scores:
    """Score every token of passages but the first.

    Args:
        model: its network.
        passages: token ids.
        top: most probable tokens to note for each place.
        work: directory for the hidden states, which a killed run leaves there, and the next one goes on with.
        label: of the progress.
    """
    work.mkdir(parents=True, exist_ok=True)
    done, stages = _read_done(work), len(model.stages)
    sys.stderr.write(f"{label}: {estimate(model, sum(map(len, passages)), stages - done)}\n")
    with Progress(label, stages, "layers") as progress:
        progress.skip(items=done)
        for number in range(done, stages - 1):
            _run_stage(model, number, passages, work)
            write_atomically(work / _DONE, json.dumps({"stages": number + 1}))
            progress.advance()
        hidden = _hidden(model, stages - 2, passages, work, "r")
        vocabulary = model.config.vocab_size
        scores = _score(model.open(stages - 1, passages), passages, hidden, min(top, vocabulary), vocabulary)
        progress.advance()
    return scores


def _read_done(work: Path) -> int:
    file = work / _DONE
    return int(json.loads(file.read_text())["stages"]) if file.is_file() else 0


def _hidden(model: LayeredModel, stage: int, passages: Sequence[Ids], work: Path, mode: Any) -> npt.NDArray[np.float32]:
    """Map the hidden states behind a stage; every second stage has the same file."""
    shape = (sum(map(len, passages)), model.config.hidden_units)
    return np.memmap(work / f"hidden.{stage % 2}.f32", np.float32, mode, shape=shape)


def _run_stage(model: LayeredModel, number: int, passages: Sequence[Ids], work: Path) -> None:
    stage = model.open(number, passages)
    given = _hidden(model, number - 1, passages, work, "r") if number else None
    written = _hidden(model, number, passages, work, "w+")
    for rows, place in _placed(passages):
        hidden = None if given is None else torch.from_numpy(np.array(given[place]))
        written[place] = stage.run(rows, hidden).cpu().numpy()
    written.flush()  # type: ignore[attr-defined]


def _placed(passages: Sequence[Ids]) -> Iterator[tuple[list[Ids], slice]]:
    """Yield batches of passages, and where their tokens stand among all."""
    begin = 0
    for rows in in_batches(passages):
        end = begin + sum(map(len, rows))
        yield rows, slice(begin, end)
        begin = end


def _score(stage: Stage, passages: Sequence[Ids], hidden: npt.NDArray[np.float32], top: int, vocabulary: int) -> Scores:
    """Score tokens by the hidden states of the tokens before them."""
    tokens = np.concatenate([row[1:] for row in passages])
    lengths = np.array(list(map(len, passages)))
    before = np.delete(np.arange(lengths.sum()), lengths.cumsum() - 1)
    found = Scores(
        np.empty(len(tokens), np.float32),
        np.empty((len(tokens), top), np.int32),
        np.empty((len(tokens), top), np.float32),
    )
    step = max(1, _LOGIT_NUMBERS // vocabulary)
    for begin in range(0, len(tokens), step):
        part = slice(begin, begin + step)
        log_probs, ids, largest = _best(stage.logits(torch.from_numpy(hidden[before[part]])), tokens[part], top)
        found.log_probs[part], found.top_ids[part], found.top[part] = log_probs.cpu(), ids.cpu(), largest.cpu()
    return found


def _best(logits: Tensor, tokens: npt.NDArray[np.int64], top: int) -> tuple[Tensor, Tensor, Tensor]:
    normed = logits.double().log_softmax(-1)
    largest, ids = normed.topk(top, -1)
    own = normed.gather(1, torch.from_numpy(tokens).to(normed.device)[:, None])[:, 0]
    return own, ids, largest


def estimate(model: LayeredModel, tokens: int, stages: int) -> str:
    """Describe how long the stages that are left will take: a product and the loading of a layer are timed for it."""
    size = torch.ones(_PROBE, _PROBE, dtype=model.dtype, device=model.device)
    _ = float(linear(size, size)[0, 0])
    begin = time.perf_counter()
    for _ in range(4):
        product = linear(size, size)  # as the engine: in fp16 on a CPU size @ size takes twenty times as long
    _ = float(product[0, 0])
    rate = 4 * 2 * _PROBE**3 / (time.perf_counter() - begin)
    begin = time.perf_counter()
    model.open(len(model.stages) // 2, [(0,)])  # of a mixture the first layers may be small
    loading = (time.perf_counter() - begin) * stages
    share = stages / len(model.stages)
    work, stored = 2 * model.used_numbers * tokens * share, model.stored_bytes * share
    return (
        f"about {human_time(loading + work / rate)} for {tokens} tokens through {stages} of {len(model.stages)} layers"
        f" ({work / 1e12:.3g} TFLOP at {rate / 1e9:.3g} GFLOP/s, {human_bytes(stored)} of weights to load in"
        f" {human_time(loading)})"
    )
