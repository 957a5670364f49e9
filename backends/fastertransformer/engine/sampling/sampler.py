"""Choose the next token of every row from its logits, on the device, and bring the tokens to the host behind it.

What is chosen goes into the network's next step on the device; the host learns of it later, so it need not wait before
it asks for that step. Beams and bad words are chosen with the host's help: it then waits; see Sequence.needs_host.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cache.sizing import MOST_SLOTS, upload
from ..ops.kernels import can_run_on
from ..request.parse import Array, Request
from ..scheduling.sequence import Sequence
from ..steps.graphs import Chosen
from ..steps.steps import Steps
from . import sampling
from .beam import candidates

Owners = list[tuple[Sequence, int]]  # sequence and beam in each slot

_FLOATS = ("temperature", "repetition_penalty", "presence_penalty", "top_p_decay", "top_p_min", "initial", "top_p")
_INTEGERS = ("random_seed", "end_id", "min_length", "top_p_reset_ids", "top_k", "count")
_NEUTRAL = {"temperature": 1, "repetition_penalty": 1, "presence_penalty": 0, "min_length": 0}
_PENALTIES = {"repetition_penalty", "presence_penalty"}


class Flight:
    """Tokens that are on their way to the host.

    Args:
        owners: whose they are.
        tokens: int64 [N], sampling.NOT_FINITE among them.
        log_probs: fp32 [2, N], see sampling.token_log_probs, 0 of rows that do not ask; None: nobody does.
    """

    def __init__(self, owners: Owners, tokens: Tensor, log_probs: Tensor | None) -> None:
        self._owners = owners
        # To a host from a GPU that is a copy into pinned memory which nobody waits for yet.
        self._tokens = tokens.to("cpu", non_blocking=True)
        self._log_probs = None if log_probs is None else log_probs.to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def land(self) -> list[tuple[tuple[Sequence, int], int, Several[float]]]:
        """Wait; give of each slot its owner, its token, and the two log-probabilities, or nothing if nobody asks."""
        if self._event:
            self._event.synchronize()
        gains = [()] * len(self._owners) if self._log_probs is None else self._log_probs.T.tolist()
        return list(zip(self._owners, self._tokens.tolist(), gains, strict=True))


class Choice:
    """What sampling knows of the row in each slot, and the chain of sampling applied to all of them at once.

    A row's numbers are written when it comes and move with it; in between nothing is uploaded but what words ban.

    Args:
        steps: the network and its cache.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps, self._device = steps, steps.device
        self._floats = torch.zeros(MOST_SLOTS, len(_FLOATS), device=self._device)
        self._integers = torch.zeros(MOST_SLOTS, len(_INTEGERS), dtype=torch.long, device=self._device)
        self._occurred: Tensor | None = None  # bool [slots, V], as soon as a row has a penalty

    def begin(self, first: int, rows: Several[Sequence]) -> None:
        """Learn of the rows in the slots from ``first`` on."""
        vocab_size = self._steps.config.vocab_size
        for row in rows:
            row.numbers = row.numbers or _numbers(row.job.request, row.row, vocab_size)
        for table, names, kind in ((self._floats, _FLOATS, np.float32), (self._integers, _INTEGERS, np.int64)):
            numbers = np.array([[row.numbers[name] for name in names] for row in rows], kind)
            table[first : first + len(rows)] = upload(numbers, self._device)
        for slot, row in enumerate(rows, first):
            if any(row.numbers[name] != _NEUTRAL[name] for name in _PENALTIES):
                if self._occurred is None:
                    self._occurred = torch.zeros(MOST_SLOTS, vocab_size, dtype=torch.bool, device=self._device)
                self._occurred[slot] = False
                self._occurred[slot].index_fill_(0, upload(row.shown, self._device), True)

    def move(self, targets: Array, sources: Array) -> None:
        """Overwrite slots with others, int64 [n] each; all are read before any is written."""
        to, of = upload(np.stack((targets, sources)), self._device)
        for table in (self._floats, self._integers, self._occurred):
            if table is not None:
                table[to] = table[of]

    def arrange(self, owners: Owners) -> None:
        """Learn whose row is in each slot: so the host need not ask the device what a step needs."""
        self._owners, rows = owners, [sequence for sequence, _ in owners]
        columns = *self._floats[: len(rows)].T, *self._integers[: len(rows)].T
        self._of = dict(zip((*_FLOATS, *_INTEGERS), columns, strict=True))  # what the device knows, [N] each
        numbers = [row.numbers for row in rows]
        self._used = {name for name, neutral in _NEUTRAL.items() if any(each[name] != neutral for each in numbers)}
        self._searching = [row for row, beam in owners if row.width > 1 and row.limit and not beam]
        self._has_bad_words = any(row.bad_words for row in rows)
        sampled = [slot for slot, each in enumerate(numbers) if each["is_sampled"]]
        scored = [slot for slot, each in enumerate(numbers) if each["wants_log_probs"]]
        self._sampled, self._scored = (upload(np.array(each, np.int64), self._device) for each in (sampled, scored))
        self._has_top_p_alone = any(not numbers[slot]["top_k"] for slot in sampled)
        self._largest = max((numbers[slot]["top_k"] for slot in (*sampled, *scored)), default=0)
        has_wishes = bool(self._used or sampled or scored or any(row.needs_host for row in rows))
        self._is_plain = not has_wishes  # every row takes its likeliest token, whatever has come before

    def launch(self, before: int, parts: Several[Chosen]) -> Flight:
        """Choose, and have the next step go on from there.

        Args:
            before: slots whose rows have just had a decode step, which has put its likeliest tokens in its place.
            parts: what follows: of those slots, and of the others; where there are any.
        """
        tokens, log_probs = _joined([each[1] for each in parts]), None
        if self._is_plain:
            if before < len(tokens):
                self._steps.go_on_with(before, tokens[before:].clamp(min=0))
        else:
            chosen, log_probs = self._choose(_joined([self._steps.whole(each) for each in parts]))
            self._steps.go_on_with(0, chosen)
            tokens = torch.where(tokens == sampling.NOT_FINITE, sampling.NOT_FINITE, chosen)
        return Flight(self._owners, tokens, log_probs)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Choose by fp32 logits [N, V]; give tokens, and the log-probabilities that are asked for."""
        logits, log_probs = self._penalise(logits), None
        tokens = logits.argmax(dim=-1)
        if len(self._sampled):
            tokens[self._sampled] = self._draw(logits)
        if len(index := self._scored):
            chosen = logits[index], self._of["top_k"][index], tokens[index]
            log_probs = logits.new_zeros(2, len(logits))
            log_probs[:, index] = torch.stack(sampling.token_log_probs(*chosen, self._largest))
        for sequence in self._searching:
            self._search(sequence, logits, tokens)
        self._record(tokens)
        return tokens, log_probs

    def _penalise(self, logits: Tensor) -> Tensor:
        """Apply what does not depend on the way of choosing: [N, V] -> [N, V]."""
        now = self._of
        if self._has_bad_words:
            words = [(row.bad_words, row.tail(row.beams[beam], row.bad_words.reach)) for row, beam in self._owners]
            logits = sampling.ban(logits, [bad.completions(tail) for bad, tail in words])
        if "temperature" in self._used:
            logits = sampling.apply_temperature(logits, now["temperature"])
        if self._used & _PENALTIES and self._occurred is not None:  # begin has made it
            occurred = self._occurred[: len(logits)]
            penalties = now["repetition_penalty"], now["presence_penalty"]
            logits = sampling.apply_repetition_penalty(logits, *penalties, occurred)
        if "min_length" in self._used:
            logits = sampling.apply_min_length(logits, now["min_length"], now["count"], now["end_id"])
        return logits

    def _draw(self, logits: Tensor) -> Tensor:
        """Draw a token for each of the slots in which chance chooses, [n], from penalised logits [N, V]."""
        names = "top_k", "top_p", "random_seed", "count"
        top_k, top_p, seed, count = (self._of[name][self._sampled] for name in names)
        uniform = sampling.draw_uniform(seed, count)
        if can_run_on(self._device):
            from ..ops.kernels.sampling import draw_tokens

            return draw_tokens(logits, self._sampled, top_k, top_p, uniform)
        logits = logits[self._sampled]
        if self._has_top_p_alone:
            return sampling.draw(sampling.keep_top_p(sampling.keep_top_k(logits, top_k, self._largest), top_p), uniform)
        values, ids = sampling.narrow_to_top_k(logits, top_k, self._largest)
        return ids.gather(1, sampling.draw(sampling.keep_top_p(values, top_p), uniform)[:, None])[:, 0]

    def _search(self, sequence: Sequence, logits: Tensor, tokens: Tensor) -> None:
        """Choose a sequence's next beams and write their tokens into [N]."""
        slots, numbers = np.array(sequence.slots), sequence.numbers
        index = upload(slots, self._device)
        rate, length = numbers["beam_search_diversity_rate"], sequence.beam_length
        log_probs = logits[index].log_softmax(-1)
        found = candidates(log_probs, sequence.beams, sequence.end_id, length, numbers["len_penalty"], rate)
        chosen = sequence.branch(found)
        parents = np.array([each.parent for each in chosen])
        if (moved := parents != np.arange(len(slots))).any():
            self._steps.copy(slots[moved], slots[parents[moved]], sequence.held)
            self.move(slots[moved], slots[parents[moved]])
        tokens[index] = torch.tensor([each.token for each in chosen], device=self._device)

    def _record(self, tokens: Tensor) -> None:
        """Go on to the next token, the chosen ones being [N]."""
        now = self._of
        now["count"].add_(1)
        if self._used & _PENALTIES and self._occurred is not None:
            self._occurred[: len(tokens)].scatter_(1, tokens[:, None], True)
        if len(self._sampled):
            top_p, decay, least = now["top_p"], now["top_p_decay"], now["top_p_min"]
            decayed = sampling.decay_top_p(top_p, now["initial"], decay, least, now["top_p_reset_ids"], tokens)
            # FasterTransformer's top-k layer has a top_p that stays.
            top_p.copy_(torch.where(now["top_k"] == 0, decayed, top_p))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _numbers(request: Request, row: int, vocab_size: int) -> dict[str, Any]:
    """Give what the device is told of a row, and whether it is sampled by chance and wants log-probabilities."""
    values = {name: array[row].item() for name, array in request.scalars.items()}
    top_k, top_p = sampling.resolve_top_k_top_p(values["runtime_top_k"], values["runtime_top_p"])
    decay, least = values["top_p_decay"], values["top_p_min"]
    values |= {"top_k": top_k, "top_p": top_p, "initial": top_p, "count": 0}
    # Outside (0, 1] they are replaced, as ``set_topp_runtime_args`` does.
    values["top_p_decay"], values["top_p_min"] = decay if 0 < decay <= 1 else 1.0, least if 0 < least <= 1 else 0.5
    values["random_seed"] = request.scalars["random_seed"][row].astype(np.int64)  # its bits
    # The likeliest token has at least 1 / V: a nucleus that never has more leaves chance no choice.
    most = top_p if top_k else max(top_p, values["top_p_min"])
    is_search = request.beam_width > 1
    values["is_sampled"] = top_k != 1 and most > 1 / vocab_size and not is_search
    values["wants_log_probs"] = values["is_return_log_probs"] and not is_search  # a beam has them anyway
    return values
