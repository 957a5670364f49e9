"""Attention of one token of every row to its pages, by attention.c; see Ops.decode_attention."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..positions import AttentionSpec
from .compiled import HostKernels

_LEAST_NUMBERS = 1 << 18  # of keys that several threads are worth


class _RowsOfStep(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tables", "positions", "windows", "sin", "cos")),
        *((name, ctypes.c_long) for name in ("table_stride", "rows", "width", "by_pairs")),
        ("scale", ctypes.c_double),
    ]


def can_attend(spec: AttentionSpec, like: Tensor) -> bool:
    """Return whether the kernel attends as a spec says, of which it knows the scale and the rotation."""
    return like.dtype == torch.float32 and spec == AttentionSpec(spec.scale, rotary=spec.rotary)


class DecodeAttention:
    """Attention in one step, for all layers that attend in one way.

    Args:
        kernels: compiled.
        positions: int64 [B].
        tables: int32 [B, width].
        windows: int64 [B].
        spec: scale and rotary positions.
        like: gives the type of keys.

    Attributes:
        at: address of what the kernel reads of the step.
    """

    def __init__(
        self,
        kernels: HostKernels,
        positions: Tensor,
        tables: Tensor,
        windows: Tensor,
        spec: AttentionSpec,
        like: Tensor,
    ) -> None:
        self._kernels = kernels
        rotation = spec.rotation(positions[:, None], like)
        turns = [rotation.sin.contiguous(), rotation.cos.contiguous()] if rotation else [None, None]
        self._kept = [tables, positions.contiguous(), windows.contiguous(), *turns]  # the kernel reads them in place
        pointers = [None if each is None else each.data_ptr() for each in self._kept]
        width, by_pairs = (rotation.width, rotation.is_by_pairs) if rotation else (0, False)
        self._step = _RowsOfStep(*pointers, tables.stride(0), len(positions), width, by_pairs, spec.scale)
        self.at = ctypes.addressof(self._step)
        self._numbers = int(torch.minimum(positions + 1, windows).sum())

    def threads(self, width: int) -> int:
        """Return how many threads are worth it for queries of some numbers."""
        return torch.get_num_threads() if self._numbers * width > _LEAST_NUMBERS else 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor) -> Tensor:
        """See Attend; fp32."""
        q, k, v = (each if each.stride(1) == each.shape[3] else each.contiguous() for each in (q, k, v))
        out = q.new_empty(q.shape)
        heads, kv_heads, size = q.shape[1], k.shape[1], q.shape[3]
        keys, values = kv.unbind()
        failed = self._kernels.attend(
            self._kernels.run,
            self.threads(heads * size),
            self.at,
            *(value for each in (q, k, v) for value in (each.data_ptr(), each.stride(0))),
            keys.data_ptr(),
            values.data_ptr(),
            kv_heads * size,
            heads,
            kv_heads,
            size,
            out.data_ptr(),
        )
        if failed:
            raise MemoryError("there is no memory for the scores of a row")
        return out
