"""What the next steps do for the rows in their slots, as far as the host knows it without reading from the device."""

from __future__ import annotations

from .pending import Owners


class StepNeeds:
    """What sampling must do for the rows in the slots, until these change.

    Attributes:
        has_bad_words, has_temperature, has_penalty, has_output_penalty, has_min_length, has_min_p, has_moving_top_p:
            whether a row has it.
        sampled, scored, raw: slots whose token is drawn, has log-probabilities, and has raw scores.
        searched: sequences of several beams.
        is_narrow: every row that is sampled has a top_k.
        keeps_all: no row that is sampled leaves out tokens.
        largest_top_k: of rows that are sampled or scored.
        most_tops: largest number of raw scores that a row requests.
        draw_scales: whether the draw applies the temperature, since nothing else needs the logits with it.
        is_all_sampled: no row takes its argmax.
        is_greedy: in every row the argmax of unchanged logits is taken, or of those that its grammar allows.
    """

    def __init__(self, owners: Owners) -> None:
        rows = [sequence.sampling for sequence, _ in owners]
        self.has_bad_words = any(row.bad_words for row in rows)
        self.has_temperature = any(row.temperature != 1 for row in rows)
        self.has_penalty = any(row.has_penalty for row in rows)
        self.has_output_penalty = any(row.has_output_penalty for row in rows)
        self.has_min_length = any(row.min_length for row in rows)
        self.has_min_p = any(row.min_p and row.is_sampled for row in rows)
        self.searched = [each for each, beam in owners if each.width > 1 and each.max_tokens and not beam]
        self.sampled = [slot for slot, row in enumerate(rows) if row.is_sampled]
        self.scored = [slot for slot, row in enumerate(rows) if row.needs_token_log_probs]
        self.raw = [slot for slot, row in enumerate(rows) if row.is_return_raw_log_probs]
        self.is_narrow = all(rows[slot].top_k for slot in self.sampled)
        self.keeps_all = all(rows[slot].keeps_all for slot in self.sampled)
        self.has_moving_top_p = any(rows[slot].has_moving_top_p for slot in self.sampled)
        self.largest_top_k = max((rows[slot].top_k for slot in (*self.sampled, *self.scored)), default=0)
        self.most_tops = max((rows[slot].num_top_log_probs for slot in self.raw), default=0)
        has_later = self.has_penalty or self.has_min_length or self.has_min_p or self.scored or self.searched
        self.draw_scales = self.has_temperature and not has_later
        self.is_all_sampled = len(self.sampled) == len(rows)
        changes_logits = self.has_temperature or self.has_penalty or self.has_output_penalty or self.has_min_length
        needs_logits = changes_logits or any(row.logit_bias for row in rows) or self.sampled or self.scored or self.raw
        self.is_greedy = not (needs_logits or any(each.needs_host for each, _ in owners))
