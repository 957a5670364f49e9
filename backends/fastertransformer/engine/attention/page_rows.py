"""Attention of rows whose keys and values are in pages: on a GPU by kernels that read the pages where they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..kernels import can_run_on
from ..network.positions import Bias, Rotary
from .attention import Cells, KeptSource, NextTokens, SlotCells, WholeInput, biased
from .pages import PAGE, PageCells, put


def next_tokens(
    positions: Tensor, cells: Cells, windows: Tensor, longest: int, bias: Bias | None, scale: float, like: Tensor
) -> NextTokens | PageTokens:
    """Say how one token of every row attends to its past: on a GPU by a kernel that reads pages where they are."""
    if isinstance(cells, PageCells) and positions.is_cuda:
        return PageTokens(positions, cells.tables, windows, bias, scale)
    return NextTokens(positions, cells, windows, longest, bias, scale, like)


def kept_source(
    tokens: int, cells: Cells, lengths: Tensor, longest: int, scale: float, like: Tensor
) -> KeptSource | PageSource:
    """Say how so many tokens of every row attend to what the encoder has made; see next_tokens."""
    if isinstance(cells, PageCells) and lengths.is_cuda and tokens == 1:
        return PageSource(cells.tables, lengths, scale)
    return KeptSource(cells, lengths, longest, scale, like)


class PageSource:
    """One token of every row and what was kept of the encoder's output, on a GPU; see attention.KeptSource."""

    def __init__(self, tables: Tensor, lengths: Tensor, scale: float) -> None:
        self._rows = tables, lengths, lengths, scale  # a window of its length: the last token sees all of it

    def __call__(self, q: Tensor, memory: Tensor) -> Tensor:
        """See attention.KeptSource."""
        from ..kernels.attention import attend

        return attend(q, None, None, memory, *self._rows)


class PageTokens:
    """One token of every row, on a GPU; see attention.NextTokens.

    Attributes:
        rotary: how it turns queries and keys itself; None: they are given as they are to be.
    """

    def __init__(self, positions: Tensor, tables: Tensor, windows: Tensor, bias: Bias | None, scale: float) -> None:
        self._rows = tables, positions, windows, scale, bias.by_distance if bias else None
        self.rotary: Rotary | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
        """See attention.NewRows."""
        from ..kernels.attention import attend  # needs Triton, which torch for GPUs brings along

        return attend(q, k, v, memory, *self._rows, self.rotary)


def whole_input(
    lengths: Tensor, length: int, bias: Bias | None, scale: float, like: Tensor, kept: list[Tensor] | None
) -> WholeInput | WholeRows:
    """Say how an encoder attends; see attention.WholeInput."""
    if can_run_on(like.device) and kept is None:
        begins = torch.arange(len(lengths), device=lengths.device) * length
        return WholeRows(begins, lengths, length, bias, scale)
    return WholeInput(lengths, length, bias, scale, like, kept)


class WholeRows:
    """Every token of a row sees every other, by a kernel that needs no mask; see attention.WholeInput.

    Args:
        begins: first token of each row among all of them.
        lengths: of the rows.
        longest: at least the largest of them.
        bias: by positions; None: none.
        scale: of q k.
    """

    def __init__(self, begins: Tensor, lengths: Tensor, longest: int, bias: Bias | None, scale: float) -> None:
        self._rows = begins, lengths, longest, scale, bias.by_offset if bias else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from q, [B, H, S, D], to k and v."""
        from ..kernels.rows import attend_rows

        parts = [each.transpose(0, 1).flatten(1, 2) for each in (q, k, v)]  # [H, B * S, D]
        out = attend_rows(parts[0], parts[1], parts[2], *self._rows)
        return out.view(out.shape[0], len(q), -1, out.shape[2]).transpose(0, 1)


class PackedRows:
    """Rows that begin, one behind the other in one row of tokens, so nothing is padded; see attention.NewRows.

    Args:
        tables: int32 [slots, width], pages of all slots; None: a slot is one piece of memory, see attention.SlotCells.
        rows: int64 [T], slot of each token.
        positions: int64 [T].
        ends: int32 [B + 1], on the device: 0, then where each row ends.
        lengths: of the rows, where the host knows them; None: ``ends`` has to do.
        bias: by positions; None: none.
        scale: of q k.
        like: a tensor on the device, in the format of keys.
        rotary: how it turns queries and keys itself; None: they are given as they are to be.
    """

    def __init__(
        self,
        tables: Tensor | None,
        rows: Tensor,
        positions: Tensor,
        ends: Tensor,
        lengths: list[int] | None,
        bias: Bias | None,
        scale: float,
        like: Tensor,
        rotary: Rotary | None = None,
    ) -> None:
        self._cells, self._positions, self._rotary = SlotCells(rows), positions, rotary
        self._pages = None if tables is None else tables[rows, positions // PAGE]
        self._offsets = positions % PAGE
        self._ends, self._lengths, self._scale = ends, lengths, scale
        self._longest = max(lengths) if lengths else len(rows)
        self._masks: list[Tensor | None] = [None] * len(lengths or ())
        self._is_fused, self._bias = self._pages is not None and rows.is_cuda, bias.by_offset if bias else None
        if self._is_fused:
            self._rows = ends[:-1], ends.diff()
        elif bias and lengths:
            steps = torch.arange(self._longest, device=rows.device)
            mask = biased(steps <= steps[:, None], bias(steps[None], steps[None]), like)
            self._masks = [mask[..., :length, :length] for length in lengths]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
        """Keep k and v, [1, H, T, D] each, in a layer's memory, and attend to them."""
        if self._pages is None:  # to its slot a token is a row of its own
            self._cells.write(memory, self._positions[:, None], k.transpose(0, 2), v.transpose(0, 2))
        elif self._is_fused and self._rotary:
            from ..kernels.keep import turn_and_keep

            where = memory, self._pages, self._offsets, self._positions
            turned = turn_and_keep(q[0], k[0], v[0], *where, self._rotary)
            q, k = (each[None] for each in turned)
        else:
            put(memory, self._pages[None], self._offsets[None], k, v)
        if can_pack(q) and self._bias is None:
            parts = [x[0].transpose(0, 1) for x in (q, k, v)]
            ends, longest = self._ends, self._longest
            out = torch.ops.aten._flash_attention_forward(
                *parts, ends, ends, longest, longest, 0.0, True, False, scale=self._scale
            )[0]
            return out.transpose(0, 1)[None]  # type: ignore[no-any-return]
        if self._is_fused:
            from ..kernels.rows import attend_rows

            packed = q[0], k[0], v[0], *self._rows
            return attend_rows(*packed, self._longest, self._scale, self._bias, is_causal=True)[None]
        assert self._lengths, "only the kernels of rows side by side take lengths from the device"
        out, end = torch.empty_like(q), 0
        for length, mask in zip(self._lengths, self._masks, strict=True):
            own, end = slice(end, end + length), end + length
            row = q[:, :, own], k[:, :, own], v[:, :, own]
            out[:, :, own] = F.scaled_dot_product_attention(*row, mask, is_causal=mask is None, scale=self._scale)
        return out


def can_pack(like: Tensor) -> bool:
    """Say whether torch has a kernel for heads, [..., D], of this format that takes rows side by side."""
    return like.is_cuda and like.dtype != torch.float32 and like.shape[-1] % 8 == 0 and like.shape[-1] <= 256
