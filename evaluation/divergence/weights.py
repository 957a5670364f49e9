"""Are the served weights the checkpoint's? Every layer of both gets the same input, and has to make the same of it.

Both are computed in fp32 by the drop-in engine, with weights rounded to the type of the served files, so that a sound
layer differs by the order of sums at most, whatever the number format: a norm that is one in ten thousand off shows.
The input is the checkpoint's own hidden states, so that a layer is not blamed for the one before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.model.config import ModelConfig
from backends.fastertransformer.engine.model.precision import TORCH_TYPES
from evaluation.divergence.reference import CheckpointReference
from evaluation.divergence.stage import BATCH_TOKENS, Ids, LayeredModel, Numbers
from handover.progress import Progress
from models.described import find_model_tensors, fp8_blocks

LIMIT, _FP8_LIMIT = 1e-5, 0.1  # of what a layer changes; FP8 keeps three bits of a number behind the first one
_EXACT = {"choice_bias", "mamba_decay", "mamba_skip", "mamba_step", "delta_decay", "delta_step"}
"""Roles of the tensors that the engine reads in fp32."""
_DESCRIBED = {"tensors", "layout", "weight_data_type", "tensor_para_size", "vocab_size", "max_pos_seq_len", "decoder"}
"""Fields of a ModelConfig that say where numbers lie, not what is computed; ``decoder`` is what the others are from."""


@dataclass(frozen=True)
class LayerDifference:
    """A row of ``layers.csv``.

    Attributes:
        layer: ``embedding``, the number of a layer, or ``head``.
        difference: of what the served weights make of the source's input, relative to what the source's layer changes.
        limit: up to which they are the same.
    """

    layer: str
    difference: float
    limit: float


@dataclass(frozen=True)
class WeightsFound:
    """What is known of the served weights.

    Attributes:
        are_sound: whether they are the checkpoint's; None: it is not known.
        evidence: one line.
        layers: of the comparison, in order.
    """

    are_sound: bool | None
    evidence: str
    layers: tuple[LayerDifference, ...] = ()


def compare_weights(
    reference: CheckpointReference, served: Path | None, passages: Sequence[Ids], quantization: str = ""
) -> WeightsFound:
    """Compare the served weights with the checkpoint's, layer by layer.

    Args:
        reference: the checkpoint.
        served: directory of the served weights; None: it is not on this machine.
        passages: the first of them are used.
        quantization: that the checkpoint went through; empty: none is known.
    """
    if served is None:
        hint = "evaluation.divergence.served_weights names their directory"
        return WeightsFound(None, f"the served weights are not on this machine: {hint}")
    try:
        stored, exact = _stored_types(LayeredModel(served, reference.model_type))
        numbers = Numbers(stored=stored, quantization=quantization, exact=exact)
        model, source = LayeredModel(served, reference.model_type, numbers), reference.open(numbers)
        if different := _different_numbers(source.config, model.config):
            return WeightsFound(False, f"the configuration of {served} is another one: {'; '.join(different)}")
        layers = tuple(_compare(source, model, _some(passages)))
    except EngineError as error:
        return WeightsFound(None, f"{served} is not read by the drop-in engine: {error}")
    wrong = [each for each in layers if not each.difference <= each.limit]
    worst = max(layers, key=lambda each: each.difference)
    if not wrong:
        said = f"{len(layers)} layers of {served} are the checkpoint's, to {worst.difference:.2g} of what one changes"
        return WeightsFound(True, said, layers)
    named = ", ".join(_named(each.layer) for each in wrong[:3]) + (f" and {len(wrong) - 3} more" if wrong[3:] else "")
    said = f"{named} of {served} differ from the checkpoint's, by up to {worst.difference:.2g} of what one changes"
    return WeightsFound(False, said, layers)


def _stored_types(model: LayeredModel) -> tuple[str, str]:
    """Return the number format of most tensors in a directory's files, and of those that are read in fp32.

    What the configuration says of it does not count.
    """
    decoder = model.config.decoder
    if decoder is None:
        return model.config.weight_data_type, "fp32"
    places = find_model_tensors(model.directory, decoder, EngineError)
    types = {name: each.stored.data_type for name, each in places.items() if each.stored.data_type in TORCH_TYPES}
    exact = {
        types[name]
        for layer in range(decoder.num_layer)
        for role, name in decoder.layer_tensors(layer).items()
        if role in _EXACT and name in types
    }
    return Counter(types.values()).most_common(1)[0][0], exact.pop() if len(exact) == 1 else "fp32"


def _named(layer: str) -> str:
    return f"layer {layer}" if layer.isdigit() else f"the {layer}"


def _different_numbers(source: ModelConfig, served: ModelConfig) -> list[str]:
    """List what the two networks differ in; of shards and a directory of Hugging Face's their shapes alone."""
    names = ["num_layer", "hidden_units"]
    if (source.decoder is None) == (served.decoder is None):
        names = [each.name for each in fields(ModelConfig) if each.name not in _DESCRIBED]
    pairs = {name: (getattr(source, name), getattr(served, name)) for name in names}
    return [
        f"{name} is {str(theirs)[:60]}, the checkpoint has {str(own)[:60]}"
        for name, (own, theirs) in pairs.items()
        if own != theirs
    ]


def _some(passages: Sequence[Ids]) -> list[Ids]:
    """Return the first passages, as many as a stage computes at once."""
    found, count = list[Ids](), 0
    for row in passages:
        count += len(row)
        if found and count > BATCH_TOKENS:
            break
        found.append(row)
    return found


def _compare(source: LayeredModel, served: LayeredModel, rows: Sequence[Ids]) -> list[LayerDifference]:
    is_coarse = _is_fp8(served) and not _is_fp8(source)
    limit = _FP8_LIMIT if is_coarse else LIMIT
    found: list[LayerDifference] = []
    hidden: Tensor | None = None
    with Progress("layers", len(source.stages), "layers") as progress:
        for number in range(len(source.stages) - 1):
            ours, theirs = (model.open(number, rows).run(rows, hidden) for model in (source, served))
            change = ours if hidden is None else ours - hidden
            name = str(number - 1) if number else "embedding"
            found.append(LayerDifference(name, _ratio(theirs - ours, change), limit))
            hidden = ours
            progress.advance()
        assert hidden is not None, "there is an embedding"
        own, their = (model.open(len(model.stages) - 1, rows).logits(hidden) for model in (source, served))
        width = min(own.shape[1], their.shape[1])  # shards may be padded
        own, their = own[:, :width], their[:, :width]
        found.append(LayerDifference("head", _ratio(their - own, own - own.mean(1, keepdim=True)), limit))
        progress.advance()
    return found


def _is_fp8(model: LayeredModel) -> bool:
    return model.config.decoder is not None and bool(fp8_blocks(model.directory, EngineError))


def _ratio(difference: Tensor, change: Tensor) -> float:
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(change).clamp(min=1e-30))
