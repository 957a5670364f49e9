"""What a row's drafts are made from, and how often their tokens are right."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cache.page_pool import RowPages
from .prompt_lookup import PromptLookup


class Acceptance:
    """How probable it is that the next token of a draft is right.

    Args:
        prior: the probability before anything is known.
        memory: what is left of the weight of all earlier drafts with each new one.
    """

    def __init__(self, prior: float, memory: float) -> None:
        self._memory, self._right, self._tried = memory, prior, 1.0

    @property
    def probability(self) -> float:
        """See above."""
        return self._right / self._tried

    def note(self, drafted: int, accepted: int) -> None:
        """Note a draft: the first token that was wrong says something, and those after it nothing."""
        self._right = self._memory * self._right + accepted
        self._tried = self._memory * self._tried + min(drafted, accepted + 1)


@dataclass
class Drafting:
    """The drafts of a row.

    Attributes:
        most: tokens of one.
        acceptance: of their tokens.
        lookup: proposes them; None: none has been proposed yet.
        pages: that the row had when a draft model ran its tokens; None: it has run none.
        known: tokens of the row that the draft model has run, and keeps keys and values of.
        assumed: tokens of the last draft that it has run behind these.
    """

    most: int
    acceptance: Acceptance
    lookup: PromptLookup | None = None
    pages: RowPages | None = None
    known: int = 0
    assumed: list[int] = field(default_factory=list)
