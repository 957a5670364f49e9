"""Log probabilities of tokens: read from the engine's tensors, written in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, overload

from deployment.openai.engine.outputs import Array, Outputs
from deployment.openai.texts.texts import Detokenizer, Texts, name_by_id

BATCH = 128
"""Tokens whose scores are read and written at once."""


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


class Scores(Sequence[Score]):
    """The scores of an answer's tokens, read where they are looked at: those of a long prompt take a while.

    Args:
        log_probs: of the tokens.
        tops: of the most probable tokens in their places; None: those were not asked for.
        ids: of the most probable tokens.
    """

    def __init__(self, log_probs: Array, tops: Array | None = None, ids: Array | None = None) -> None:
        self._log_probs, self._tops, self._ids = log_probs, tops, ids

    def __len__(self) -> int:
        return len(self._log_probs)

    @overload
    def __getitem__(self, index: int) -> Score: ...
    @overload
    def __getitem__(self, index: slice) -> list[Score]: ...
    def __getitem__(self, index: int | slice) -> Score | list[Score]:
        if isinstance(index, int):
            return self[index : index + 1 or None][0]
        row = self._log_probs[index].tolist()
        if self._tops is None or self._ids is None:
            return [Score(each) for each in row]
        of_tops, of_ids = self._tops[index].tolist(), self._ids[index].tolist()
        return [
            Score(log_prob, tuple(zip(tokens, values, strict=True)))
            for log_prob, values, tokens in zip(row, of_tops, of_ids, strict=True)
        ]

    def __iter__(self) -> Iterator[Score]:
        for first in range(0, len(self), BATCH):
            yield from self[first : first + BATCH]


def read_scores(answer: Outputs, names: tuple[str, str, str], first: int, end: int) -> Sequence[Score]:
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
        return ()
    row = scores.reshape(-1)[first:end]
    if tops is None or ids is None:
        return Scores(row)
    width = tops.shape[-1]
    return Scores(row, *(each.reshape(-1, width)[first:end] for each in (tops, ids)))


def in_batches(
    write: Callable[[Sequence[int], Sequence[Any]], dict[str, Any]], tokens: Iterable[int], scores: Iterable[Any]
) -> Iterator[dict[str, Any]]:
    """Write scores batch by batch, at least one; what belongs together is the lists of one name, one behind another."""
    pairs, is_first = zip(tokens, scores, strict=True), True
    while (batch := list(islice(pairs, BATCH))) or is_first:
        is_first = False
        yield write([token for token, _ in batch], [score for _, score in batch])


@dataclass
class CompletionScores:
    """Writes ``logprobs`` of ``/v1/completions``, piece by piece.

    Attributes:
        texts: of the model.
        prompt: that the answer continues.
        is_echoed: whether the prompt's tokens are written too.
        is_by_id: whether tokens are named by their ids, as vLLM does it: two tokens may have the same text.
        is_empty: whether the prompt is an empty text, for which a token stands.
    """

    texts: Texts
    prompt: tuple[int, ...] = ()
    is_echoed: bool = False
    is_by_id: bool = False
    is_empty: bool = False

    def __post_init__(self) -> None:
        """Begin with no text."""
        self._text = Detokenizer(self.texts, () if self.is_echoed else self.prompt)
        shown = self.prompt if self.is_echoed else ()
        self._shown, self._own = range(len(shown)), range(0) if self.is_empty else self.texts.own(shown)
        self._offset = self._written = 0

    def write(self, tokens: Sequence[int], scores: Sequence[Score | None]) -> dict[str, Any]:
        """Write tokens; a prompt's first token has no score."""
        names, offsets = [self._name(token) for token in tokens], []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += self._count_added(token)
        return {
            "tokens": names,
            "token_logprobs": [None if score is None else score.log_prob for score in scores],
            "top_logprobs": [
                None if score is None else self._top(name, score) for name, score in zip(names, scores, strict=True)
            ],
            "text_offset": offsets,
        }

    def _count_added(self, token: int) -> int:
        """Count the characters that a token adds to the text, which has nothing of what stands around a prompt."""
        place = self._written
        self._written += 1
        is_around = place in self._shown and place not in self._own
        return 0 if is_around else len(self._text.add(token))

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
    return {"token": texts.name(token), "logprob": log_prob, "bytes": list(texts.bytes_of(token)) or None}
