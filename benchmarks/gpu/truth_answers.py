"""Answers beside transformers' model on the same device: a line of the table of benchmarks.gpu.truth for each way."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .truth_requests import Ask, Told, tokens_of

FP32_LIMIT = 5e-3  # of a log-probability, and by how much a greedy token may be less likely than the argmax
_JITTERS = (1e-6, 3e-6, 1e-5) * 8  # of a router's inputs


@dataclass
class Row:
    """A line of the table.

    Attributes:
        model: family.
        way: format and way of serving.
        requests: that were answered.
        failed: that were not, or whose stream went back on a token.
        tokens: that were compared.
        wrong: tokens that the model does not choose, beyond rounding: see the module.
        tied: requests that a router's near-tie decided.
        lost: how much less likely than the argmax a greedy token is at most.
        error: largest difference of a log-probability in fp32, of a beam's by token; else the root mean square.
        ratio: of that to transformers' own in the same format; NaN in fp32.
        as_cpu: requests that got the CPU's tokens, and of how many.
        preempted: rows that were set back.
        accepted: tokens of drafts that were right.
        found: tokens of prompts that the prefix cache had.
        seconds: that it took.
    """

    model: str
    way: str
    requests: int = 0
    failed: int = 0
    tokens: int = 0
    wrong: int = 0
    tied: int = 0
    lost: float = 0.0
    error: float = 0.0
    ratio: float = math.nan
    as_cpu: str = ""
    preempted: int = 0
    accepted: int = 0
    found: int = 0
    seconds: float = 0.0
    is_right: bool = True

    def cells(self) -> str:
        """Write the line."""
        shown = []
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool):
                shown.append("" if value else "**WRONG**")
            elif isinstance(value, float):
                shown.append("" if math.isnan(value) else f"{value:.1f}" if each.name == "seconds" else f"{value:.2g}")
            else:
                shown.append(str(value))
        return "| " + " | ".join(shown) + " |\n"


@contextmanager
def timed(row: Row) -> Iterator[Row]:
    """Note how long a row takes."""
    begin = time.monotonic()
    yield row
    row.seconds = time.monotonic() - begin
    sys.stderr.write(row.cells())  # the table comes when a family is done


class Oracle:
    """Transformers' model on a device.

    Args:
        model: in any format.
        device: where it computes.
    """

    def __init__(self, model: Any, device: str) -> None:
        self._model, self._device = model.to(device), device
        self._has_last = "logits_to_keep" in signature(model.forward).parameters
        self._routers = [each for each in model.modules() if "router" in type(each).__name__.lower()]

    @property
    def variants(self) -> Iterator[Oracle]:
        """Models that are the same but for the choice of experts where two are as good as equal."""
        generator = torch.Generator(self._device)
        for place, jitter in enumerate(_JITTERS if self._routers else ()):

            def change(_: Any, inputs: tuple[Tensor, ...], jitter: float = jitter) -> tuple[Tensor, ...]:
                noise = torch.randn(inputs[0].shape, generator=generator, device=inputs[0].device)
                return (inputs[0] * (1 + jitter * noise), *inputs[1:])

            generator.manual_seed(place)
            hooks = [each.register_forward_pre_hook(change) for each in self._routers]
            try:
                yield self
            finally:
                for hook in hooks:
                    hook.remove()

    @torch.inference_mode()
    def score(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """Return the log-probabilities of all tokens in the place of each generated one, fp32 [n, V]."""
        if self._model.config.is_encoder_decoder:
            begun = [self._model.config.decoder_start_token_id, *tokens[:-1]]
            logits = self._model(input_ids=self._row(prompt), decoder_input_ids=self._row(begun)).logits[0]
        else:
            last = {"logits_to_keep": len(tokens) + 1} if self._has_last else {}
            logits = self._model(self._row([*prompt, *tokens]), **last).logits[0, -len(tokens) - 1 : -1]
        return logits.float().log_softmax(-1)

    def _row(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], device=self._device)


def check_answer(row: Row, ask: Ask, told: Told, oracle: Oracle, allowed: Tensor) -> None:
    """Compare an answer in fp32 with the oracle, and note it in a row."""
    row.requests += 1
    if told.tensors is None or not told.is_consistent:
        row.failed += 1
        return
    found = _beside(row, ask, told.tensors, oracle, allowed)
    if not found.is_right:
        for variant in oracle.variants:
            other = _beside(row, ask, told.tensors, variant, allowed)
            if other.is_right:
                found = replace(other, tied=1)
                break
    for count in ("tokens", "wrong", "tied"):
        setattr(row, count, getattr(row, count) + getattr(found, count))
    row.lost, row.error = max(row.lost, found.lost), max(row.error, found.error)


def _beside(row: Row, ask: Ask, tensors: dict[str, Any], oracle: Oracle, allowed: Tensor) -> Row:
    """Compare an answer with a model's scores -> what it adds to a row."""
    found = Row(row.model, row.way)
    for beam in range(tensors["output_ids"].shape[1]):
        tokens = tokens_of(ask, tensors, beam)
        scores = oracle.score(ask.prompt, tokens)
        own = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0]
        found.tokens += len(tokens)
        if ask.kind == "beams":
            error = abs(float(own.sum()) - float(tensors["cum_log_probs"][0, beam])) / len(tokens)
        else:
            given = torch.from_numpy(tensors["output_raw_log_probs"][0, 0, : len(tokens)]).to(own.device)
            error = float((given - own).abs().max())
            found.wrong += _count_wrong(found, ask, tokens, scores, own, allowed)
        found.error = max(found.error, error)
    found.is_right = not found.wrong and found.error < FP32_LIMIT
    return found


def _count_wrong(row: Row, ask: Ask, tokens: list[int], scores: Tensor, own: Tensor, allowed: Tensor) -> int:
    """Count tokens that the request cannot have from this model."""
    if ask.kind in ("greedy", "grammar"):
        best = scores.masked_fill(~allowed, -math.inf) if ask.kind == "grammar" else scores
        lost = best.amax(-1) - own
        row.lost = max(row.lost, float(lost.max()))
        return int((lost > FP32_LIMIT).sum()) + sum(not allowed[token] for token in tokens if ask.kind == "grammar")
    if ask.kind == "drawn" and ask.top_k:
        least = scores.topk(ask.top_k).values[:, -1]
        return int((own < least - FP32_LIMIT).sum())
    return len({*tokens} & {*ask.bad})


def are_same(row: Row, ask: Ask, ours: Told, theirs: Told, oracle: Oracle) -> bool:
    """Return whether two answers have the same tokens; of greedy ones, that either may be chosen where they part."""
    if ours.tensors is None or theirs.tensors is None:
        return False
    for beam in range(ours.tensors["output_ids"].shape[1]):
        mine, other = (tokens_of(ask, each.tensors or {}, beam) for each in (ours, theirs))
        row.tokens += len(mine)
        if mine == other:
            continue
        if ask.kind == "beams":
            scores = [(each.tensors or {})["cum_log_probs"][0] for each in (ours, theirs)]
            return float(np.abs(scores[0] - scores[1]).max()) < FP32_LIMIT
        if ask.kind != "greedy":
            return False
        place = next(at for at, pair in enumerate(zip(mine, other, strict=True)) if len({*pair}) == 2)
        chances = oracle.score(ask.prompt, mine[: place + 1])[-1]
        lost = float(chances.max() - torch.minimum(chances[mine[place]], chances[other[place]]))
        row.lost = max(row.lost, lost)
        row.wrong += lost > FP32_LIMIT
    return True
