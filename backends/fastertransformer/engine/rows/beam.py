"""The hypotheses of a row."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum


class FinishReason(IntEnum):
    """Why a beam has ended, by the numbers of TensorRT-LLM's ``executor::FinishReason``."""

    NOT_FINISHED = 0
    END_ID = 1  # or a stop_token_id
    STOP_WORDS = 2
    LENGTH = 3  # it has as many tokens as its request asks for


DEAD = -1e20  # score of the beams that do not exist at the first step: all K start from one sequence


@dataclass(frozen=True)
class Candidate:
    """A continuation of a beam."""

    parent: int  # index of the beam
    token: int  # to append; without meaning if the beam has ended
    rank: float  # by which candidates are ordered
    score: float  # sum of log-probabilities
    gain: float  # the token's part of the score


@dataclass
class Beam:
    """A hypothesis of a beam search; without a search a sequence has one."""

    tokens: array[int] = field(default_factory=lambda: array("I"))  # an array is copied into an answer as a whole
    log_probs: list[float] = field(default_factory=list)  # of these tokens; empty if the request does not need them
    score: float = 0.0  # sum of log-probabilities, if the request needs it
    finish: FinishReason = FinishReason.NOT_FINISHED  # by its last token; see outputs.py for LENGTH
    rank: float = 0.0  # by which beams that have ended are ordered
    # Of these tokens, if the request needs it: what scoring.score_rows gives of each, one after another.
    raw_scores: array[float] = field(default_factory=lambda: array("f"))

    @property
    def has_ended(self) -> bool:
        """Whether an end_id, a stop_token_id or a stop word has ended it."""
        return self.finish != FinishReason.NOT_FINISHED
