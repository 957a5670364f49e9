"""What a layer's blocks compute with, beside its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...ops.ops import Ops
from ...ops.positions import CrossAttend
from ...ops.state_rows import StateRows
from ...parallel.comm import Comm


@dataclass(frozen=True)
class LayerContext:
    """What all layers of a stack that attend in one way share in one call.

    Attributes:
        ops: operations.
        comm: with the processes that share the layers.
        attend: self-attention, an Attend or, of latent layers, a LatentAttend.
        tasks: [B, T], each token's IA3 task; None: none has one.
        attend_source: attention to the encoder's output; None: there is none.
        state_rows: the states of the call's rows; None: no layer keeps any.
    """

    ops: Ops
    comm: Comm
    attend: Callable[..., Tensor]
    tasks: Tensor | None = None
    attend_source: CrossAttend | None = None
    state_rows: StateRows | None = None
