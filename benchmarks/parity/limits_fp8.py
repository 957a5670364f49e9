"""Hold parity's limits against sound and damaged directories, as ``benchmarks.parity.limits`` does against shards.

    python3 -m benchmarks.parity.limits_fp8 --csv=fp8.csv          # FP8's formats, the trained model and a made-up one
    python3 -m benchmarks.parity.limits_fp8 --models='["llama_demo"]' --formats='["fp8"]' --part='[0, 4]'
    python3 -m benchmarks.parity.limits_fp8 --models='["sinks", "states"]' --formats='["fp16"]' --device=cuda

Models are directories of Hugging Face: the demonstration ``llama_demo``, and those of ``planted_hub``, with defects of
their own in fp32, bf16 and fp16. In FP8's formats they are of bf16, and what is not a Llama has no defects. The
engine of this process makes their matrices, or its cache, FP8, so that a defect that is planted in the directory passes
through the rounding; those of FP8 itself are planted in the engine. Activations are rounded on a GPU alone where they
are served; here a CPU rounds them too.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from torch import Tensor

from backends.fastertransformer.engine import loading
from backends.fastertransformer.engine.cache.fp8_entries import pack
from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.model import hub_reader, weights
from backends.fastertransformer.engine.ops import cached_attention
from backends.fastertransformer.engine.ops.fp8 import quantized
from backends.fastertransformer.engine.settings import Settings
from benchmarks.parity.damages import Family
from benchmarks.parity.limits import LENGTH, PARITY, PROMPTS, Row, ask, compare_passages, judge, line, write
from benchmarks.parity.models import DEMO
from benchmarks.parity.planted_hub import COMMON, HEADS, MODELS, VOCAB, change_tensors, halves, swap_tensors
from evaluation.client.tokenizer import load_tokenizer
from evaluation.parity.arguments import FP8_ACTIVATIONS, FP8_CACHE, HUGGING_FACE
from evaluation.parity.distances import joined
from evaluation.parity.formats import Formats
from evaluation.parity.numbers import compare_numbers
from evaluation.parity.references import HuggingFaceReference, open_reference
from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.user_files import NOTHING_GIVEN
from export_scripts.convert import convert
from ft_format.weight_format import find_format
from handover.arguments import ScriptArguments
from handover.errors import exit_status

_TRAINED, _SOUND = "llama_demo", "sound"
_LLAMA = DEMO.parents[1] / _TRAINED / "checkpoints" / f"{_TRAINED}.nemo"
_PLAIN = ("fp32", "fp16", "bf16")
FORMATS: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN},
    FP8_CACHE: {"has_fp8_cache": True},
    "fp8_block": {"quantization": "fp8_block"},
    "fp8": {"quantization": "fp8"},
    FP8_ACTIVATIONS: {"quantization": "fp8", "rounds_activations": True},
}
_OF_FP8 = tuple(name for name in FORMATS if name not in _PLAIN)


@dataclass(frozen=True)
class Fp8LimitsArguments(ScriptArguments):
    """What is looked at."""

    models: tuple[str, ...] = field(default=(_TRAINED, "angles"), metadata={"help": "JSON list"})
    formats: tuple[str, ...] = field(default=("bf16", *_OF_FP8), metadata={"help": "JSON list; fp32 and fp16 too"})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda, for what is served"})
    part: tuple[int, ...] = field(default=(0, 1), metadata={"help": "JSON [i, n]: every nth state from the ith on"})
    most_passages: int = field(
        default=512, metadata={"help": "evaluation.parity.max_passages; 48 takes a tenth as long"}
    )
    csv: Path | None = field(default=None, metadata={"help": "file to write"})


def _heads_swapped(x: Tensor) -> Tensor:
    heads = x.view(HEADS, -1, x.shape[1])
    return heads[[1, 0, *range(2, HEADS)]].view(x.shape)


IN_FILES: dict[str, Callable[[Path], None]] = {
    **COMMON,
    "q of two heads swapped": change_tensors(r"q_proj\.weight", _heads_swapped),
    "k_proj: halves swapped": change_tensors(r"k_proj\.weight", halves),
    "v_proj: halves swapped": change_tensors(r"v_proj\.weight", halves),
    "gate and up swapped": swap_tensors("gate_proj", "up_proj"),
    "up_proj: halves swapped": change_tensors(r"up_proj\.weight", halves),
    "o_proj transposed": change_tensors(r"o_proj\.weight", lambda x: x.T),
    "down_proj x 1.02": change_tensors(r"down_proj\.weight", lambda x: 1.02 * x),
    "input norm x 1.10": change_tensors(r"input_layernorm\.weight", lambda x: 1.1 * x),
    "post-attention norm x 1.02": change_tensors(r"post_attention_layernorm\.weight", lambda x: 1.02 * x),
    "final norm x 1.02": change_tensors(r"model\.norm\.weight", lambda x: 1.02 * x),
    "down_proj: a row in 16 zeroed": change_tensors(
        r"down_proj\.weight", lambda x: x * (torch.arange(len(x)) % 16 > 0)[:, None]
    ),
}


def _scaled(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
    """Let the scales of every matrix be others than its numbers were made with."""

    def wrongly(*given: Any) -> tuple[Tensor, Tensor]:
        numbers, grid = quantized(*given)
        return numbers, change(grid)

    return mock.patch.object(hub_reader, "quantized", wrongly)


def _kept(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
    """Let the cache keep other numbers than it is given."""
    return mock.patch.object(cached_attention, "pack", lambda x: pack(change(x)))


_OF_WEIGHTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "scales of the next row": lambda: _scaled(lambda grid: grid.roll(1, 0)),
    "scales x 1.02": lambda: _scaled(lambda grid: 1.02 * grid),
    "scales of all are the first": lambda: _scaled(lambda grid: grid[:1, :1].expand(grid.shape).clone()),
}
_OF_CACHE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "cache: numbers x 1.2": lambda: _kept(lambda x: 1.2 * x),
    "cache: scales of the next head": lambda: _kept(
        lambda x: x * (x.abs().amax(-1, keepdim=True).roll(1, -2) / x.abs().amax(-1, keepdim=True)).nan_to_num(1)
    ),
    "cache: cut off at 448 / 64": lambda: _kept(lambda x: x.clamp(-0.5, 0.5)),
}


def main(argv: Sequence[str]) -> None:
    """Print a row for each model, format and state; the last line counts what is wrong."""
    arguments = Fp8LimitsArguments.from_argv(argv, description=__doc__)
    rows: list[Row] = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as directory:
            for row in _look_at(name, arguments, Path(directory)):
                rows.append(row)
                sys.stdout.write(f"{line(row)}\n")
                sys.stdout.flush()
                write(arguments.csv, rows)
    sys.stdout.write(f"{sum(row.by_all != row.should for row in rows)} of {len(rows)} verdicts are wrong\n")


def _look_at(name: str, arguments: Fp8LimitsArguments, directory: Path) -> Iterator[Row]:
    source = directory / "source"
    if name == _TRAINED:
        convert(ConvertArguments(_LLAMA, source, 1, "fp32", format="huggingface"))
    else:
        MODELS[name].save(source)
    known = open_source(find_archive(source, NOTHING_GIVEN), for_shards=False)
    reference = open_reference(source, HUGGING_FACE, directory / "scratch")[0]
    assert isinstance(reference, HuggingFaceReference)
    parity = yaml.safe_load(PARITY.read_text("utf-8"))["parity"] | {"max_passages": arguments.most_passages}
    if name == _TRAINED:
        tokenizer = load_tokenizer(source)
        prompts = [tokenizer.encode(text) for text in parity["prompts"]]
    else:
        prompts = np.random.default_rng(1).integers(2, VOCAB, (PROMPTS, LENGTH)).tolist()
    family = Family("Llama", 6, None, *[""] * 4)
    for number_format in arguments.formats:
        ways, data_type = FORMATS[number_format], number_format if number_format in _PLAIN else "bf16"
        served = directory / data_type
        if not served.is_dir():
            convert(ConvertArguments(source, served, 1, data_type, format="huggingface"))
        defects = IN_FILES if name == _TRAINED or MODELS[name].architecture == "Llama" else {}
        if name != _TRAINED and number_format in _PLAIN:
            defects = {**defects, **MODELS[name].defects}
        first, every = arguments.part
        for state, damage, patch in list(_states(ways, defects))[first::every]:
            damaged = shutil.copytree(served, directory / "damaged")
            damage(damaged)
            settings = Settings(damaged, 1, 1, data_type, 1, "Llama", kv_cache_bytes=1 << 28, **ways)
            with patch(), _rounding() if "rounds_activations" in ways else nullcontext():
                engine = open_engine(settings, torch.device(arguments.device))
                answers = ask(engine, family, prompts)
                others = tuple(each for each in (FP8_CACHE, FP8_ACTIVATIONS) if each == number_format)
                formats = Formats(data_type, data_type, find_format(0, ways.get("quantization")), others=others)
                findings, alike = compare_passages(engine, family, reference, formats, parity)
                engine.close()
            findings = joined(compare_numbers(known, damaged, reference.model), findings)
            shutil.rmtree(damaged)
            limits = parity["limits"][number_format]
            given = (answers, findings, reference, limits, state == _SOUND, alike)
            yield judge((name, number_format, state), *given)


@contextmanager
def _rounding() -> Iterator[None]:
    """Let a CPU keep matrices as FP8, as where their products do not fit, and round what they are multiplied with."""
    rooms = iter([0])
    with (
        mock.patch.object(loading, "_check_rounding"),
        mock.patch.object(weights, "free_bytes", lambda device: next(rooms, 1 << 40)),
    ):
        yield


def _states(
    ways: dict[str, Any], defects: Mapping[str, Callable[[Path], None]]
) -> Iterator[tuple[str, Callable[[Path], None], Callable[[], Any]]]:
    """Name each state, with what is done to the directory and to the engine."""
    yield _SOUND, lambda directory: None, nullcontext
    for name, damage in defects.items():
        yield name, damage, nullcontext
    of_engine = {**(_OF_WEIGHTS if "quantization" in ways else {}), **(_OF_CACHE if "has_fp8_cache" in ways else {})}
    for name, patch in of_engine.items():
        yield name, lambda directory: None, patch


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "limits_fp8"))
