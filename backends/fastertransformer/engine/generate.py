"""Continue a batch of inputs: prefill, then one token of every unfinished row at a time.

Unfinished rows always fill the first places of the cache: when a row ends, the last one moves into its place, so no
step computes a row that nobody waits for. Places are the rows in order of input length to begin with, so that a prefill
pass pads little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .request import Array, Request
from .sampling import (
    SamplingParameters,
    apply_repetition_penalty,
    apply_temperature,
    choose_tokens,
    draw_uniform,
    resolve_top_k_top_p,
    token_log_probs,
)
from .steps import Steps
from .words import ban

_PREFILL_TOKENS = 4096  # of one prefill pass, padding included: bounds the MLP's inner activations
_LOGITS_BYTES = 64 << 20  # of one block of logits for the input's log-probabilities


@dataclass(frozen=True)
class Generated:
    """What came out, a row for each of the request's.

    Attributes:
        tokens: int64 [B, max(output_lengths)], filled up with each row's end_id.
        counts: int64 [B], tokens generated, a final end_id or stop word included.
        cum_log_probs: fp32 [B], see sampling.token_log_probs; with wants_context_log_probs it also has the
            log-probabilities (without temperature and penalty) of the input's tokens from the second on. 0 for a row
            that does not want log-probabilities.
        output_log_probs: fp32 [B, max(output_lengths)]; 0 behind a row's end.
    """

    tokens: Array
    counts: Array
    cum_log_probs: Array
    output_log_probs: Array


@torch.inference_mode()
def generate(steps: Steps, request: Request) -> Generated:
    """Continue every row until its end_id, one of its stop words or its output length.

    Greedy and seeded rows get the same tokens whatever else is in the batch.

    Args:
        steps: the network and its cache, whose content is overwritten.
        request: one or, joined, several requests.
    """
    batch = _Batch(steps, request)
    hidden = batch.drop_finished(batch.prefill())  # a row may want no token at all
    while batch.rows.size:
        batch.sample(hidden)
        hidden = batch.drop_finished(hidden)
        if batch.rows.size:
            hidden = batch.decode()
    return batch.result


class _Batch:
    """The rows that are not finished, and what has been generated.

    Attributes:
        rows: [N] which row of the request sits in each place.
        result: of all rows.
    """

    def __init__(self, steps: Steps, request: Request) -> None:
        self._steps, self._request = steps, request
        self._device = steps.device
        batch, longest_output = request.batch_size, int(request.output_lengths.max())
        self.rows = np.argsort(request.input_lengths, kind="stable")
        self.result = Generated(
            tokens=np.repeat(request.end_id[:, None], longest_output, axis=1),
            counts=np.zeros(batch, np.int64),
            cum_log_probs=np.zeros(batch, np.float32),
            output_log_probs=np.zeros((batch, longest_output), np.float32),
        )
        steps.begin(batch, int((request.input_lengths + request.output_lengths).max()))
        self._count = 0  # tokens generated in each place
        self._tokens = torch.zeros(0, dtype=torch.long)
        self._has_ended = np.zeros(batch, bool)
        self._all_parameters = self._upload_parameters()
        seeds = [int(seed) for seed in request.random_seed]
        self._uniform = draw_uniform(seeds, request.output_lengths.tolist()).to(self._device)  # [B, steps]
        self._place_parameters()
        self._occurred = self._mark_inputs() if (request.repetition_penalty != 1).any() else None  # [N, V]

    def _upload_parameters(self) -> SamplingParameters:
        request = self._request
        top_k, top_p, temperature, penalty = (
            torch.from_numpy(values).to(self._device)
            for values in (request.top_k, request.top_p, request.temperature, request.repetition_penalty)
        )
        return SamplingParameters(*resolve_top_k_top_p(top_k, top_p), temperature, penalty)

    def _place_parameters(self) -> None:
        self._places = torch.from_numpy(self.rows).to(self._device)
        self._parameters = self._all_parameters.rows(self._places)
        self._has_temperature = bool((self._request.temperature[self.rows] != 1).any())
        self._wants_log_probs = bool(self._request.wants_log_probs[self.rows].any())
        self._bad_words = [self._request.bad_words[row] for row in self.rows]
        self._stop_words = [self._request.stop_words[row] for row in self.rows]

    def _mark_inputs(self) -> Tensor:
        """Say which tokens occur in the input of each place: bool [N, V]."""
        width = self._request.input_ids.shape[1]
        vocab = self._steps.config.vocab_size
        is_real = np.arange(width) < self._request.input_lengths[:, None]
        ids = np.where(is_real, self._request.input_ids, vocab)[self.rows]  # padding marks a column that is cut off
        occurred = torch.zeros(len(ids), vocab + 1, dtype=torch.bool, device=self._device)
        return occurred.scatter_(1, torch.from_numpy(ids).to(self._device), True)[:, :vocab]

    def prefill(self) -> Tensor:
        """Run all inputs; give the hidden state of each place's last input token, [N, hidden]."""
        lengths = self._request.input_lengths[self.rows]
        last = []
        for first, end in _prefill_passes(lengths):
            rows, width = self.rows[first:end], int(lengths[end - 1])
            ids = torch.from_numpy(self._request.input_ids[rows, :width]).to(self._device)  # [b, width]
            hidden = self._steps.prefill(ids, first)  # [b, width, hidden]
            ends = torch.from_numpy(lengths[first:end] - 1).to(self._device)
            last.append(hidden[torch.arange(end - first, device=self._device), ends])
            for place in np.flatnonzero(self._request.wants_context_log_probs[rows]):
                length = int(lengths[first + place])
                self.result.cum_log_probs[rows[place]] = self._context_log_prob(hidden[place, :length], ids[place])
        return torch.cat(last)

    def _context_log_prob(self, hidden: Tensor, ids: Tensor) -> float:
        """Sum the log-probabilities of ids[1:] given what precedes them: [length, hidden], [>=length] -> number."""
        length, total = hidden.shape[0], 0.0
        block = max(1, _LOGITS_BYTES // (4 * self._steps.config.vocab_size))
        for first in range(0, length - 1, block):
            end = min(first + block, length - 1)
            log_probs = self._steps.logits(hidden[first:end]).log_softmax(dim=-1)
            total += float(log_probs.gather(1, ids[first + 1 : end + 1, None]).double().sum())
        return total

    def sample(self, hidden: Tensor) -> None:
        """Choose the next token of every place from its last hidden state, [N, hidden]."""
        logits = self._steps.logits(hidden)  # [N, V]
        if any(self._bad_words):
            pairs = zip(self._bad_words, self.rows, strict=True)
            logits = ban(logits, [words.completions(self._tail(row, words.reach)) for words, row in pairs])
        if self._has_temperature:
            logits = apply_temperature(logits, self._parameters.temperature)
        if self._occurred is not None:
            logits = apply_repetition_penalty(logits, self._parameters.repetition_penalty, self._occurred)
        self._tokens = choose_tokens(logits, self._parameters, self._uniform[self._places, self._count])
        if self._occurred is not None:
            self._occurred.scatter_(1, self._tokens[:, None], True)
        if self._wants_log_probs:
            self._record_log_probs(logits)
        tokens = self._tokens.cpu().numpy()
        is_last = tokens == self._request.end_id[self.rows]
        if any(self._stop_words):
            places = zip(tokens.tolist(), self._stop_words, self.rows, strict=True)
            is_last |= [words.is_completed_by(token, self._tail(row, words.reach)) for token, words, row in places]
        self._has_ended[self.rows] = is_last
        self.result.tokens[self.rows, self._count] = tokens
        self.result.counts[self.rows] += 1
        self._count += 1

    def _tail(self, row: int, count: int) -> list[int]:
        """Give the last tokens of a row's input and output."""
        output = self.result.tokens[row, max(0, self._count - count) : self._count].tolist()
        end = int(self._request.input_lengths[row])
        start = max(0, end - (count - len(output)))
        return [*self._request.input_ids[row, start:end].tolist(), *output]

    def _record_log_probs(self, logits: Tensor) -> None:
        full, reported = token_log_probs(logits, self._parameters.top_k, self._tokens)
        wanted = self._request.wants_log_probs[self.rows]
        rows = self.rows[wanted]
        self.result.cum_log_probs[rows] += full.cpu().numpy()[wanted]
        self.result.output_log_probs[rows, self._count] = reported.cpu().numpy()[wanted]

    def drop_finished(self, hidden: Tensor) -> Tensor:
        """Keep the unfinished rows, in the first places: hidden [N, hidden] -> [N', hidden]."""
        is_open = (self.result.counts < self._request.output_lengths) & ~self._has_ended
        open_places = is_open[self.rows]
        kept = int(open_places.sum())
        if kept == len(self.rows):
            return hidden
        sources = np.arange(kept)
        sources[~open_places[:kept]] = kept + np.flatnonzero(open_places[kept:])  # from behind into the gaps
        gaps = np.flatnonzero(~open_places[:kept])
        if gaps.size:
            self._steps.move(gaps.tolist(), sources[gaps].tolist())
        index = torch.from_numpy(sources).to(self._device)
        self.rows = self.rows[sources]
        self._place_parameters()
        if self._occurred is not None:
            self._occurred = self._occurred[index]
        if self._count:
            self._tokens = self._tokens[index]
        return hidden[index]

    def decode(self) -> Tensor:
        """Run the tokens just chosen; give the hidden state of each place, [N, hidden]."""
        lengths = self._request.input_lengths[self.rows] + self._count  # with the token just chosen
        return self._steps.decode(self._tokens, lengths)


def _prefill_passes(lengths: Array) -> Iterator[tuple[int, int]]:
    """Cut ascending lengths into runs [first, end) of at most _PREFILL_TOKENS tokens with padding, at least one row."""
    first = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or (end + 1 - first) * int(lengths[end]) > _PREFILL_TOKENS:
            yield first, end
            first = end
