"""What sampling knows of the row in each slot, on the device, and the chain of sampling applied to all of them at once.

A row's numbers are written when it comes and move with it; in between nothing is uploaded but what words ban.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention.cache import MOST_SLOTS, upload
from ..kernels import can_run_on
from ..requests.request import Array, Request
from . import sampling
from .sequence import Sequence

_FLOATS = ("temperature", "repetition_penalty", "presence_penalty", "top_p_decay", "top_p_min", "initial", "top_p")
_INTEGERS = ("random_seed", "end_id", "min_length", "top_p_reset_ids", "top_k", "count")
_NEUTRAL = {"temperature": 1, "repetition_penalty": 1, "presence_penalty": 0, "min_length": 0}
_PENALTIES = {"repetition_penalty", "presence_penalty"}


class SlotState:
    """Sampling parameters and state of all slots in use.

    Args:
        vocab_size: V.
        device: of the logits.

    Attributes:
        is_plain: whether every row takes its likeliest token, whatever has come before.
        wanting_log_probs: slots whose rows ask for log-probabilities; beams have them anyway.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._floats = torch.zeros(MOST_SLOTS, len(_FLOATS), device=device)
        self._integers = torch.zeros(MOST_SLOTS, len(_INTEGERS), dtype=torch.long, device=device)
        self._nobody = torch.zeros(0, dtype=torch.long, device=device)
        self._occurred: Tensor | None = None  # bool [slots, V], as soon as a row has a penalty
        self.arrange([])

    def column(self, name: str) -> Tensor:
        """Give a parameter of the slots in use, [N]: a view."""
        if name in _FLOATS:
            return self._floats[: self._count, _FLOATS.index(name)]
        return self._integers[: self._count, _INTEGERS.index(name)]

    def write(self, first: int, rows: Several[Sequence]) -> None:
        """Begin rows in the slots from ``first`` on."""
        for table, names, kind in ((self._floats, _FLOATS, np.float32), (self._integers, _INTEGERS, np.int64)):
            numbers = np.array([[row.numbers[name] for name in names] for row in rows], kind)
            table[first : first + len(rows)] = upload(numbers, self._device)
        for slot, row in enumerate(rows, first):
            if any(row.numbers[name] != _NEUTRAL[name] for name in _PENALTIES):
                if self._occurred is None:
                    size = (MOST_SLOTS, self._vocab_size)
                    self._occurred = torch.zeros(size, dtype=torch.bool, device=self._device)
                self._occurred[slot] = False
                self._occurred[slot].index_fill_(0, upload(row.shown, self._device), True)

    def copy(self, targets: Array, sources: Array) -> None:
        """Overwrite slots with others, int64 [n] each; all are read before any is written."""
        to, of = upload(np.stack((targets, sources)), self._device)
        for table in (self._floats, self._integers, self._occurred):
            if table is not None:
                table[to] = table[of]

    def arrange(self, rows: Several[Sequence]) -> None:
        """Say whose row is in each of the first slots: so the host need not ask the device what a step needs."""
        numbers = [row.numbers for row in rows]
        self._count = len(rows)
        self._used = {name for name, neutral in _NEUTRAL.items() if any(each[name] != neutral for each in numbers)}
        sampled = [slot for slot, each in enumerate(numbers) if each["is_sampled"]]
        self.wanting_log_probs = [slot for slot, each in enumerate(numbers) if each["wants_log_probs"]]
        self.is_plain = not (self._used or sampled or self.wanting_log_probs)
        self._sampled, self._wanting = self._index(sampled), self._index(self.wanting_log_probs)
        self._largest = max((numbers[slot]["top_k"] for slot in sampled), default=0)
        self._has_top_p_alone = any(not numbers[slot]["top_k"] for slot in sampled)
        self._largest_wanting = max((numbers[slot]["top_k"] for slot in self.wanting_log_probs), default=0)

    def _index(self, slots: list[int]) -> Tensor:
        return upload(np.array(slots, np.int64), self._device) if slots else self._nobody

    def penalise(self, logits: Tensor) -> Tensor:
        """Apply what does not depend on the way of choosing: [N, V] -> [N, V]."""
        if "temperature" in self._used:
            logits = sampling.apply_temperature(logits, self.column("temperature"))
        if self._used & _PENALTIES:
            assert self._occurred is not None  # write has made it
            penalty, presence = self.column("repetition_penalty"), self.column("presence_penalty")
            logits = sampling.apply_repetition_penalty(logits, penalty, presence, self._occurred[: self._count])
        if "min_length" in self._used:
            end_id = self.column("end_id")
            logits = sampling.apply_min_length(logits, self.column("min_length"), self.column("count"), end_id)
        return logits

    def choose(self, logits: Tensor) -> Tensor:
        """Choose a token for every slot: penalised logits [N, V] -> [N]."""
        tokens = logits.argmax(dim=-1)
        if len(self._sampled):
            index = self._sampled
            top_k, top_p = self.column("top_k")[index], self.column("top_p")[index]
            uniform = sampling.draw_uniform(self.column("random_seed")[index], self.column("count")[index])
            if can_run_on(logits.device):
                from ..kernels.draw import draw_tokens

                tokens[index] = draw_tokens(logits, index, top_k, top_p, uniform)
            elif self._has_top_p_alone:
                tokens[index] = sampling.draw(
                    sampling.keep_top_p(sampling.keep_top_k(logits[index], top_k, self._largest), top_p), uniform
                )
            else:
                values, ids = sampling.narrow_to_top_k(logits[index], top_k, self._largest)
                tokens[index] = ids.gather(1, sampling.draw(sampling.keep_top_p(values, top_p), uniform)[:, None])[:, 0]
        return tokens

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities of the slots in wanting_log_probs, fp32 [2, n]; see sampling.token_log_probs."""
        index = self._wanting
        top_k = self.column("top_k")[index]
        return torch.stack(sampling.token_log_probs(logits[index], top_k, tokens[index], self._largest_wanting))

    def record(self, tokens: Tensor) -> None:
        """Go on to the next token, the chosen ones being [N]."""
        self.column("count").add_(1)
        if self._used & _PENALTIES:
            assert self._occurred is not None
            self._occurred[: self._count].scatter_(1, tokens[:, None], True)
        if len(self._sampled):
            top_p, initial, decay = self.column("top_p"), self.column("initial"), self.column("top_p_decay")
            least, reset_id = self.column("top_p_min"), self.column("top_p_reset_ids")
            decayed = sampling.decay_top_p(top_p, initial, decay, least, reset_id, tokens)
            # FasterTransformer's top-k layer has a top_p that stays.
            top_p.copy_(torch.where(self.column("top_k") == 0, decayed, top_p))


def numbers_of(request: Request, row: int, vocab_size: int) -> dict[str, Any]:
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
    values["wants_log_probs"] = values["is_return_log_probs"] and not is_search
    return values
