"""Compare what the engine serves under load with transformers, and a GPU with a CPU: tokens and log-probabilities.

    python3 -m benchmarks.gpu.truth                                  # every family, on the first GPU
    python3 -m benchmarks.gpu.truth --gpus=4 --jobs=10               # over four of them, ten at a time on each
    python3 -m benchmarks.gpu.truth --families='["mistral"]' --tensor-para-size=2
    python3 -m benchmarks.gpu.truth --formats='["fp32"]' --ways='["adapters", "drafts"]'
    python3 -m benchmarks.gpu.truth --device=cpu --requests=24       # a small form of it, without a GPU

A made-up model of each family is converted and served as any model is: requests of every kind (greedy, drawn, beams,
penalties, words, a grammar; half of them streamed) come in small bursts, and then all at once, when their beginnings
are known. Each generated token is compared with transformers' forward pass over the same text on the same device: the
log-probability of the token, for any kind of request; that a greedy token is the argmax (of what a grammar allows),
that a drawn one is among the top k, and that no bad word comes. In fp32 three ways of serving are tried: "served" with
chunks and prefix cache, "whole" without either, "tight" with a KV cache so small that rows are set back, and "drafts"
as served, with drafts for every row in every step: looked up, and then what the first answer had, some tokens wrong.
Where a family can, the model itself drafts too ("draft_model"), its predictor ("mtp"), or an EAGLE-3 head ("eagle3").
In "adapters", and with little cache in "adapters_tight", requests of some families name LoRA adapters by turns, more
than there are places for; transformers' model has each merged.

Where two experts are as good as equal to a router, rounding chooses. An answer that is beyond a limit is compared again
with transformers' model whose routers see their inputs changed by some 1e-6 of themselves: if one of these draws gives
its log-probabilities, within the same limits, the answer is "tied" and right.

In 16 bits, int8, FP8 and MXFP4 the oracle is transformers in fp32, with the matrices rounded in the same way (and what
they are multiplied with, where the files have scales for that); the error is the root mean square of the
log-probabilities' differences beside that of transformers in the same format. Where the files have scales for what
matrices are multiplied with, all is in fp32, beside transformers that does not round it.

"as the CPU" are requests of which an engine on the device gives the tokens that one on the CPU gives, in fp32, with a
smaller model; greedy tokens and beams that are within rounding of each other count as equal.
A line of a Markdown table for each family and way; exit status 1 where a number is out of its limit.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager, nullcontext
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from backends.fastertransformer.engine.rows.prompt_lookup import PromptLookup
from backends.fastertransformer.engine.scheduling import speculation
from backends.fastertransformer.engine.scheduling.draft_costs import DraftCosts
from backends.fastertransformer.engine.scheduling.tuning import TUNING, Tuning
from handover.errors import SlipwayError, exit_status

from .truth_adapters import oracles_of, with_adapters
from .truth_answers import FP32_LIMIT, Oracle, Row, are_same, check_answer, timed
from .truth_formats import FORMATS, STATIC, formats_of, in_format, in_other_format
from .truth_models import Shape, tokens_of_letters
from .truth_requests import Ask, Told, draw_requests, serve, tokens_of
from .truth_served import (
    ADAPTERS_TIGHT,
    ADAPTING,
    AS_CPU,
    DRAFTING,
    DRAFTS,
    LARGE,
    ROOMY,
    SMALL,
    TINY,
    WAYS,
    TruthArguments,
    is_tried,
    made,
    opened,
    served_in,
    tight,
)

_WITHOUT_LIMITS = Tuning(draft_row_cost=0.0, draft_row_cost_cpu=0.0, draft_step_cost=0.0, acceptance_prior=0.9)
_RATIO_LIMIT = 1.5  # of the error in another format to transformers' own
_STATIC_LIMIT = 0.5  # of that to what no rounding does: a number at the edge of two may become either
_SAMPLED_LIMIT = 0.03  # of requests that the CPU answers otherwise: a draw may fall at the edge of two tokens
_BURST = 8


def compare_fp32(arguments: TruthArguments, name: str, model: Any, shape: Shape, shards: Path) -> Iterator[Row]:
    """Serve in fp32 in each way."""
    plain, allowed = Oracle(model, arguments.device), tokens_of_letters(shape.vocab).to(arguments.device)
    asks = draw_requests(shape, arguments.requests, 11, model.config.is_encoder_decoder)
    for way in [way for way in WAYS if way in arguments.ways and is_tried(arguments, name, shards, way)]:
        served = served_in(way, shards)
        oracles = oracles_of(model, served, arguments.device) if way in ADAPTING else {"": plain}
        with timed(Row(name, f"fp32 {way}")) as row:
            chosen, kv_bytes = asks, ROOMY
            if way in ("tight", ADAPTERS_TIGHT):
                chosen, kv_bytes = tight(name, shards, shape, arguments.requests, 14, arguments.tensor_para_size)
            given = [with_adapters(chosen, wave) if way in ADAPTING else chosen for wave in range(2)]
            with (
                mock.patch.object(speculation, "TUNING", _WITHOUT_LIMITS if way in DRAFTING else TUNING),
                mock.patch.object(speculation, "DraftCosts", lambda _: DraftCosts(0.0)),
                closing(opened(arguments, served, name, row.way, kv_bytes)) as engine,
            ):
                waves = list[list[Told]]()
                for wave, burst in enumerate((_BURST, 0)):
                    with drafted(chosen, waves[0]) if way == DRAFTS and waves else nullcontext():
                        waves.append(serve(engine, given[wave], burst, wave))
                row.preempted, row.accepted = engine.metrics.preemptions, engine.metrics.accepted_tokens
                row.found = engine.metrics.prefix_hits
            for ask, told in zip(chain(*given), chain(*waves), strict=True):
                check_answer(row, ask, told, oracles[ask.adapter], allowed)
            row.is_right = not (row.failed or row.wrong) and row.error < FP32_LIMIT
            row.is_right &= (row.accepted > 0) == (way in DRAFTING)
            if way == "served" and not (arguments.is_on_cpu or model.config.is_encoder_decoder):  # a host keeps less
                row.is_right &= row.found > 0
        yield row


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


def compare_format(arguments: TruthArguments, name: str, way: str, model: Any, shape: Shape, shards: Path) -> Row:
    """Serve in another format, and compare the errors of log-probabilities with transformers' own."""
    ranks = 1 if arguments.is_on_cpu else arguments.tensor_para_size  # a CPU's are one process
    meant = in_other_format(way, model, shape, shards, ranks)
    oracle = Oracle(meant.exact, arguments.device)
    asks = draw_requests(shape, arguments.requests // 2, 12, model.config.is_encoder_decoder)
    asks = [ask for ask in asks if ask.kind != "beams"]
    with timed(Row(name, way)) as row:
        with closing(opened(arguments, meant.served, name, way)) as engine:
            told = serve(engine, asks, _BURST, 3)
        theirs_in = in_format(meant.exact, FORMATS[way], shards.parent / "rounded")
        rounded = Oracle(meant.loaded(theirs_in), arguments.device)
        ours, theirs = list[float](), list[float]()
        for ask, answer in zip(asks, told, strict=True):
            row.requests += 1
            if answer.tensors is None or not answer.is_consistent:
                row.failed += 1
                continue
            tokens = tokens_of(ask, answer.tensors)
            row.tokens += len(tokens)
            places = torch.tensor(tokens, device=arguments.device)[:, None]
            own, other = (each.score(ask.prompt, tokens).gather(1, places)[:, 0] for each in (oracle, rounded))
            given = torch.from_numpy(answer.tensors["output_raw_log_probs"][0, 0, : len(tokens)]).to(own.device)
            ours += (given - own).tolist()
            theirs += (other - own).tolist()
            row.wrong += len({*tokens} & {*ask.bad})
        row.error = float(np.sqrt(np.mean(np.square(ours))))
        row.ratio = row.error / float(np.sqrt(np.mean(np.square(theirs))))
        limit = _STATIC_LIMIT if way == STATIC[0] else _RATIO_LIMIT
        row.is_right = not (row.failed or row.wrong) and row.ratio < limit
    return row


def compare_devices(arguments: TruthArguments, name: str, directory: Path) -> Iterator[Row]:
    """Ask an engine on the CPU and one on the device the same, with room and without."""
    shape = SMALL
    model, shards = made(name, shape, directory, 1)
    oracle = Oracle(model, "cpu")
    asks, kv_bytes = tight(name, shards, shape, arguments.requests, 13)
    alone = TruthArguments(device="cpu")
    with closing(opened(alone, shards, name, "fp32 served", 1 << 30)) as engine:
        expected = serve(engine, asks, _BURST, 5)
    one = TruthArguments(device=arguments.device)
    for label, size in ((f"fp32 {AS_CPU}", ROOMY), (f"fp32 {AS_CPU}, tight", kv_bytes)):
        with timed(Row(name, label)) as row:
            with closing(opened(one, shards, name, "fp32 served", size)) as engine:
                told = serve(engine, asks, _BURST, 6)
                row.preempted = engine.metrics.preemptions
            same = 0
            for ask, ours, theirs in zip(asks, told, expected, strict=True):
                row.requests += 1
                row.failed += ours.tensors is None or theirs.tensors is None or not ours.is_consistent
                same += are_same(row, ask, ours, theirs, oracle)
            row.as_cpu = f"{same} of {len(asks)}"
            row.is_right = not (row.failed or row.wrong) and same >= (1 - _SAMPLED_LIMIT) * len(asks)
        yield row


_FP32, _OTHERS, _DEVICES = range(3)
"""What of a family is compared in one piece: the pieces run beside each other."""


def compare(arguments: TruthArguments, name: str, piece: int) -> list[Row]:
    """Compare a piece of one family."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    shape = TINY if arguments.is_on_cpu else LARGE
    try:
        with tempfile.TemporaryDirectory(prefix="slipway-truth-") as temporary:
            if piece == _DEVICES:
                return [*compare_devices(arguments, name, Path(temporary))]
            model, shards = made(name, shape, Path(temporary), arguments.tensor_para_size)
            if piece == _FP32:
                return [*compare_fp32(arguments, name, model, shape, shards)]
            ways = formats_of(arguments.formats, name, shards, arguments.tensor_para_size)
            return [compare_format(arguments, name, way, model, shape, shards) for way in ways]
    except Exception as error:
        return [Row(name, f"failed: {error}"[:300], is_right=False)]


def pieces_of(arguments: TruthArguments) -> list[int]:
    """Return which pieces there are of a family."""
    has_fp32, is_alone = "fp32" in arguments.formats, arguments.tensor_para_size == 1 and not arguments.is_on_cpu
    asked = {
        _FP32: has_fp32 and {*arguments.ways} & {*WAYS},
        _OTHERS: {*arguments.formats} - {"fp32"},
        _DEVICES: has_fp32 and AS_CPU in arguments.ways and is_alone,
    }
    return [piece for piece, some in asked.items() if some]


def _take_gpus(free: Any) -> None:
    """Let a process see the GPUs that are its own."""
    os.environ["CUDA_VISIBLE_DEVICES"] = free.get()


def _shared_out(arguments: TruthArguments) -> list[str]:
    """List which GPUs each process sees."""
    if arguments.is_on_cpu:
        return [""] * arguments.jobs
    ranks = arguments.tensor_para_size
    most, told = max(arguments.gpus, ranks), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = told.split(",") if told else [str(number) for number in range(torch.cuda.device_count())]
    if len(names) < most:
        raise SlipwayError(f"{len(names)} GPUs are visible, and {most} are asked for", "pass less as --gpus")
    groups = [",".join(names[first : first + ranks]) for first in range(0, most - ranks + 1, ranks)]
    return groups * arguments.jobs


def main(argv: Sequence[str]) -> None:
    """Compare all; a difference is an error."""
    arguments = TruthArguments.from_argv(argv, description=__doc__)
    names = [each.name for each in fields(Row)]
    sys.stdout.write(f"| {' | '.join([*names[:-1], ''])} |\n|{' --- |' * len(names)}\n")
    wrong, groups = 0, _shared_out(arguments)
    context = multiprocessing.get_context("spawn")
    free = context.Queue()
    for group in groups:
        free.put(group)
    tasks = [(name, piece) for piece in pieces_of(arguments) for name in arguments.families]
    with ProcessPoolExecutor(len(groups), context, _take_gpus, (free,)) as pool:
        for done in as_completed([pool.submit(compare, arguments, *task) for task in tasks]):
            for row in done.result():
                sys.stdout.write(row.cells())
                wrong += not row.is_right
            sys.stdout.flush()
    if wrong:
        raise SlipwayError(f"{wrong} rows are not what transformers gives", "see the lines above")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu.truth"))
