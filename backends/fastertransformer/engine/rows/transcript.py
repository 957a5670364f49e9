"""The tokens of a row: what it starts from, and what each of its beams has generated."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..arrays import UNBOUNDED, Array
from ..grammar.guided_row import Grammar
from ..request.parse import Row
from ..request.prompts import Context
from .beam import DEAD, Beam, Candidate, FinishReason


@dataclass
class SessionRow:
    """One row of a session, after a request."""

    tokens: list[int] = field(default_factory=list)  # of the whole conversation
    cached: int = 0  # how many of them have keys and values
    saved: list[int] | None = None  # their pages; None: they are in the batch, or lost

    def take_saved(self) -> list[int]:
        """Return the pages that are saved, which are no longer this row's."""
        saved, self.saved = self.saved or [], None
        return saved


class Transcript:
    """The tokens of a row.

    Args:
        row: of the request.
        grammar: that its output must follow; None: none.

    Attributes:
        sampling: its parameters.
        context: what its generation starts from.
        shown: int64 [n], what its answer begins with: the session so far, and the input without prompts.
        source: the encoder's input; None: there is no encoder.
        adapter: what is added to the model's weights; None: nothing.
        root: what the prefix cache's pages of it begin with.
        start: entries of the cache before its context: a session's, or a prefix prompt's.
        window: entries of the cache that are kept at most.
        session_row: the row of a session that it continues; see sessions.py.
        guided: where it is in its grammar.
        needs_host: whether the host must know its last tokens before the next are chosen, or it has no room for more.
        beams: generated tokens and scores.
        endings: beams that have ended and were removed from the search, of an encoder-decoder.
        count: tokens of each beam that the host knows.
        launched: tokens of each beam for which a step was launched.
    """

    def __init__(self, row: Row, grammar: Grammar | None) -> None:
        self._row = row
        self.sampling, self.context, self.shown, self.source = row.sampling, row.context, row.shown, row.source
        self.adapter, self.root = row.adapter, row.adapter.root if row.adapter else 0
        self.width, self.max_tokens, self.end_id = row.sampling.beam_width, row.sampling.max_tokens, row.sampling.end_id
        self.start, self.window = self.context.prefix_length, UNBOUNDED
        self.session_row: SessionRow | None = None
        self.source_length = len(self.source.ids) if self.source else 0
        self.bad_words, self.stop_words = self.sampling.bad_words, self.sampling.stop_words
        self.end_ids = self.sampling.stop_token_ids | {self.end_id}
        self.guided = grammar.begin(self.end_ids) if grammar else None
        self.needs_host = self.width > 1 or bool(self.bad_words) or not self.max_tokens
        self._begin()

    def _begin(self) -> None:
        self.beams = [Beam(score=DEAD if beam else 0.0) for beam in range(self.width)]
        self.endings: list[Beam] = []
        self.count = self.launched = 0

    def continue_session(self, row: SessionRow, window: int) -> None:
        """Go on from a session's row, of which ``window`` tokens are kept; 0: all."""
        before, new = np.array(row.tokens, np.int64), self.context.ids
        if row.tokens and not len(self.shown):  # no input: start_id is for a beginning
            new = new[:0]
        self.context = Context(np.concatenate((before[row.cached :], new)))
        self.shown = np.concatenate((before, self.shown))
        self.session_row, self.start, self.window = row, row.cached, window or UNBOUNDED

    def inputs(self, beam: int = 0) -> Array:
        """Return the tokens that a beam's context is run with, [T]: what was generated before a preemption, too."""
        if not self.count:
            return self.context.ids
        # All beams have one position. Of one that has ended, what follows its last token is never used.
        tokens = np.zeros(self.count, np.int64)
        tokens[: len(self.beams[beam].tokens)] = self.beams[beam].tokens
        return np.concatenate((self.context.ids, tokens))

    def tokens_to_run(self, found: int) -> int:
        """Return how many tokens its prefill runs, of its context or of its encoder's input, if ``found`` are known."""
        return max(len(self.context.ids) + self.count - found, self.source_length)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its input, an encoder's if there is one; embeddings that stand for tokens do not count."""
        return int((self._row.source or self._row.context).own_tokens.sum())

    @property
    def text(self) -> Array:
        """What its output may repeat, int64 [n]: an encoder's input, and what its answer begins with."""
        return np.concatenate((self.source.ids, self.shown)) if self.source else self.shown

    def last_token(self, beam: int) -> int:
        """Return the next input of a beam; of one that has ended any token."""
        tokens = self.beams[beam].tokens
        return tokens[-1] if len(tokens) == self.count else 0

    @property
    def needs_hidden(self) -> bool:
        """Whether outputs need the hidden states of all of its context; once it has tokens, these outputs are there."""
        params = self.sampling
        scores = params.is_return_context_cum_log_probs or params.is_return_context_log_probs
        return not self.count and (scores or params.is_return_context_embeddings)

    @property
    def max_entries(self) -> int:
        """Entries of the cache that each beam takes at the end."""
        return min(self.start + len(self.context.ids) + self.max_tokens, self.window)

    @property
    def first_entries(self) -> int:
        """Entries of the cache that a beam takes when its context is run."""
        return min(self.start + len(self.context.ids) + self.count, self.max_entries)

    @property
    def next_position(self) -> int:
        """The position of the first token that is decoded, when it joins the batch."""
        return self.start + len(self.context.ids) + self.count - (1 if self.source else 0)

    @property
    def cached(self) -> int:
        """Tokens of each beam whose keys and values are cached when the launched steps are done."""
        if self.source:  # the first step runs the last token of its context
            return len(self.context.ids) - 1 + self.launched
        return self.start + len(self.context.ids) + max(0, self.launched - 1)

    @property
    def cached_entries(self) -> int:
        """Entries of the cache that a beam's cached tokens take."""
        return min(self.cached, self.window)

    def tail(self, beam: Beam, count: int) -> list[int]:
        """Return the last tokens of its shown input and a beam's output."""
        missing = count - len(beam.tokens)
        if missing > 0:
            return [*self.shown[-missing:].tolist(), *beam.tokens]
        return beam.tokens[len(beam.tokens) - count :].tolist()

    def append(
        self, beam: Beam, token: int, gain: float | None = None, log_prob: float = 0.0, raw_scores: bytes = b""
    ) -> None:
        """Append a token to a beam.

        Args:
            beam: of this row.
            token: to append.
            gain: is added to the score; None: the request needs neither the score nor ``log_prob``.
            log_prob: the token's log-probability in the answer.
            raw_scores: see Beam; empty: the request does not need them.
        """
        words = self.stop_words
        is_stop = bool(words) and words.is_completed_by(token, self.tail(beam, words.reach))
        beam.tokens.append(token)
        if token in self.end_ids:
            beam.finish = FinishReason.END_ID
        elif is_stop:
            beam.finish = FinishReason.STOP_WORDS
        beam.raw_scores.frombytes(raw_scores)
        if gain is not None:
            beam.score += gain
            beam.log_probs.append(log_prob)

    def begin_score(self, score: float) -> None:
        """Begin the first beam's score with its context's."""
        self.beams[0].score = score

    @property
    def beam_length(self) -> int:
        """The length by which beam search divides scores in the coming step; see sampling/beam.py."""
        if self.source:
            return self.count + 1
        return len(self.context.ids) + len(self.beams[0].tokens) - self.beams[0].has_ended

    def branch(self, found: list[Candidate]) -> list[Candidate]:
        """Choose the K best of the candidates, and make them this row's beams."""
        if self.source:
            found = [each for rank, each in enumerate(found) if not self._remove_ended(each, rank)]
        chosen = found[: self.width]
        self.beams = [self._child(each) for each in chosen]
        return chosen

    def _child(self, found: Candidate) -> Beam:
        parent = self.beams[found.parent]
        child = Beam(parent.tokens[:], parent.log_probs[:], found.score, parent.finish, found.rank)
        if not parent.has_ended:
            self.append(child, found.token, 0.0, found.gain)
        return child

    def _remove_ended(self, found: Candidate, rank: int) -> bool:
        """Return whether a candidate has ended; store it if it is among the K best."""
        has_ended = self.beams[found.parent].has_ended or found.token == self.end_id
        if has_ended and rank < self.width:
            self._add_ending(self._child(found))
        return has_ended

    def _add_ending(self, ending: Beam) -> None:
        self.endings = sorted([*self.endings, ending], key=lambda each: -each.rank)[: self.width]

    def _settle_endings(self) -> None:
        """Replace the beams by the K best that have ended, and, if fewer than K have ended, the best others."""
        for beam in self.beams if len(self.endings) < self.width else ():
            beam.rank = beam.score / len(beam.tokens) ** self.sampling.len_penalty
            self._add_ending(beam)
        self.beams = self.endings
