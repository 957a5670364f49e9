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
that a drawn one is among the top k, and that no bad word comes. In fp32 several ways of serving are tried: "served"
with chunks and prefix cache, "whole" without either, "tight" with a KV cache so small that rows are set back; "drafts"
for every row in every step: looked up, and then what the first answer had, some tokens wrong. Where a family can, the
model itself drafts too ("draft_model"), its predictor ("mtp"), or an EAGLE-3 head ("eagle3"). In "adapters" requests of
some families name LoRA adapters by turns, more than there are places for; transformers' layers add the same products.
In "adapters_changed" adapters are unloaded while rows have them, and others are loaded under their names. Words that
are joined ("adapters_mtp_tight") are tried at once. Behind a format stands a way of serving it: "bf16 fp8 adapters".

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
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from handover.errors import SlipwayError, exit_status

from .truth_answers import Row
from .truth_errors import compare_format, tried_formats
from .truth_fp32 import compare_devices, compare_fp32
from .truth_served import AS_CPU, LARGE, TINY, TruthArguments, made
from .truth_ways import WAYS

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
            labels = tried_formats(arguments, name, shards)
            return [compare_format(arguments, name, label, model, shape, shards) for label in labels]
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
