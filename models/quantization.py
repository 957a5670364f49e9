"""How ``config.json`` says that weights are quantized: as FP8 or MXFP4, which are read, or in a way that is not.

Keys: transformers, ``utils/quantization_config.py``; compressed-tensors, ``quantization/quant_config.py`` and
``quant_args.py``; ModelOpt, ``hf_quant_config.json``. Which layers are left out is not read: these have no scales.
Embedding, head, routers, gates, norms, biases and the small tensors of recurrent layers are not quantized here, as they
are not in the files that DeepSeek, Qwen and llm-compressor publish.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from models.architecture import beyond
from models.checks import Checks, Refusal, shown
from models.errors import ModelError

QUANTIZATION, TEXT = "quantization_config", "text_config"
MODELOPT_FILE = "hf_quant_config.json"
FP8, MXFP4 = "FP8", "MXFP4"
Block = tuple[int, int]
"""Rows and columns of a weight that have one scale; 0: all of them."""
TENSOR: Block = (0, 0)
CHANNEL: Block = (1, 0)
LAYER = re.compile(r"(^|\.)layers\.\d+\.")
"""In the names of the tensors of layers."""
_STAY = {
    *("gate", "router", "shared_expert_gate"),  # they choose experts
    *("embed_tokens", "head", "eh_proj"),  # of layers that predict further tokens
    *("conv1d", "in_proj_a", "in_proj_b", "in_proj_ba", "dt_proj", "x_proj"),  # of recurrent layers
}
"""Last words of modules in layers that are not quantized."""
_HINT = (
    "read are FP8 (quant_method fp8, fbgemm_fp8, modelopt, and compressed-tensors with float-quantized) and mxfp4; "
    "give the model that this one was made from, or dequantize it first"
)
_LAYERS = ("quant_method", "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "dequantize")
_ACTIVATIONS = ("kv_cache_scheme", "kv_cache_quant_algo", "activation_scheme", "activation_scale_ub")
"""Keys that say which layers are meant, which scales show, and how activations are rounded, which a conversion leaves.
"""
DYNAMIC, STATIC = "dynamic", "static"
_KEYS = {
    "fp8": ("weight_block_size", "fmt", "scale_fmt", "modules_to_convert", "expert_dtype"),
    "fbgemm_fp8": (),
    "modelopt": ("quant_algo", "config_groups", "producer"),
    "compressed-tensors": (
        *("config_groups", "format", "quantization_status", "global_compression_ratio", "sparsity_config"),
        *("transform_config", "moe_sparsity_config", "version"),
    ),
    "mxfp4": ("use_kernels",),
}
"""By method, beside those of all."""
_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")
_WEIGHT_KEYS = (
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
    *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
)
_FORMATS = ((None, "float-quantized", "naive-quantized"), "only float-quantized is read")
_ALGORITHMS = {"FP8": TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL}
Limits = Mapping[str, tuple[Iterable[Any], str]]
_LIMITS: Mapping[str, Limits] = {
    "fp8": {
        "expert_dtype": ((None, "fp8"), "experts of FP4 are not read"),
        "activation_scheme": ((None, DYNAMIC, STATIC), "activations are rounded so or so"),
    },
    "modelopt": {"quant_algo": (tuple(_ALGORITHMS), f"read are {' and '.join(_ALGORITHMS)}")},
    "compressed-tensors": {
        "format": ((*_FORMATS[0], "mixed-precision"), _FORMATS[1]),
        "quantization_status": ((None, "compressed"), "its weights are not those that the scales are for"),
        "sparsity_config": ((None, {}, {"format": "dense"}), "sparse weights are packed"),
        "transform_config": ((None, {}), "activations are rotated"),
        "moe_sparsity_config": ((None,), "experts are left out"),
    },
}
_WEIGHT_LIMITS: Limits = {
    "type": (("float",), "whole numbers are not read"),
    "num_bits": ((8,), "floating-point numbers of 8 bits are read"),
    "symmetric": ((True,), "there is no zero point"),
    "actorder": ((None, False), "columns lie in their own order"),
    "dynamic": ((None, False), "weights have scales in the files"),
}
_GROUP_LIMITS: Limits = {"format": _FORMATS, "output_activations": ((None,), "outputs of layers are rounded")}
_STATIC_LIMITS: Limits = {**_WEIGHT_LIMITS, "strategy": (("tensor",), "a static scale is one for all activations")}


@dataclass(frozen=True)
class Quantization:
    """How weights are stored.

    Attributes:
        kind: FP8 or MXFP4.
        method: as ``quant_method`` calls it.
        blocks: that a weight's scales may be for.
        activations: how what weights are multiplied with is rounded: DYNAMIC, by scales of its own or not at all;
            STATIC, by one scale that lies beside the weight; or some in this way and some in that.
        has_cache_scales: whether scales of keys and values may be there.
    """

    kind: str
    method: str
    blocks: tuple[Block, ...]
    activations: frozenset[str] = frozenset({DYNAMIC})
    has_cache_scales: bool = False


def stays(name: str) -> bool:
    """Return whether a tensor is none of those that are quantized, whatever its shape is."""
    return not LAYER.search(name) or name.removesuffix(".weight").rpartition(".")[2] in _STAY


def quantization_said(config: Mapping[str, Any], beside: Mapping[str, Any], where: str, error: Refusal) -> Any:
    """Find what ``config.json`` says of it: at its top or, in some models that see images, in ``text_config``.

    If it says nothing, what ModelOpt's file beside it says, which may be empty.

    Raises:
        The error: it says two things.
    """
    text = config.get(TEXT)
    whole, nested = config.get(QUANTIZATION), text.get(QUANTIZATION) if isinstance(text, Mapping) else None
    if whole and nested and whole != nested:
        raise error(
            f"{where}: {QUANTIZATION} and {TEXT}.{QUANTIZATION} of config.json differ",
            "which one the files follow cannot be told: keep that one",
        )
    if not (whole or nested) and (own := beside.get("quantization")):
        return {"quant_method": "modelopt", **own} if isinstance(own, Mapping) else own
    return whole or nested


def read_quantization(said: Any, where: str, error: Refusal) -> Quantization:
    """Read the value of ``quantization_config``.

    Raises:
        The error: a method that is not read, or a key that changes it.
    """
    method = said.get("quant_method") if isinstance(said, Mapping) else said
    if not isinstance(said, Mapping) or method not in _KEYS:
        raise error(f"{where} is quantised ({shown(method)})", _HINT)
    problems = _problems(said, (*_LAYERS, *_ACTIVATIONS, *_KEYS[method]), _LIMITS.get(method, {}), QUANTIZATION)
    blocks = _BLOCKS[method](said, problems) if not problems else ()
    if problems:
        raise error(f"{where} is quantised ({method}) in a way that is not read\n  " + "\n  ".join(problems), _HINT)
    has_cache_scales = any(said.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo"))
    kind = MXFP4 if method == "mxfp4" else FP8
    return Quantization(kind, str(method), blocks, frozenset(_activations(method, said)), has_cache_scales)


def _activations(method: str, said: Mapping[str, Any]) -> Iterator[str]:
    """Yield how activations are rounded, for each group of layers."""
    if method == "compressed-tensors":
        yield from (STATIC if _static_inputs(group) else DYNAMIC for group in said["config_groups"].values())
    elif method == "modelopt":
        yield STATIC if said.get("quant_algo") == "FP8" else DYNAMIC
    elif method == "fp8":
        yield said.get("activation_scheme") or DYNAMIC
    else:
        yield DYNAMIC


def _static_inputs(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a group of compressed-tensors says of inputs that have a scale in the files; empty: they have none.

    A group that does not say whether it is dynamic is not.
    """
    inputs = group.get("input_activations")
    if not isinstance(inputs, Mapping) or inputs.get("dynamic") not in (None, False):
        return {}
    return {"type": "int", "strategy": "tensor", **inputs}


def _problems(said: Mapping[str, Any], known: Iterable[str], limits: Limits, where: str) -> list[str]:
    """List keys without a reader and values that are not followed, one line each."""
    unknown = [f"{key}: {shown(said[key])}  (what it changes is not known)" for key in said if key not in set(known)]
    return [f"{where}.{problem}" for problem in (*unknown, *beyond(limits, said))]


def _of_fp8(said: Mapping[str, Any], problems: list[str]) -> tuple[Block, ...]:
    """Read ``weight_block_size``; transformers takes 128 x 128 where it is not said, and one scale where it is null."""
    size = said.get("weight_block_size", [128, 128])
    if size is None:
        return (TENSOR, CHANNEL)
    blocks = _block(size, f"{QUANTIZATION}.weight_block_size", problems)
    return blocks if "weight_block_size" in said else (*blocks, TENSOR, CHANNEL)


def _of_groups(said: Mapping[str, Any], problems: list[str]) -> tuple[Block, ...]:
    """Read the groups of compressed-tensors: each has layers and says how their weights are stored."""
    groups, blocks = said.get("config_groups"), list[Block]()
    for name, group in groups.items() if isinstance(groups, Mapping) else [("", groups)]:
        where = f"{QUANTIZATION}.config_groups.{name}"
        if not isinstance(group, Mapping) or not isinstance(weights := group.get("weights"), Mapping):
            problems.append(f"{where}: {shown(group)}  (it does not say how its weights are stored)")
            continue
        problems += _problems(group, _GROUP_KEYS, _GROUP_LIMITS, where)
        problems += _problems({"type": "int", **weights}, _WEIGHT_KEYS, _WEIGHT_LIMITS, f"{where}.weights")
        if given := _static_inputs(group):
            problems += _problems(given, _WEIGHT_KEYS, _STATIC_LIMITS, f"{where}.input_activations")
        elif not isinstance(inputs := group.get("input_activations"), Mapping | None):
            problems.append(f"{where}.input_activations: {shown(inputs)}  (it is an object)")
        strategy = weights.get("strategy")
        if strategy in ("tensor", "channel"):
            blocks.append(TENSOR if strategy == "tensor" else CHANNEL)
        elif strategy == "block":
            blocks += _block(weights.get("block_structure"), f"{where}.weights.block_structure", problems)
        elif strategy == "group":
            blocks += _block([1, weights.get("group_size")], f"{where}.weights: rows and group_size", problems)
        else:
            problems.append(f"{where}.weights.strategy: {shown(strategy)}  (tensor, channel, block and group are read)")
    return tuple(dict.fromkeys(blocks))


def _block(size: Any, where: str, problems: list[str]) -> tuple[Block, ...]:
    """Read rows and columns of a block."""
    try:
        rows, columns = (Checks(ModelError).positive(each, where) for each in size)
    except (ModelError, TypeError, ValueError):
        problems.append(f"{where}: {shown(size)}  (rows and columns of a block are two positive numbers)")
        return ()
    return ((rows, columns),)


_BLOCKS: Mapping[str, Callable[[Mapping[str, Any], list[str]], tuple[Block, ...]]] = {
    "fp8": _of_fp8,
    "fbgemm_fp8": lambda said, problems: (CHANNEL,),
    "modelopt": lambda said, problems: (_ALGORITHMS[said["quant_algo"]],) if "quant_algo" in said else (),
    "compressed-tensors": _of_groups,
    "mxfp4": lambda said, problems: ((1, 32),),
}
