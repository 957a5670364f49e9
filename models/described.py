"""What a directory of Hugging Face's describes: its decoder and special ids, read from its files of settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from models import find
from models.architecture import Architecture
from models.checks import Refusal
from models.decoder import Decoder
from models.directory import CONFIG_FILE, GENERATION_FILE, SpecialIds, find_tensors, read_json, special_ids
from models.errors import ModelError
from models.fp8 import FP8_NUMBERS, Place, grid_of, is_unused_scale, with_input_scales, with_scales
from models.fused_experts import with_experts_apart
from models.mxfp4 import GROUP, MXFP4_NUMBERS, made_up, with_powers
from models.quantization import (
    DYNAMIC,
    FP8,
    MODELOPT_FILE,
    MXFP4,
    STATIC,
    Block,
    Quantization,
    quantization_said,
    read_quantization,
)
from models.safetensors import StoredTensor, number_of
from models.tensor import Tensor

NUMBER_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Types of weights by transformers' names."""
_MOST_LISTED = 20
_ARRAY = 3  # axes of the experts of a layer together
_UNUSED = ".rotary_emb.inv_freq"
"""End of names that older versions of transformers saved; their numbers are those that config.json says."""


class Described(NamedTuple):
    """A model as its directory describes it.

    Attributes:
        ids: of tokens that begin and end a text, settled.
        data_type: that its weights are said to have; each tensor's own is in its file.
    """

    decoder: Decoder
    ids: SpecialIds
    data_type: str


def read_directory(directory: Path, error: Refusal) -> Described:
    """Read what a directory describes.

    Args:
        directory: with ``config.json``, and ``generation_config.json`` if it has one.
        error: makes the exception for a description that is damaged, or of no model that is known.
    """
    said = read_json(directory / CONFIG_FILE, error)
    try:
        architecture = find(said.get("model_type"), said)
        decoder = architecture.read(said)
    except ModelError as problem:
        raise error(f"{directory / CONFIG_FILE}: {problem.problem}", problem.hint) from None
    ids = _ids(directory, architecture, said, error).settled(decoder.vocab_size)
    name = str(said.get("dtype") or said.get("torch_dtype"))
    return Described(decoder, ids, NUMBER_TYPES.get(name, "fp32"))


def _ids(directory: Path, architecture: Architecture, said: Mapping[str, Any], error: Refusal) -> SpecialIds:
    return special_ids(architecture.completed(said), read_json(directory / GENERATION_FILE, error), error)


def find_model_tensors(directory: Path, decoder: Decoder, error: Refusal, is_part: bool = False) -> dict[str, Place]:
    """Find every tensor of a model in a directory: by name its file and its place there.

    Matrices may be FP8, and experts MXFP4.

    Args:
        directory: with the files of safetensors.
        decoder: that it describes. Where the head is tied, the one tensor may have the name of the other, and a head
            that is there even so may be another matrix. Its predictors of further tokens are not looked at.
        error: makes the exception that names tensors which are missing, have another shape or type, or are not the
            model's.
        is_part: whether the directory has tensors of more than this.
    """
    said, problems = _quantization(directory, error), list[str]()
    found = _in_files(directory, decoder, said, error)
    expected = replace(decoder, predictor_num=0).tensors()
    behind = range(decoder.num_layer, decoder.num_layer + decoder.predictor_num)
    unused = tuple(f"{decoder.names['layer'].format(layer=layer)}." for layer in behind)
    if decoder.model_type and not is_part:
        is_passed_over = find(decoder.model_type).is_passed_over
        found = {name: each for name, each in found.items() if not is_passed_over(name)}
    embedding, head = (f"{decoder.names[role]}.weight" for role in ("embedding", "head"))
    if decoder.has_tied_head and embedding not in found and head in found:
        found[embedding] = found.pop(head)  # whoever saves each tensor once keeps one of its two names
    if head in found and head not in expected:
        expected[head] = expected[embedding]
    for name, tensor in expected.items():
        if name not in found:
            problems.append(f"{name}: missing")
        elif (shape := found[name].stored.shape) != tensor.shape:
            problems.append(f"{name}: {list(shape)}, expected {list(tensor.shape)}")
        elif problem := _number_problem(tensor, found[name], said):
            problems.append(f"{name}: {problem}")
    others = (
        name
        for name in found
        if name not in expected and not name.endswith(_UNUSED) and not name.startswith(unused)
        if not (said and is_unused_scale(name, said.has_cache_scales))
    )
    if not is_part:
        problems += [f"{name}: the model that {CONFIG_FILE} describes has none" for name in others]
    if problems:
        noun = "tensor is" if len(problems) == 1 else "tensors are"
        more = [f"... and {len(problems) - _MOST_LISTED} more"] if len(problems) > _MOST_LISTED else []
        lines = "\n  ".join(problems[:_MOST_LISTED] + more)
        raise error(f"{len(problems)} {noun} unusable in {directory}:\n  {lines}", "convert or copy it again")
    return found


def _in_files(directory: Path, decoder: Decoder, said: Quantization | None, error: Refusal) -> dict[str, Place]:
    """Find what the files have: numbers with their scales, where ``config.json`` says that there are any."""
    blocks, has_inputs = said.blocks if said else (), bool(said and STATIC in said.activations)
    of_experts, in_files = with_experts_apart(decoder, find_tensors(directory, error), blocks, has_inputs)
    if said and said.kind == MXFP4:
        return with_powers(in_files) | of_experts
    found = with_scales(in_files, blocks)
    return (with_input_scales(found) if has_inputs else found) | of_experts


def _number_problem(tensor: Tensor, place: Place, said: Quantization | None) -> str:
    """Return what is wrong with a tensor's numbers; empty: nothing."""
    stored, blocks = place.stored, said.blocks if said and said.kind == FP8 else ()
    if stored.data_type not in NUMBER_TYPES.values() and not (place.scales and _may_be(tensor, stored)):
        of_blocks = " or ".join(f"{rows or 'all'} x {columns or 'all'}" for rows, columns in blocks)
        also = f", and {FP8_NUMBERS} of a layer's matrix with scales for {of_blocks}" if blocks else ""
        return f"of type {stored.data_type}; legal are {', '.join(NUMBER_TYPES.values())}{also}"
    if place.scales and not place.input_scale and said and DYNAMIC not in said.activations:
        return f"{CONFIG_FILE} says that its input has a scale, and one number beside it is none"
    return ""


def made_up_places(directory: Path, decoder: Decoder, data_type: str, error: Refusal) -> dict[str, Place]:
    """List the tensors in files without a name, for random numbers: FP8 or MXFP4 if ``config.json`` says so."""
    blocks, found = fp8_blocks(directory, error), dict[str, tuple[str, StoredTensor]]()
    for name, tensor in decoder.tensors().items():
        is_fp8 = bool(blocks) and _may_be_fp8(tensor)
        found[name] = "", StoredTensor(FP8_NUMBERS if is_fp8 else data_type, tensor.shape, 0, 0)
        if is_fp8:
            found[f"{name}_scale"] = "", StoredTensor("fp32", grid_of(tensor.shape, blocks[0]), 0, 0)
            if has_static_inputs(directory, error):
                found[f"{name.removesuffix('weight')}input_scale"] = "", StoredTensor("fp32", (), 0, 0)
    places = with_input_scales(with_scales(found, blocks))
    if is_mxfp4(directory, error):
        shapes = {name: each.shape for name, each in decoder.tensors().items() if len(each.axes) == _ARRAY}
        places |= {name: made_up(shape) for name, shape in shapes.items() if not shape[1] % GROUP}
    return places


def _may_be(tensor: Tensor, stored: StoredTensor) -> bool:
    """Return whether a tensor may have numbers with scales of that kind."""
    return len(tensor.axes) == _ARRAY if stored.data_type == MXFP4_NUMBERS else _may_be_fp8(tensor)


def _may_be_fp8(tensor: Tensor) -> bool:
    """Return whether a tensor is a matrix of a layer."""
    return len(tensor.axes) == 2 and "vocab_size" not in tensor.axes


def fp8_blocks(directory: Path, error: Refusal) -> tuple[Block, ...]:
    """Return the blocks of weights that may have one scale, as ``config.json`` says of FP8; none: nothing is FP8.

    ``error`` makes the exception for weights in a format that is not read.
    """
    found = _quantization(directory, error)
    return found.blocks if found and found.kind == FP8 else ()


def is_mxfp4(directory: Path, error: Refusal) -> bool:
    """Return whether ``config.json`` says that experts are MXFP4; ``error``: see fp8_blocks."""
    found = _quantization(directory, error)
    return found is not None and found.kind == MXFP4


def quantized_kind(directory: Path, error: Refusal) -> str:
    """Return as what ``config.json`` says that weights are stored, FP8 or MXFP4; empty: neither. See fp8_blocks."""
    found = _quantization(directory, error)
    return found.kind if found else ""


def has_static_inputs(directory: Path, error: Refusal) -> bool:
    """Return whether ``config.json`` says of matrices that their inputs have scales; ``error``: see fp8_blocks."""
    found = _quantization(directory, error)
    return found is not None and STATIC in found.activations


def input_scales(directory: Path, error: Refusal) -> dict[str, float]:
    """Read the scales that activations are rounded by, by the names of the modules that these are given to."""
    if not has_static_inputs(directory, error):
        return {}
    found, decoder = {}, read_directory(directory, error).decoder
    for name, place in _in_files(directory, decoder, _quantization(directory, error), error).items():
        if place.input_scale:
            file, stored = place.input_scale
            with (directory / file).open("rb") as stream:
                stream.seek(stored.offset)
                found[name.removesuffix(".weight")] = number_of(stream.read(stored.size_bytes), stored.data_type)
    return found


def _quantization(directory: Path, error: Refusal) -> Quantization | None:
    where = str(directory / CONFIG_FILE)
    config, beside = (read_json(directory / name, error) for name in (CONFIG_FILE, MODELOPT_FILE))
    said = quantization_said(config, beside, where, error)
    return read_quantization(said, where, error) if said else None
