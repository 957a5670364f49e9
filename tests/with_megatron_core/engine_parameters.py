"""Transformer Engine's modules as far as their parameters go: names and shapes of its own, and nothing is computed.

Transformer Engine is built for GPUs. megatron-core's layers inherit of its modules, so a model of them can be built,
filled, saved and read back where these stand in its place.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch.nn import Module, Parameter

_FP8 = {"fp8_checkpoint": False}


class _Stateful(Module):
    """Has the extra state that each of its modules has where no FP8 is used: nothing."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.fp8, self.fp8_calibration, self.fp8_meta = False, False, _FP8

    def get_extra_state(self) -> torch.Tensor:
        """Return nothing, as a tensor."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""


def _cut(rows: int, columns: int, parallel_mode: str | None, ranks: int) -> tuple[int, int]:
    """Return a rank's share of a matrix."""
    return rows // (ranks if parallel_mode == "column" else 1), columns // (ranks if parallel_mode == "row" else 1)


class Linear(_Stateful):
    """``weight`` and ``bias``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        **_: Any,
    ) -> None:
        super().__init__()
        rows, columns = _cut(out_features, in_features, parallel_mode, tp_size)
        self.parallel_mode, self.use_bias = parallel_mode, bias
        self.weight = Parameter(torch.zeros(rows, columns))
        if bias:
            self.bias = Parameter(torch.zeros(rows))


class LayerNormLinear(Linear):
    """The same behind a norm: ``layer_norm_weight`` and, unless it is RMSNorm, ``layer_norm_bias``."""

    def __init__(self, in_features: int, out_features: int, *, normalization: str = "LayerNorm", **given: Any) -> None:
        super().__init__(in_features, out_features, **given)
        self.layer_norm_weight = Parameter(torch.zeros(in_features))
        if normalization == "LayerNorm":
            self.layer_norm_bias = Parameter(torch.zeros(in_features))


class GroupedLinear(_Stateful):
    """Several matrices, of experts: ``weight0``, ``weight1``, ... and biases."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        **_: Any,
    ) -> None:
        super().__init__()
        rows, columns = _cut(out_features, in_features, parallel_mode, tp_size)
        self.num_gemms, self.use_bias, self.parallel_mode = num_gemms, bias, parallel_mode
        for number in range(num_gemms):
            setattr(self, f"weight{number}", Parameter(torch.zeros(rows, columns)))
            if bias:
                setattr(self, f"bias{number}", Parameter(torch.zeros(rows)))


class RMSNorm(Module):
    """``weight``."""

    def __init__(self, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(hidden_size))


class LayerNorm(RMSNorm):
    """``weight`` and ``bias``."""

    def __init__(self, hidden_size: int, **_: Any) -> None:
        super().__init__(hidden_size)
        self.bias = Parameter(torch.zeros(hidden_size))


class DotProductAttention(_Stateful):
    """It has no parameters."""


def install() -> None:
    """Put them in Transformer Engine's place: after ``absent.stand_in``, and before megatron-core is imported."""
    modules = import_module("transformer_engine.pytorch")
    for each in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention):
        setattr(modules, each.__name__, each)
    offloading = import_module("transformer_engine.pytorch.cpu_offload")
    offloading.get_cpu_offload_context = lambda *_, **__: (nullcontext(), None)  # type: ignore[attr-defined]
    import_module("transformer_engine").pytorch = modules  # type: ignore[attr-defined]
