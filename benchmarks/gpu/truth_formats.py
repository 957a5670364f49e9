"""Made-up models in other formats, and what these mean to transformers: the oracle of benchmarks.gpu.truth there."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backends.fastertransformer.engine.model.families import read_config
from export_scripts.arguments import ConvertArguments

from .truth_families import Shape, model_type_of
from .truth_fp8 import add_input_scales, meant_by_fp8, put_experts_into_arrays, rounding_inputs
from .truth_models import write_vocabulary
from .truth_predictors import PREDICTING

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp16 int8": torch.float16}
FP8 = ("bf16 fp8", "bf16 fp8_block")  # the directories that convert makes of a hub directory
AT_LOAD = "bf16 fp8_at_load"  # the hub directory, whose matrices become the same when they are loaded
# The first one, with a scale for each matrix's inputs: what that rounds, which 16 bits hide, and kernels of 16 bits.
STATIC = "fp32 fp8_static", "bf16 fp8_static"
ARRAYS = "bf16 fp8_arrays"  # the second one, whose experts are one array in each layer
MXFP4 = "bf16 mxfp4"
CACHE = "bf16 fp8_cache"
FORMATS |= dict.fromkeys((*FP8, AT_LOAD, STATIC[1], ARRAYS, MXFP4, CACHE), torch.bfloat16) | {STATIC[0]: torch.float32}
COMBINED = (
    *(f"{format} adapters" for format in ("bf16", "fp16 int8", *FP8, AT_LOAD, STATIC[1], MXFP4, CACHE)),
    *(f"{CACHE} {way}" for way in ("tight", "drafts_tight", "adapters_drafts_tight")),
    *("fp16 continued", "bf16 continued"),
)
"""Formats, and what is served in them."""
_IN_ARRAYS = ("qwen3_moe", "qwen3_next", "glm4_moe")  # whose published files have arrays


class Meant(NamedTuple):
    """A model in a format.

    Attributes:
        served: directory of it.
        exact: what it means, in fp32.
        loaded: makes transformers' own in the format's type of what was loaded so.
    """

    served: Path
    exact: Any
    loaded: Callable[[Any], Any] = lambda model: model


def formats_of(name: str, shards: Path, ranks: int) -> list[str]:
    """List the formats that a family is served in: what is refused by name is left out."""
    config = read_config(shards, model_type_of(name), ranks)
    has_arrays = bool(config.decoder and config.decoder.mixture and config.decoder.mixture.is_in_arrays)
    is_hub, has_latent = model_type_of(name) == "Llama", bool(config.decoder and config.decoder.latent)
    lacking = ("fp16 int8",) * config.has_experts + (*FP8, AT_LOAD) * (has_arrays or not is_hub)
    has_scales = is_hub and not (has_latent or config.has_experts or name.endswith(PREDICTING))
    lacking += (CACHE,) * (has_latent or not is_hub) + STATIC * (not has_scales)
    lacking += (ARRAYS,) * (name not in _IN_ARRAYS) + (MXFP4,) * (name != "gpt_oss")
    return [way for way in FORMATS if way not in lacking]


def in_other_format(way: str, model: Any, shape: Shape, shards: Path, ranks: int, folder: Path) -> Meant:
    """Write a model in a format, if a conversion does.

    Args:
        way: the format.
        model: transformers', in fp32.
        shape: of the model.
        shards: that are served in fp32.
        ranks: that have scales of their own for their parts of matrices.
        folder: for what is written; empty.
    """
    hub, beside = shards.parent / "hub", folder / "meant"
    if way in FP8:
        served = made_again(hub, folder / "served", way.partition(" ")[2], shape)
        return Meant(served, meant_by_fp8(served, beside))
    if way == ARRAYS:
        served = made_again(hub, folder / "served", "fp8_block", shape)
        exact = meant_by_fp8(served, beside)
        put_experts_into_arrays(served)
        return Meant(served, exact)
    if way in STATIC:
        served = made_again(hub, folder / "served", "fp8", shape)
        exact = meant_by_fp8(served, beside)
        scales = add_input_scales(served, exact, shape.vocab)
        rounding = partial(rounding_inputs, scales=scales)  # what is loaded again does not round, until it is told to
        return Meant(served, rounding(exact), rounding) if way != STATIC[0] else Meant(served, rounding(exact))
    if way == MXFP4:
        served = made_again(hub, folder / "served", way.partition(" ")[2], shape)
        return Meant(served, meant_by_mxfp4(served))
    if way == AT_LOAD:
        same = made_again(hub, folder / "same", "fp8", shape, "bf16")
        return Meant(made_again(hub, folder / "served", None, shape), meant_by_fp8(same, beside))
    if way == CACHE:
        return Meant(shards, model, with_rounded_cache)
    return Meant(shards, rounded_to_int8(model, ranks) if "int8" in way else model)


def made_again(hub: Path, served: Path, quantization: str | None, shape: Shape, data_type: str = "fp32") -> Path:
    """Convert a hub directory, quantized if that is asked for -> what is served."""
    from export_scripts.convert import convert

    given = {"format": "huggingface", "quantization": quantization}
    convert(ConvertArguments(hub, served, 1, data_type, **given))
    write_vocabulary(shape.vocab, served)
    return served


def in_format(model: Any, dtype: torch.dtype, directory: Path) -> Any:
    """Save a model, and load it as transformers does with a type: what is computed of positions stays fp32."""
    model.save_pretrained(directory)
    return type(model).from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def with_rounded_cache(model: Any) -> Any:
    """Let a model's attention round keys and values to FP8, by the least power of two that fits a head's numbers."""
    source: Any = sys.modules[type(model).__module__]
    attend = source.eager_attention_forward

    def rounded(x: Tensor) -> Tensor:
        largest = x.double().abs().amax(-1, keepdim=True).clamp_min(2.0**-100)  # of a head that is zero, any
        power = torch.exp2((largest / 448).log2().ceil())
        return ((x.double() / power).to(torch.float8_e4m3fn).double() * power).to(x.dtype)

    def attend_rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> Any:
        if getattr(module.config, "rounds_cache", False):  # others of its class may share the function
            key, value = rounded(key), rounded(value)
        return attend(module, query, key, value, *others, **more)

    source.eager_attention_forward = attend_rounded
    model.config.rounds_cache = True
    return model


_EXACT = "kv_b_proj"
"""Last word of the names of matrices that the engine keeps as they are."""


def meant_by_mxfp4(directory: Path) -> Any:
    """Load what a directory of MXFP4 means to transformers, in fp32."""
    import transformers

    how = transformers.Mxfp4Config(dequantize=True)  # type: ignore[no-untyped-call]
    given = {"dtype": torch.bfloat16, "quantization_config": how}
    read = transformers.AutoModelForCausalLM.from_pretrained(directory, **given)
    # A model of its own: what is saved of the one that was read is MXFP4 again, in part.
    config = copy.deepcopy(read.config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    return model.eval()


_ROW_PARALLEL = ("c_proj", "out_proj", "o_proj", "dense", "dense_4h_to_h", "fc2", "fc_out", "down_proj", "wo", "o")
"""Last word of the names of matrices whose inputs the ranks share, in transformers' classes."""


def rounded_to_int8(model: Any, ranks: int = 1) -> Any:
    """Copy a model as fp16, and its layers' matrices and its head as int8 with a scale for each output channel.

    Each rank has scales of its own for its part of a matrix. Numbers are fp32 again in the copy.
    """
    from transformers.pytorch_utils import Conv1D

    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # an embedding that is tied to it is not rounded
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and not name.endswith(_EXACT):
            inputs = 0 if isinstance(module, Conv1D) else 1
            is_cut = name.rpartition(".")[2] in _ROW_PARALLEL
            parts = module.weight.data.chunk(ranks if is_cut else 1, inputs)
            module.weight.data = torch.cat([_rounded(part, inputs) for part in parts], inputs)
    return model


def _rounded(weight: torch.Tensor, inputs: int) -> torch.Tensor:
    scale = (weight.abs().amax(inputs, keepdim=True) / 127).clamp(min=1e-30)
    return (weight / scale).round() * scale
