"""Compare what the engine serves in fp32 with transformers, and with the CPU: for benchmarks.gpu.truth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.ops import latent_continued
from backends.fastertransformer.engine.ops.latent_continued import ContinuedRows
from backends.fastertransformer.engine.rows.prompt_lookup import PromptLookup
from backends.fastertransformer.engine.scheduling import speculation
from backends.fastertransformer.engine.scheduling.draft_costs import DraftCosts
from backends.fastertransformer.engine.scheduling.tuning import TUNING, Tuning

from .truth_adapters import Changes, oracles_of, with_adapters
from .truth_answers import FP32_LIMIT, Oracle, Row, are_same, check_answer, timed
from .truth_families import Shape, model_type_of
from .truth_models import tokens_of_letters
from .truth_requests import Ask, Told, draw_requests, serve, tokens_of
from .truth_served import AS_CPU, BURST, ROOMY, SMALL, TruthArguments, made, opened, served_in, tight
from .truth_ways import DRAFTS, WAYS, Way, is_tried

_WITHOUT_LIMITS = Tuning(draft_row_cost=0.0, draft_row_cost_cpu=0.0, draft_step_cost=0.0, acceptance_prior=0.9)
_SAMPLED_LIMIT = 0.03  # of requests that the CPU answers otherwise: a draw may fall at the edge of two tokens


def compare_fp32(arguments: TruthArguments, name: str, model: Any, shape: Shape, shards: Path) -> Iterator[Row]:
    """Serve in fp32 in each way."""
    config = read_config(shards, model_type_of(name), arguments.tensor_para_size)
    for label, way in WAYS.items():
        if label in arguments.ways and is_tried(name, config, way, arguments.is_on_cpu):
            yield _compare_way(arguments, name, model, shape, shards, label)


def _compare_way(arguments: TruthArguments, name: str, model: Any, shape: Shape, shards: Path, label: str) -> Row:
    way, ranks, device = WAYS[label], arguments.tensor_para_size, arguments.device
    is_encoder, served = model.config.is_encoder_decoder, served_in(way, shards)
    chosen, kv_bytes = draw_requests(shape, arguments.requests, 11, is_encoder), ROOMY
    if way.is_tight:
        chosen, kv_bytes = tight(name, shards, shape, arguments.requests, 14, way.drafts, ranks)
    given = [with_adapters(chosen, wave, not way.changes) if way.adapts else chosen for wave in range(2)]
    with ExitStack() as stack, timed(Row(name, f"fp32 {label}")) as row:
        oracles = {"": Oracle(model, device)}
        if way.adapts:
            oracles = stack.enter_context(oracles_of(model, served, device, torch.float32))
        with (
            drafting(way.drafts),
            continuing(way) as continued,
            closing(opened(arguments, served, name, "fp32", way, kv_bytes)) as engine,
        ):
            changes, waves = Changes(engine, served), list[list[Told]]()
            for wave, burst in enumerate((BURST, 0)):
                with drafted(chosen, waves[0]) if way.drafts == DRAFTS and waves else ExitStack():
                    before = partial(changes.before, given[wave]) if way.changes else None
                    waves.append(serve(engine, given[wave], burst, wave, before))
            row.preempted, row.accepted = engine.metrics.preemptions, engine.metrics.accepted_tokens
            row.found = engine.metrics.prefix_hits
        allowed = tokens_of_letters(shape.vocab).to(device)
        for ask, told in zip(chain(*given), chain(*waves), strict=True):
            check_answer(row, ask, told, oracles[ask.adapter], allowed)
        row.is_right = not (row.failed or row.wrong) and row.error < FP32_LIMIT
        row.is_right &= (row.accepted > 0) == bool(way.drafts) and bool(continued) == way.continues
        if label == "served" and not (arguments.is_on_cpu or is_encoder):  # a host keeps less
            row.is_right &= row.found > 0
    return row


@contextmanager
def drafting(drafts: str) -> Iterator[None]:
    """Let rows have drafts in every step, if there are any, whatever they cost."""
    with (
        mock.patch.object(speculation, "TUNING", _WITHOUT_LIMITS if drafts else TUNING),
        mock.patch.object(speculation, "DraftCosts", lambda _: DraftCosts(0.0)),
    ):
        yield


@contextmanager
def continuing(way: Way) -> Iterator[list[ContinuedRows]]:
    """Let even short chunks be continued in latent attention's plain form, where a way asks for it, and list them."""
    made = list[ContinuedRows]()
    if not way.continues:
        yield made
        return

    class Listed(ContinuedRows):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    few = mock.patch.multiple(latent_continued, LEAST_TOKENS=8, LEAST_PAIRS=1, _PIECE_BYTES=1 << 20)
    with few, mock.patch(f"{ContinuedRows.__module__.rpartition('.')[0]}.triton_latent.ContinuedRows", Listed):
        yield made


@contextmanager
def drafted(asks: list[Ask], told: list[Told]) -> Iterator[None]:
    """Draft what rows were answered before, but for each fifth token."""
    texts = {
        tuple(ask.prompt): tokens_of(ask, each.tensors) for ask, each in zip(asks, told, strict=True) if each.tensors
    }

    def draft(lookup: PromptLookup, most: int) -> list[int]:
        known = len(lookup.tokens) - lookup.begin
        found = texts.get(tuple(lookup.tokens[: lookup.begin]), [])[known : known + most]
        return [token ^ ((known + at) % 5 == 4) for at, token in enumerate(found)]

    with mock.patch.object(PromptLookup, "draft", draft):
        yield


def compare_devices(arguments: TruthArguments, name: str, directory: Path) -> Iterator[Row]:
    """Ask an engine on the CPU and one on the device the same, with room and without."""
    shape = SMALL
    model, shards = made(name, shape, directory, 1)
    oracle = Oracle(model, "cpu")
    asks, kv_bytes = tight(name, shards, shape, arguments.requests, 13)
    alone, served = TruthArguments(device="cpu"), WAYS["served"]
    with closing(opened(alone, shards, name, "fp32", served, 1 << 30)) as engine:
        expected = serve(engine, asks, BURST, 5)
    one = TruthArguments(device=arguments.device)
    for label, size in ((f"fp32 {AS_CPU}", ROOMY), (f"fp32 {AS_CPU}, tight", kv_bytes)):
        with timed(Row(name, label)) as row:
            with closing(opened(one, shards, name, "fp32", served, size)) as engine:
                told = serve(engine, asks, BURST, 6)
                row.preempted = engine.metrics.preemptions
            same = 0
            for ask, ours, theirs in zip(asks, told, expected, strict=True):
                row.requests += 1
                row.failed += ours.tensors is None or theirs.tensors is None or not ours.is_consistent
                same += are_same(row, ask, ours, theirs, oracle)
            row.as_cpu = f"{same} of {len(asks)}"
            row.is_right = not (row.failed or row.wrong) and same >= (1 - _SAMPLED_LIMIT) * len(asks)
        yield row
