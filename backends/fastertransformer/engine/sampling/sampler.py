"""Choose the next token of every row from its logits on the device, and copy the tokens to the host asynchronously.

The chosen tokens are the network's next input on the device. The host reads them later, so it need not wait before it
launches the next step. For beam search and bad words the host must know them and waits; see Sequence.needs_host.
For grammars it must know them before it masks the next step's logits; see guided.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from ..arrays import MOST_SLOTS, Array, upload
from ..ops import logits as formulas
from ..ops import scoring
from ..ops.logits import NOT_FINITE, DrawLimits
from ..request.sampling_params import SamplingParams
from ..rows.sequence import Sequence
from ..steps.graphs import Chosen
from ..steps.steps import Steps
from .beam import candidates
from .guided import GuidedRows
from .needs import StepNeeds
from .pending import Owners, PendingTokens
from .token_counts import TokenCounts

# The columns of rows' parameters on the device, by their names in SamplingParams. Two more are the sampler's own: top_p
# decays, and its first value stays in initial_top_p; generated counts the tokens so far.
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "output_presence_penalty")
_FLOATS = ("temperature", *_PENALTIES, "min_p", "top_p_decay", "top_p_min", "top_p")
_INTEGERS = ("random_seed", "end_id", "min_length", "top_p_reset_ids", "top_k")
_COLUMNS = (*_FLOATS, "initial_top_p", *_INTEGERS, "generated")
_floats, _integers = attrgetter(*_FLOATS, "top_p"), attrgetter(*_INTEGERS)


class Sampler:
    """The sampling parameters of the row in each slot, and the sampling of all slots at once.

    A row's parameters are uploaded when it joins, and move with it between slots. Later only bad words are uploaded.

    Attributes:
        guided: the rows that have a grammar.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps, self._device = steps, steps.device
        self._floats = torch.zeros(MOST_SLOTS, len(_FLOATS) + 1, device=self._device)
        self._integers = torch.zeros(MOST_SLOTS, len(_INTEGERS) + 1, dtype=torch.long, device=self._device)
        self._occurred: Tensor | None = None  # bool [slots, V]; made for the first row with a penalty
        self._counts = TokenCounts(steps.config.vocab_size, self._device)
        self.guided = GuidedRows(steps.network.ops, steps.config.vocab_size, self._device)

    def add_rows(self, first: int, owners: Owners) -> None:
        """Upload the parameters of the rows in the slots from ``first`` on, and what depends on tokens they have."""
        slots = slice(first, first + len(owners))
        self._floats[slots] = upload(np.array([_floats(row.sampling) for row, _ in owners], np.float32), self._device)
        integers = np.array([(*_integers(row.sampling), row.count) for row, _ in owners], np.int64)
        self._integers[slots] = upload(integers, self._device)
        self._counts.fit(slots.stop, any(row.sampling.has_output_penalty for row, _ in owners))
        for slot, (row, beam) in enumerate(owners, first):
            if row.sampling.has_output_penalty:
                self._counts.begin(slot, np.array(row.beams[beam].tokens, np.int64))
            if row.sampling.has_penalty:
                if self._occurred is None:
                    vocab_size = self._steps.config.vocab_size
                    self._occurred = torch.zeros(MOST_SLOTS, vocab_size, dtype=torch.bool, device=self._device)
                self._occurred[slot] = False
                occurred = np.concatenate((row.shown, np.array(row.beams[beam].tokens, np.int64)))
                self._occurred[slot].index_fill_(0, upload(occurred, self._device), True)
            if row.count and row.sampling.is_sampled and not row.sampling.top_k:
                self._floats[slot, _FLOATS.index("top_p")] = _decayed(row.sampling, row.beams[beam].tokens)

    def move_rows(self, targets: Array, sources: Array) -> None:
        """Overwrite slots with others, int64 [n] each; all are read before any is written."""
        to, of = upload(np.stack((targets, sources)), self._device)
        for table in (self._floats, self._integers, self._occurred):
            if table is not None:
                table[to] = table[of]
        self._counts.move(to, of)

    def set_owners(self, owners: Owners) -> None:
        """Set the row of each slot, from which the host knows what a step needs without reading from the device."""
        rows = [sequence.sampling for sequence, _ in owners]
        self._owners, self._needs = owners, (needs := StepNeeds(owners))
        columns = *self._floats[: len(rows)].T, *self._integers[: len(rows)].T
        self._columns = dict(zip(_COLUMNS, columns, strict=True))
        if not needs.has_output_penalty:
            self._counts.drop()
        self._set_lists(rows)
        self.guided.set_owners(owners)
        self._sampled, self._scored = (
            upload(np.array(each, np.int64), self._device) for each in (needs.sampled, needs.scored)
        )
        if self.guided and self.guided.is_on_host:
            self._seeds = [(slot, rows[slot].random_seed) for slot in needs.sampled]
            temperature = self._columns["temperature"]
            scales = formulas.scale_of(temperature) if needs.draw_scales else torch.ones_like(temperature)
            self._scales: list[float] = scales.tolist()

    def _set_lists(self, rows: list[SamplingParams]) -> None:
        """Upload which tokens of which slots have a bias or are held back, and which slots request raw scores."""
        self._bias = self._held_back = None
        if any(row.logit_bias for row in rows):
            biases = [row.logit_bias for row in rows]
            values = upload(np.concatenate([each.values for each in biases]), self._device)
            self._bias = *self._upload_pairs([each.ids for each in biases]), values
        if any(row.min_length and row.stop_token_ids for row in rows):
            self._held_back = self._upload_pairs([sorted(row.stop_token_ids) * bool(row.min_length) for row in rows])
        raw = self._needs.raw
        self._raw_index = upload(np.array(raw, np.int64), self._device) if raw else None

    def _upload_pairs(self, tokens: Several[Several[int] | Array]) -> tuple[Tensor, Tensor]:
        """Upload some tokens of each slot as pairs: slots and tokens, int64 [n] each."""
        slots = np.repeat(np.arange(len(tokens)), list(map(len, tokens)))
        pairs = np.stack((slots, np.concatenate([np.asarray(each, np.int64) for each in tokens])))
        rows, ids = upload(pairs, self._device)
        return rows, ids

    def sample(self, before: int, parts: Several[Chosen], pending: Iterable[PendingTokens] = ()) -> PendingTokens:
        """Choose the next token of each slot, which is the next step's input.

        A decode step has just set the argmax of the first ``before`` slots as their next input. ``parts`` are logits
        and argmax of these slots, if any, and of the other slots, if any. ``pending`` are tokens of earlier steps that
        the sequences do not have yet, the oldest first.
        """
        tokens, log_probs, raw_scores = _joined([each[1] for each in parts]), None, None
        if self._needs.is_greedy and not self.guided:
            if before < len(tokens):
                self._steps.slots.set_tokens(before, tokens[before:].clamp(min=0))
            return PendingTokens(self._owners, tokens, None, None, [])
        logits = _joined([self._steps.predictions.full_logits(each) for each in parts])
        if self._needs.is_greedy:
            argmax, tokens = tokens, self.guided.choose(logits, tokens, [each.by_sequence() for each in pending])
            if before < len(tokens) or tokens is not argmax:
                self._steps.slots.set_tokens(0, tokens.clamp(min=0))
        else:
            chosen, log_probs, raw_scores = self._sample(logits, pending)
            self._steps.slots.set_tokens(0, chosen)
            tokens = torch.where(tokens == NOT_FINITE, NOT_FINITE, chosen)
        return PendingTokens(self._owners, tokens, log_probs, raw_scores, self._needs.raw)

    def _sample(
        self, raw_logits: Tensor, pending: Iterable[PendingTokens]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Choose by fp32 logits [N, V]; returns tokens, and the log-probabilities and raw scores that rows request."""
        raw_rows = None if self._raw_index is None else raw_logits[self._raw_index]  # masking may overwrite them
        logits, log_probs, raw_scores = self._penalise(raw_logits), None, None
        if self.guided and len(self._sampled) and self.guided.is_on_host:
            logits, tokens = self._draw_on_host(logits, [each.by_sequence() for each in pending])
        else:
            # Launched before the host computes masks: what is launched after late ones keeps a GPU waiting.
            limits = self._draw_limits(self._sampled) if len(self._sampled) else None
            if self.guided:
                logits = self.guided.keep(logits, [each.by_sequence() for each in pending])
            if limits and self._needs.is_all_sampled:
                tokens = self._draw(logits, self._sampled, limits)
            else:
                tokens = logits.argmax(dim=-1)
                if limits:
                    tokens[self._sampled] = self._draw(logits, self._sampled, limits)
        if len(index := self._scored):
            top_k, log_probs = self._columns["top_k"][index], logits.new_zeros(2, len(logits))
            own = scoring.token_log_probs(logits[index], top_k, tokens[index], self._needs.largest_top_k)
            log_probs[:, index] = torch.stack(own)
        for sequence in self._needs.searched:
            self._search(sequence, logits, tokens)
        if raw_rows is not None:
            raw_scores = scoring.score_rows(raw_rows, tokens[self._raw_index], self._needs.most_tops)
        self._record(tokens)
        return tokens, log_probs, raw_scores

    def _draw_on_host(self, logits: Tensor, pending: Several[Mapping[Sequence, int]]) -> tuple[Tensor, Tensor]:
        """Mask tokens that grammars do not allow, and choose: by torch where these allow many.

        Returns:
            The logits, of which the rows are masked that a later step needs, and all tokens.
        """
        counts = self._columns["generated"].tolist()
        uniform = {slot: formulas.draw_uniform_of(seed, counts[slot]) for slot, seed in self._seeds}
        logits, drawn = self.guided.keep_or_draw(logits, pending, uniform, self._scales)
        if rest := [slot for slot in uniform if slot not in drawn]:
            slots = torch.tensor(rest)
            numbers = torch.tensor([uniform[slot] for slot in rest], dtype=torch.float64)
            scales = torch.tensor([self._scales[slot] for slot in rest]) if self._needs.draw_scales else None
            limits = DrawLimits(self._columns["top_k"][slots], self._columns["top_p"][slots], numbers, scales)
            own = self._draw(logits, slots, self._completed(limits))
            drawn |= zip(rest, own.tolist(), strict=True)
        chosen = logits.argmax(dim=-1).tolist() if len(drawn) < len(logits) else [0] * len(logits)
        for slot, token in drawn.items():
            chosen[slot] = token
        self.guided.take(chosen)
        return logits, torch.tensor(chosen)

    def _penalise(self, logits: Tensor) -> Tensor:
        """Apply bad words, bias, penalties, temperature (or leave it to _draw) and minimum length: [N, V] -> [N, V]."""
        columns = self._columns
        if self._needs.has_bad_words:
            words = [(row.bad_words, row.tail(row.beams[beam], row.bad_words.reach)) for row, beam in self._owners]
            logits = formulas.ban(logits, [bad.completions(tail) for bad, tail in words])
        if self._bias:
            logits = formulas.add_bias(logits, *self._bias)
        if self._needs.has_output_penalty:
            frequency, presence = columns["frequency_penalty"], columns["output_presence_penalty"]
            logits = formulas.apply_output_penalty(logits, frequency, presence, self._counts.of(len(logits)))
        if self._needs.has_temperature and not self._needs.draw_scales:
            logits = formulas.apply_temperature(logits, columns["temperature"])
        if self._needs.has_penalty and self._occurred is not None:  # add_rows has made it
            repetition, presence = columns["repetition_penalty"], columns["presence_penalty"]
            logits = formulas.apply_repetition_penalty(logits, repetition, presence, self._occurred[: len(logits)])
        if self._needs.has_min_length:
            logits = formulas.apply_min_length(logits, columns["min_length"], columns["generated"], columns["end_id"])
        if self._held_back:
            logits = formulas.hold_back(logits, *self._held_back, columns["min_length"], columns["generated"])
        return logits

    def _draw_limits(self, slots: Tensor) -> DrawLimits:
        """Return what limits the draw of some slots, [n]."""
        columns = self._columns
        limits = self._steps.network.ops.draw_limits(
            slots,
            columns["random_seed"],
            columns["generated"],
            columns["top_k"],
            columns["top_p"],
            temperature=columns["temperature"] if self._needs.draw_scales else None,
        )
        return self._completed(limits)

    def _completed(self, limits: DrawLimits) -> DrawLimits:
        """Add what the host knows."""
        needs = self._needs
        return limits._replace(largest=needs.largest_top_k, is_narrow=needs.is_narrow, keeps_all=needs.keeps_all)

    def _draw(self, logits: Tensor, slots: Tensor, limits: DrawLimits) -> Tensor:
        """Draw a token for some slots, [n], from penalised logits [N, V]."""
        if self._needs.has_min_p:
            logits = formulas.keep_min_p(logits, self._columns["min_p"])
        return self._steps.network.ops.draw_tokens(logits, slots, limits)

    def _search(self, sequence: Sequence, logits: Tensor, tokens: Tensor) -> None:
        """Choose a sequence's next beams and write their tokens into [N]."""
        slots, pages = np.array(sequence.slots), sequence.reservation.rows
        index = upload(slots, self._device)
        log_probs = logits[index].log_softmax(-1)
        chosen = sequence.branch(candidates(log_probs, sequence.beams, sequence.sampling, sequence.beam_length))
        parents = np.array([each.parent for each in chosen])
        if (moved := parents != np.arange(len(slots))).any():
            children, origins = np.flatnonzero(moved).tolist(), parents[moved].tolist()
            targets, sources = [pages[child] for child in children], [pages[origin] for origin in origins]
            self._steps.slots.copy(targets, sources, sequence.cached_entries)
            self.move_rows(slots[moved], slots[parents[moved]])
        tokens[index] = torch.tensor([each.token for each in chosen], device=self._device)

    def _record(self, tokens: Tensor) -> None:
        """Update counts, occurred tokens and top_p for the chosen tokens, [N]."""
        columns = self._columns
        columns["generated"].add_(1)
        if self._needs.has_penalty and self._occurred is not None:
            self._occurred[: len(tokens)].scatter_(1, tokens[:, None], True)
        self._counts.add(tokens)
        if self._needs.has_moving_top_p:
            decayed = formulas.decay_top_p(
                columns["top_p"],
                initial=columns["initial_top_p"],
                decay=columns["top_p_decay"],
                least=columns["top_p_min"],
                reset_id=columns["top_p_reset_ids"],
                token=tokens,
            )
            # FasterTransformer's top-k layer has a top_p that stays.
            columns["top_p"].copy_(torch.where(columns["top_k"] == 0, decayed, columns["top_p"]))


def _decayed(row: SamplingParams, tokens: Several[int]) -> Tensor:
    """Return the top_p of a row that has generated some tokens, computed as it was step by step."""
    top_p = initial = torch.tensor(row.top_p)
    decay, least, reset_id = map(torch.tensor, (row.top_p_decay, row.top_p_min, row.top_p_reset_ids))
    for token in torch.tensor(list(tokens)):
        top_p = formulas.decay_top_p(top_p, initial, decay, least, reset_id, token)
    return top_p


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
