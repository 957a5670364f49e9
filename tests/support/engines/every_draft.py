"""Rows that have drafts whenever they may, and what was drafted of which text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest

from backends.fastertransformer.engine.rows.sequence import Sequence
from backends.fastertransformer.engine.scheduling import proposers, speculation
from backends.fastertransformer.engine.scheduling.proposers import OwnPredictor
from backends.fastertransformer.engine.scheduling.tuning import Tuning


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows have drafts in every step, as long as may be, whatever came of earlier ones."""
    monkeypatch.setattr(speculation, "TUNING", Tuning(draft_row_cost_cpu=0.0, acceptance_prior=0.9))
    monkeypatch.setattr(proposers, "numbers_read", Mock(side_effect=[0, 1] * 9))  # nor is anything timed then


def noted_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Return a list that takes the texts that a predictor's drafts are proposed for, and these."""
    found, propose = list[tuple[list[int], list[int]]](), OwnPredictor._propose

    def noted(proposer: OwnPredictor, lengths: Mapping[Sequence, int]) -> Any:
        texts = {row: proposers._tokens(row, 0).tolist() for row in lengths}
        drafts = propose(proposer, lengths)
        found.extend((texts[row], draft) for row, draft in drafts.items())
        return drafts

    monkeypatch.setattr(OwnPredictor, "_propose", noted)
    return found
