"""The tokens of a call by adapter, and the products of linear layers with what each token's adapter adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array, upload
from .linear import Linear
from .low_rank import LowRank


class AdaptedRows(Protocol):
    """The tokens of a call, sorted by adapter."""

    def part(self, tokens: slice) -> AdaptedRows:
        """Return some of them."""

    def add(self, y: Tensor, x: Tensor, low_rank: LowRank) -> None:
        """Add what the tokens' adapters make of x, [..., in], to y, [..., out], contiguous."""

    def add_by_head(self, y: Tensor, x: Tensor, down: Tensor, up: Tensor, low_rank: LowRank) -> None:
        """Add what the tokens' adapters make of what each head has, x, [H, T, in], to y, [H, T, out].

        Args:
            y: its last axis is without gaps.
            x: likewise.
            down: [places, H, rank, in]; or one head, which is for all.
            up: [places, H, out, rank]; likewise.
            low_rank: of which both are views.
        """

    def multiply(
        self,
        product: Callable[[Linear, Tensor], Tensor],
        linear: Linear,
        x: Tensor,
        activation: str = "",
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> Tensor | None:
        """Do what Ops.linear does, with what adapters add; None: it is to be done by ``add``.

        Args:
            product: of a linear layer.
            linear: has adapters.
            x: [..., in].
            activation: see Ops.linear.
            residual: see Ops.linear.
            is_gated: whether the result is activation(first half) * second half.
        """


class GroupedRows:
    """Tokens by adapter, in torch; those without one are left alone.

    Args:
        adapters: int64 [T], place of each token's adapter; ``count``: it has none.
        count: places.
        device: of the tokens.
    """

    def __init__(self, adapters: Array, count: int, device: torch.device) -> None:
        self._adapters, self._count, self._device = adapters, count, device
        places = np.unique(adapters[adapters < count]).tolist()
        self._rows = {place: upload(np.flatnonzero(adapters == place), device) for place in places}

    def _of(self, low_rank: LowRank) -> list[tuple[int, Tensor]]:
        return [each for each in self._rows.items() if each[0] in low_rank.changing]

    def part(self, tokens: slice) -> GroupedRows:
        """See AdaptedRows."""
        return GroupedRows(self._adapters[tokens], self._count, self._device)

    def multiply(self, *_: object, **__: object) -> None:
        """See AdaptedRows."""

    def add_by_head(self, y: Tensor, x: Tensor, down: Tensor, up: Tensor, low_rank: LowRank) -> None:
        """See AdaptedRows."""
        for place, rows in self._of(low_rank):
            y.index_add_(1, rows, x[:, rows] @ down[place].mT @ up[place].mT)

    def add(self, y: Tensor, x: Tensor, low_rank: LowRank) -> None:
        """See AdaptedRows."""
        flat, to, rank = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]), low_rank.rank
        for place, rows in self._of(low_rank):
            narrow, first = flat[rows] @ low_rank.down[place].T, 0
            wide = []
            for part, end in enumerate(low_rank.ends):
                wide.append(narrow[:, part * rank : (part + 1) * rank] @ low_rank.up[place, first:end].T)
                first = end
            to.index_add_(0, rows, torch.cat(wide, 1).to(y.dtype))
