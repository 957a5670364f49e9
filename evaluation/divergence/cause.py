"""Where a served model diverges: its weights, or what computes with them?

Each layer of the served directory and of the checkpoint gets the same input, the checkpoint's own, in fp32 by the
drop-in engine. A layer whose output differs by more than the rounding of the served files has other weights. Where none
does, the weights are the checkpoint's, and the engine that computes with them is what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from backends.fastertransformer.engine.errors import EngineError
from evaluation.divergence.reference import CheckpointReference
from evaluation.divergence.stage import BATCH_TOKENS, Ids, LayeredModel, Numbers
from handover.progress import Progress

WEIGHTS, KERNELS, UNKNOWN = "weights", "kernels", "unknown"
# Of a layer's change of the residual stream, root mean square. Rounding to bf16 makes up to 2 ** -9 of each weight.
_ROUNDING = {"fp32": 1e-4, "fp16": 2**-10, "bf16": 2**-7}


@dataclass(frozen=True)
class LayerDifference:
    """A row of ``layers.csv``.

    Attributes:
        layer: ``embedding``, the number of a layer, or ``head``.
        difference: of what the served weights make of the source's input, relative to what the layer changes.
        limit: what rounding the served files may make.
    """

    layer: str
    difference: float
    limit: float


@dataclass(frozen=True)
class Cause:
    """What is known of the cause.

    Attributes:
        name: WEIGHTS, KERNELS or UNKNOWN.
        evidence: one line.
        layers: of the comparison, in order.
    """

    name: str
    evidence: str
    layers: tuple[LayerDifference, ...] = ()


def find_cause(reference: CheckpointReference, served: Path | None, engine: str, passages: Sequence[Ids]) -> Cause:
    """Compare the served weights with the checkpoint's, layer by layer.

    Args:
        reference: the checkpoint.
        served: directory of the served weights; None: it is not on this machine.
        engine: name of the engine that serves them.
        passages: some of them are used.
    """
    if served is None:
        hint = "the served weights are not on this machine: evaluation.divergence.served_weights names their directory"
        return Cause(UNKNOWN, hint)
    try:
        model = LayeredModel(served, reference.model_type, Numbers())
        layers = tuple(_compare(reference.open(Numbers()), model, _some(passages)))
    except EngineError as error:
        return Cause(UNKNOWN, f"{served} is not read by the drop-in engine: {error}")
    except _OtherShapeError as error:
        return Cause(WEIGHTS, f"{served} has {error}")
    worst = max(layers, key=lambda each: each.difference / each.limit)
    said = f"{worst.difference:.2g} of what it changes, where rounding makes {worst.limit:.2g}"
    if worst.difference > worst.limit:
        others = sum(each.difference > each.limit for each in layers) - 1
        also = f", and {others} others" if others else ""
        return Cause(
            WEIGHTS, f"{_named(worst.layer)} of {served} is another one than the checkpoint's: {said}{also}", layers
        )
    return Cause(
        KERNELS,
        f"every layer of {served} is the checkpoint's (at most {said}), so what differs is what"
        f" {engine or 'the server'} computes with them",
        layers,
    )


def _named(layer: str) -> str:
    return f"layer {layer}" if layer.isdigit() else f"the {layer}"


class _OtherShapeError(Exception):
    """The served network has another shape."""


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
    for name in ("num_layer", "hidden_units"):
        own, theirs = getattr(source.config, name), getattr(served.config, name)
        if own != theirs:
            raise _OtherShapeError(f"{name} = {theirs}, and the checkpoint {own}")
    limit = _ROUNDING.get(served.config.weight_data_type, max(_ROUNDING.values()))
    found: list[LayerDifference] = []
    hidden: Tensor | None = None
    with Progress("layers", len(source.stages), "layers") as progress:
        for number in range(len(source.stages) - 1):
            ours, theirs = (model.open(number, rows).run(rows, hidden) for model in (source, served))
            change = ours if hidden is None else ours - hidden
            found.append(
                LayerDifference(str(number - 1) if number else "embedding", _ratio(theirs - ours, change), limit)
            )
            hidden = ours
            progress.advance()
        assert hidden is not None, "there is an embedding"
        own, their = (model.open(len(model.stages) - 1, rows).logits(hidden) for model in (source, served))
        width = min(own.shape[1], their.shape[1])  # shards may be padded
        own, their = own[:, :width], their[:, :width]
        found.append(LayerDifference("head", _ratio(their - own, own - own.mean(1, keepdim=True)), limit))
        progress.advance()
    return found


def _ratio(difference: Tensor, change: Tensor) -> float:
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(change).clamp(min=1e-30))
