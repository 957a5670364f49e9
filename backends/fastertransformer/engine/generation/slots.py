"""What sampling knows of the row in each slot, on the device, and the chain of sampling applied to all of them at once.

A row's numbers are written when it comes and move with it; in between nothing is uploaded but what words ban.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..attention.cache import MOST_SLOTS, upload
from ..kernels import can_run_on
from ..requests.request import Array, Request
from .sampling import (
    apply_min_length,
    apply_repetition_penalty,
    apply_temperature,
    decay_top_p,
    draw,
    draw_uniform,
    keep_top_k,
    keep_top_p,
    narrow_to_top_k,
    resolve_top_k_top_p,
    token_log_probs,
)

_FLOATS = ("temperature", "repetition_penalty", "presence_penalty", "top_p_decay", "top_p_min", "initial", "top_p")
_INTEGERS = ("random_seed", "end_id", "min_length", "top_p_reset_ids", "top_k", "count")


class Traits(NamedTuple):
    """What a row needs of a step.

    Attributes:
        has_temperature: whether its logits are scaled.
        has_penalty: whether tokens that have occurred are penalised.
        has_min_length: whether its end may be forbidden.
        is_sampled: whether chance chooses.
        wants_log_probs: of the tokens chosen; a beam has them anyway.
        top_k: as sent.
    """

    has_temperature: bool
    has_penalty: bool
    has_min_length: bool
    is_sampled: bool
    wants_log_probs: bool
    top_k: int


_PLAIN = (False,) * 5

NewRow = tuple[Request, int, Traits, list[int]]  # row of a request, what it needs, tokens that count as having occurred


class SlotState:
    """Sampling parameters and state of all slots in use.

    Args:
        vocab_size: V.
        device: of the logits.

    Attributes:
        is_plain: whether every row takes its likeliest token, whatever has come before.
        wanting_log_probs: slots whose rows ask for log-probabilities.
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

    def write(self, first: int, rows: Sequence[NewRow]) -> None:
        """Begin rows in the slots from ``first`` on."""
        end = first + len(rows)
        numbers = [_numbers(request, row) for request, row, _, _ in rows]
        floats = np.array([[values[name] for name in _FLOATS] for values in numbers], np.float32)
        self._floats[first:end] = upload(floats, self._device)
        integers = np.array([[values[name] for name in _INTEGERS] for values in numbers], np.int64)
        self._integers[first:end] = upload(integers, self._device)
        for slot, (_, _, traits, shown) in enumerate(rows, first):
            if traits.has_penalty:
                if self._occurred is None:
                    size = (MOST_SLOTS, self._vocab_size)
                    self._occurred = torch.zeros(size, dtype=torch.bool, device=self._device)
                self._occurred[slot] = False
                self._occurred[slot].index_fill_(0, upload(np.array(shown, np.int64), self._device), True)

    def copy(self, targets: Array, sources: Array) -> None:
        """Overwrite slots with others, int64 [n] each; all are read before any is written."""
        to, of = upload(np.stack((targets, sources)), self._device)
        self._floats[to], self._integers[to] = self._floats[of], self._integers[of]
        if self._occurred is not None:
            self._occurred[to] = self._occurred[of]

    def arrange(self, rows: Sequence[Traits]) -> None:
        """Say whose row is in each of the first slots: so the host need not ask the device what a step needs."""
        self._count = len(rows)
        self._has_temperature = any(row.has_temperature for row in rows)
        self._has_penalty = any(row.has_penalty for row in rows)
        self._has_min_length = any(row.has_min_length for row in rows)
        self.is_plain = not any(row[:-1] != _PLAIN for row in rows)
        sampled = [slot for slot, row in enumerate(rows) if row.is_sampled]
        self.wanting_log_probs = [slot for slot, row in enumerate(rows) if row.wants_log_probs]
        self._sampled, self._wanting = self._index(sampled), self._index(self.wanting_log_probs)
        self._largest = max((rows[slot].top_k for slot in sampled), default=0)
        self._has_top_p_alone = any(not rows[slot].top_k for slot in sampled)
        self._largest_wanting = max((rows[slot].top_k for slot in self.wanting_log_probs), default=0)

    def _index(self, slots: list[int]) -> Tensor:
        return upload(np.array(slots, np.int64), self._device) if slots else self._nobody

    def penalise(self, logits: Tensor) -> Tensor:
        """Apply what does not depend on the way of choosing: [N, V] -> [N, V]."""
        if self._has_temperature:
            logits = apply_temperature(logits, self.column("temperature"))
        if self._has_penalty:
            assert self._occurred is not None  # write has made it
            penalty, presence = self.column("repetition_penalty"), self.column("presence_penalty")
            logits = apply_repetition_penalty(logits, penalty, presence, self._occurred[: self._count])
        if self._has_min_length:
            end_id = self.column("end_id")
            logits = apply_min_length(logits, self.column("min_length"), self.column("count"), end_id)
        return logits

    def choose(self, logits: Tensor) -> Tensor:
        """Choose a token for every slot: penalised logits [N, V] -> [N]."""
        tokens = logits.argmax(dim=-1)
        if len(self._sampled):
            index = self._sampled
            top_k, top_p = self.column("top_k")[index], self.column("top_p")[index]
            uniform = draw_uniform(self.column("random_seed")[index], self.column("count")[index])
            if can_run_on(logits.device):
                from ..kernels.draw import draw_tokens

                tokens[index] = draw_tokens(logits, index, top_k, top_p, uniform)
            elif self._has_top_p_alone:
                tokens[index] = draw(keep_top_p(keep_top_k(logits[index], top_k, self._largest), top_p), uniform)
            else:
                values, ids = narrow_to_top_k(logits[index], top_k, self._largest)
                tokens[index] = ids.gather(1, draw(keep_top_p(values, top_p), uniform)[:, None])[:, 0]
        return tokens

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities of the slots in wanting_log_probs, fp32 [2, n]; see sampling.token_log_probs."""
        index = self._wanting
        top_k = self.column("top_k")[index]
        return torch.stack(token_log_probs(logits[index], top_k, tokens[index], self._largest_wanting))

    def record(self, tokens: Tensor) -> None:
        """Go on to the next token, the chosen ones being [N]."""
        self.column("count").add_(1)
        if self._has_penalty:
            assert self._occurred is not None
            self._occurred[: self._count].scatter_(1, tokens[:, None], True)
        if len(self._sampled):
            top_p, initial, decay = self.column("top_p"), self.column("initial"), self.column("top_p_decay")
            decayed = decay_top_p(
                top_p, initial, decay, self.column("top_p_min"), self.column("top_p_reset_ids"), tokens
            )
            # FasterTransformer's top-k layer has a top_p that stays.
            top_p.copy_(torch.where(self.column("top_k") == 0, decayed, top_p))


def _numbers(request: Request, row: int) -> dict[str, Any]:
    """Give what the device is told of a row, by the names in _FLOATS and _INTEGERS."""
    values = {name: array[row].item() for name, array in request.scalars.items()}
    top_k, top_p = resolve_top_k_top_p(values["runtime_top_k"], values["runtime_top_p"])
    values |= {"top_k": top_k, "top_p": top_p, "initial": top_p, "count": 0}
    values["top_p_decay"], values["top_p_min"] = legal_decay(values["top_p_decay"], values["top_p_min"])
    values["random_seed"] = np.uint64(values["random_seed"]).astype(np.int64)  # its bits
    return values


def traits_of(request: Request, row: int, vocab_size: int) -> Traits:
    """Say what a row of a request needs."""
    scalars = {name: array[row] for name, array in request.scalars.items()}
    is_search = request.beam_width > 1
    return Traits(
        has_temperature=bool(scalars["temperature"] != 1),
        has_penalty=bool(scalars["repetition_penalty"] != 1 or scalars["presence_penalty"] != 0),
        has_min_length=bool(scalars["min_length"] > 0),
        is_sampled=not is_search and _is_sampled(scalars, vocab_size),
        wants_log_probs=not is_search and bool(scalars["is_return_log_probs"]),
        top_k=int(scalars["runtime_top_k"]),
    )


def _is_sampled(scalars: Mapping[str, Any], vocab_size: int) -> bool:
    """Say whether a row needs a random choice.

    Not with top_k 1, and not with a nucleus that the likeliest token fills always, for it has at least 1 / V.
    """
    top_k, top_p = int(scalars["runtime_top_k"]), float(scalars["runtime_top_p"])
    if top_k == 1 or (top_k == 0 and top_p == 0):
        return False
    least = legal_decay(scalars["top_p_decay"], scalars["top_p_min"])[1] if top_k == 0 else 0.0
    return top_p == 0 or max(top_p, least) > 1 / vocab_size


def legal_decay(decay: float, least: float) -> tuple[float, float]:
    """Replace top_p_decay and top_p_min outside (0, 1] by 1 and 0.5, as ``set_topp_runtime_args`` does."""
    return decay if 0 < decay <= 1 else 1.0, least if 0 < least <= 1 else 0.5
