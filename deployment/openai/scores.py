"""Log probabilities of tokens: read from the engine's tensors, written in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployment.openai.outputs import Outputs
from deployment.openai.texts import Texts, name_by_id


@dataclass(frozen=True)
class Score:
    """The log probability of a token in its place, under the model alone: no temperature, no penalty.

    Attributes:
        log_prob: natural logarithm.
        top: the most probable tokens there with theirs, the most probable first.
    """

    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


GENERATED = ("output_raw_log_probs", "output_top_log_probs", "output_top_ids")
GIVEN = ("context_log_probs", "context_top_log_probs", "context_top_ids")


def read_scores(answer: Outputs, names: tuple[str, str, str], first: int, end: int) -> list[Score]:
    """Read the scores of an answer's tokens.

    Args:
        answer: of the engine, to one sequence.
        names: ``GENERATED`` or ``GIVEN``.
        first: token.
        end: behind the last token.

    Returns:
        One for each token; none where they were not asked for.
    """
    scores, tops, ids = map(answer.read, names)
    if scores is None:
        return []
    row = scores.reshape(-1)[first:end].tolist()
    if tops is None or ids is None:
        return [Score(each) for each in row]
    width = tops.shape[-1]
    of_tops, of_ids = (each.reshape(-1, width)[first:end].tolist() for each in (tops, ids))
    return [
        Score(log_prob, tuple(zip(tokens, values, strict=True)))
        for log_prob, values, tokens in zip(row, of_tops, of_ids, strict=True)
    ]


@dataclass
class CompletionScores:
    """Writes ``logprobs`` of ``/v1/completions``, piece by piece.

    Attributes:
        texts: of the model.
        is_by_id: whether tokens are named by their ids, as vLLM does it: two tokens may have the same text.
        offset: characters of the tokens that were written.
    """

    texts: Texts
    is_by_id: bool = False
    offset: int = field(default=0)

    def write(self, tokens: Sequence[int], scores: Sequence[Score | None]) -> dict[str, Any]:
        """Write tokens; a prompt's first token has no score."""
        names, offsets = [self._name(token) for token in tokens], []
        for name in names:
            offsets.append(self.offset)
            self.offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [None if score is None else score.log_prob for score in scores],
            "top_logprobs": [
                None if score is None else self._top(name, score) for name, score in zip(names, scores, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, name: str, score: Score) -> dict[str, float]:
        """Name the most probable tokens and the one that came; of tokens of one name the most probable counts."""
        top: dict[str, float] = {}
        for token, log_prob in score.top:
            top.setdefault(self._name(token), log_prob)
        top.setdefault(name, score.log_prob)
        return top

    def _name(self, token: int) -> str:
        return name_by_id(token) if self.is_by_id else self.texts.name(token)


def write_chat_scores(texts: Texts, tokens: Sequence[int], scores: Sequence[Score]) -> dict[str, Any]:
    """Write ``logprobs`` of ``/v1/chat/completions``."""
    content = [
        {
            **_entry(texts, token, score.log_prob),
            "top_logprobs": [_entry(texts, other, log_prob) for other, log_prob in score.top],
        }
        for token, score in zip(tokens, scores, strict=True)
    ]
    return {"content": content}


def _entry(texts: Texts, token: int, log_prob: float) -> dict[str, Any]:
    text = texts.text_of(token)
    return {"token": texts.name(token), "logprob": log_prob, "bytes": list(text.encode()) if text else None}
