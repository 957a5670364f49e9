"""Tokens that a step has chosen, on their way to the host, which need not wait before it launches the next step."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..rows.sequence import Sequence

Owners = list[tuple[Sequence, int]]
"""Sequence and beam in each slot."""
OwnedToken = tuple[tuple[Sequence, int], int, Several[Any]]
"""A slot's sequence and beam, its token, and its scores as Sequence.append takes them."""


class PendingTokens:
    """Tokens, int64 [N], that are being copied to the host; NOT_FINITE where logits are infinite or NaN.

    ``log_probs`` is fp32 [2, N], see token_log_probs, 0 in rows that do not request them; None: no row does.
    ``raw_scores`` is fp32 [n, 1 + 2 K], see scoring.py, of the rows in ``raw_slots``, which request them; K is the
    largest that one of them requests. None: no row requests them.
    """

    def __init__(
        self, owners: Owners, tokens: Tensor, log_probs: Tensor | None, raw_scores: Tensor | None, raw_slots: list[int]
    ) -> None:
        self._owners, self._raw_slots = owners, raw_slots
        # From a GPU this copies into pinned memory and does not wait.
        self._tokens = tokens.to("cpu", non_blocking=True)
        self._log_probs = None if log_probs is None else log_probs.to("cpu", non_blocking=True)
        self._raw_scores = None if raw_scores is None else raw_scores.to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def is_there(self) -> bool:
        """Whether the copy is done."""
        return not self._event or bool(self._event.query())  # type: ignore[no-untyped-call]

    def by_sequence(self) -> dict[Sequence, int]:
        """Wait for the copy; returns the token of each sequence's first beam."""
        if self._event:
            self._event.synchronize()
        tokens = self._tokens.tolist()
        return {sequence: token for (sequence, beam), token in zip(self._owners, tokens, strict=True) if not beam}

    @property
    def has_drafts(self) -> bool:
        """Whether the last slots stand for rows as they are if drafts are right; see Sequence.assume."""
        return bool(self._owners) and self._owners[-1][0].origin is not None

    def wait(self) -> list[OwnedToken]:
        """Wait for the copy."""
        if self._event:
            self._event.synchronize()
        scores: list[Several[Any]] = [()] * len(self._owners)
        if self._log_probs is not None:
            scores = self._log_probs.T.tolist()
        if self._raw_scores is not None:
            for slot, row in zip(self._raw_slots, self._raw_scores.numpy(), strict=True):
                most, wanted = len(row) // 2, self._owners[slot][0].sampling.num_top_log_probs
                own = row if wanted == most else np.concatenate((row[: 1 + wanted], row[1 + most :][:wanted]))
                scores[slot] = (*(scores[slot] or (None, 0.0)), own.tobytes())
        return list(zip(self._owners, self._tokens.tolist(), scores, strict=True))
