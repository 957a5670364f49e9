"""From logits to tokens: a chain of small pure functions on [B, V], each row with its own parameters.

Order and formulas are FasterTransformer's: ``BaseSamplingLayer.cc`` (temperature, then repetition or presence penalty,
then minimum length), ``sampling_penalty_kernels.cu``, ``sampling_topk_kernels.cu`` and ``sampling_topp_kernels.cu``.
Every function leaves a row alone whose parameter is neutral, so a row's numbers do not depend on its neighbours'
parameters. Nothing here asks a GPU for a value.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

MASKED = float("-inf")
LEAST_ALLOWED = -1e30  # of what a grammar allows: finite, also after the least temperature
_LIKELY = 1e-3, 1e-4, 1e-5  # probabilities; at most 1 / p tokens have p
_MOST_SORTED = 1 / 8  # of a vocabulary; rows where more tokens are likely are sooner sorted whole, all at once
NOT_FINITE = -1  # in place of the token of a row whose logits are infinite or NaN
_ALL = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class DrawLimits(NamedTuple):
    """What limits the draw of a token for each of some rows.

    Attributes:
        top_k: int64 [n]; 0 keeps all.
        top_p: fp32 [n]; 1 keeps all.
        uniform: fp64 [n] in [0, 1), a random number each.
        scales: fp32 [n], by which the rows' logits are multiplied first; None: they are not.
        largest: at least the largest top_k; the host knows it and what follows.
        is_narrow: whether no top_k is 0.
        keeps_all: whether no row has a top-k or a top-p.
    """

    top_k: Tensor
    top_p: Tensor
    uniform: Tensor
    scales: Tensor | None = None
    largest: int = 0
    is_narrow: bool = False
    keeps_all: bool = False


def argmax(logits: Tensor) -> Tensor:
    """Return each row's argmax, [B, V] -> [B]; NOT_FINITE where its numbers are infinite or NaN."""
    # Any column tells: each sums over all hidden numbers.
    return torch.where(logits[:, 0].isfinite(), logits.argmax(dim=-1), NOT_FINITE)


def ban(logits: Tensor, banned: Sequence[Iterable[int]]) -> Tensor:
    """Mask tokens before temperature, penalty and log-probabilities: logits [B, V], token ids by row -> [B, V].

    FasterTransformer never bans token 0, which stands for nothing in its lists' padding; here it can be banned like any
    other. A row in which every token is banned is left alone: there would be nothing to choose from.
    """
    pairs = [(row, token) for row, tokens in enumerate(banned) for token in tokens if 0 <= token < logits.shape[-1]]
    if not pairs:
        return logits
    rows, tokens = torch.tensor(pairs, device=logits.device).T
    masked = logits.index_put((rows, tokens), logits.new_tensor(MASKED))
    return torch.where(torch.isneginf(masked).all(dim=-1, keepdim=True), logits, masked)


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Multiply by scale_of(temperature): [B, V], [B] -> [B, V]."""
    return logits * scale_of(temperature)[:, None]


def scale_of(temperature: Tensor) -> Tensor:
    """Return 1 / (temperature + 1e-6), [B] -> [B]. The 1e-6 is FasterTransformer's; 1 is neutral."""
    return torch.where(temperature == 1.0, torch.ones_like(temperature), 1.0 / (temperature + 1e-6))


def apply_repetition_penalty(logits: Tensor, penalty: Tensor, presence: Tensor, occurred: Tensor) -> Tensor:
    """Penalise tokens that have occurred in the row's input or output, bool [B, V], once however often they have.

    A positive logit is divided by the repetition penalty, [B], and a negative one multiplied; 1 is neutral. The
    presence penalty, [B], is subtracted; 0 is neutral. (FasterTransformer skips the first step of a batch whose longest
    input is one token; here it is not skipped.)
    """
    by_row = penalty[:, None]
    return torch.where(occurred, torch.where(logits < 0, logits * by_row, logits / by_row) - presence[:, None], logits)


def add_bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    """Add to the logits of some tokens of some rows: [B, V], [n] each -> [B, V]; no token of a row comes twice."""
    return logits.index_put((rows, tokens), logits[rows, tokens] + values)


def apply_output_penalty(logits: Tensor, frequency: Tensor, presence: Tensor, counts: Tensor) -> Tensor:
    """Penalise generated tokens by how often they have been generated: [B, V], [B], [B], int32 [B, V] -> [B, V].

    The OpenAI API's formula: logit - count * frequency - (count > 0) * presence. 0 is neutral.
    """
    return logits - counts * frequency[:, None] - (counts > 0) * presence[:, None]


def hold_back(logits: Tensor, rows: Tensor, tokens: Tensor, min_length: Tensor, count: Tensor) -> Tensor:
    """Mask some tokens, [n], of some rows, [n], that have generated fewer tokens than min_length, [B]: -> [B, V]."""
    own = logits[rows, tokens].masked_fill(count[rows] < min_length[rows], MASKED)
    return logits.index_put((rows, tokens), own)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Mask tokens less probable than min_p times the most probable one: [B, V], [B] -> [B, V]; min_p = 0 keeps all."""
    least = logits.amax(dim=-1) + min_p.log()
    return logits.masked_fill(logits < least[:, None], MASKED)


def apply_min_length(logits: Tensor, min_length: Tensor, count: Tensor, end_id: Tensor) -> Tensor:
    """Mask the end_id of rows that have generated fewer tokens than min_length: [B, V], [B] each -> [B, V]."""
    is_end = torch.arange(logits.shape[-1], device=logits.device) == end_id[:, None]
    return logits.masked_fill(is_end & (count < min_length)[:, None], MASKED)


def keep_allowed(logits: Tensor, rows: Tensor | None, bits: Tensor) -> Tensor:
    """Mask tokens that some rows' grammars do not allow; what is masked already stays so, unless nothing is left.

    Args:
        logits: [B, V]; are overwritten.
        rows: int64 [n]; None: all of them.
        bits: uint8 [n, at least V / 8], a bit for each token, the lowest of each byte first; 1 is allowed.

    Returns:
        The logits.
    """
    masks = _masks_of_bytes(logits.device).index_select(0, bits.flatten().int()).view(len(bits), -1)
    own = logits if rows is None else logits[rows]
    # A minimum length and bad words give way to a grammar that allows only what they mask.
    own.clamp_(min=LEAST_ALLOWED).add_(masks[:, : logits.shape[-1]])
    return own if rows is None else logits.index_copy_(0, rows, own)


@cache
def _masks_of_bytes(device: torch.device) -> Tensor:
    """Return what is added to the logits of each byte's bits, the lowest first: fp32 [256, 8] of 0 and MASKED."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) % 2
    return torch.where(bits == 1, 0.0, MASKED)


def decay_top_p(
    top_p: Tensor, initial: Tensor, decay: Tensor, least: Tensor, reset_id: Tensor, token: Tensor
) -> Tensor:
    """Return the next step's top_p, [B] each: factual nucleus sampling (arXiv:2206.04624), ``computeToppDecay``."""
    return torch.where(token == reset_id, initial, torch.maximum(top_p * decay, least))


def keep_top_k(logits: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """Mask all but the k largest: [B, V], [B] -> [B, V] with exactly k finite entries a row; k = 0 keeps all.

    Here and below ``largest`` is that of top_k, known on the host.
    """
    if largest == 0:
        return logits
    values, ids = masked_top_k(logits, top_k, largest)
    return torch.where((top_k == 0)[:, None], logits, torch.full_like(logits, MASKED).scatter(1, ids, values))


def narrow_to_top_k(logits: Tensor, top_k: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each row, k > 0, by token: [B, V], [B] -> [B, largest] and their tokens.

    What is drawn among them is what is drawn among all after keep_top_k, without sorting a whole vocabulary.
    """
    values, ids = masked_top_k(logits, top_k, largest)
    ids, order = ids.sort(dim=-1)
    return values.gather(1, order), ids


def masked_top_k(logits: Tensor, top_k: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits of each row, descending, [B, largest], masked after its k-th, and their tokens."""
    values, ids = logits.topk(min(largest, logits.shape[-1]), dim=-1)
    beyond = torch.arange(values.shape[1], device=logits.device) >= top_k[:, None]
    return values.masked_fill(beyond, MASKED), ids


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the nucleus: the fewest largest probabilities that sum to top_p: [B, V], [B] -> [B, V].

    FasterTransformer draws u * top_p and walks down the sorted probabilities, so the last token of the nucleus only
    has what is left up to top_p, not its whole probability (Hugging Face gives it the whole). The logits returned are
    such that softmax gives exactly that distribution. top_p = 1 keeps all.
    """
    if logits.device.type == "cpu":
        return _keep_top_p_by_row(logits, top_p)
    kept = _nucleus_shares(logits.softmax(dim=-1), top_p).log()
    return torch.where((top_p >= 1.0)[:, None], logits, kept)


def _nucleus_shares(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Return what the nucleus has of each probability: [B, V], [B] -> [B, V]; of equal ones it takes the first."""
    descending, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    before = descending.cumsum(dim=-1) - descending
    share = torch.minimum(descending, top_p[:, None] - before).clamp(min=0.0)
    share[:, 0] = descending[:, 0].minimum(top_p.clamp(min=torch.finfo(share.dtype).tiny))  # never an empty nucleus
    return torch.empty_like(probabilities).scatter(1, ids, share)


def _keep_top_p_by_row(logits: Tensor, top_p: Tensor) -> Tensor:
    """Do what keep_top_p does, and sort likely tokens alone: to sort 128,000 takes a core 20 ms a row."""
    kept, probabilities, flat = logits.clone(), logits.softmax(dim=-1), list[int]()
    for row in (top_p < 1).nonzero()[:, 0].tolist():
        ids = _likely_ids(probabilities[row], top_p[row])
        if ids is None:
            flat.append(row)
        else:
            kept[row] = MASKED
            kept[row, ids] = _nucleus_shares(probabilities[None, row, ids], top_p[None, row])[0].log()
    if flat:
        kept[flat] = _nucleus_shares(probabilities[flat], top_p[flat]).log()
    return kept


def _likely_ids(probabilities: Tensor, top_p: Tensor) -> Tensor | None:
    """Return the ids, ascending, of largest probabilities that sum to top_p, [V] -> [n]; None: these are too many."""
    for least in _LIKELY:
        ids = (probabilities >= least).nonzero()[:, 0]
        if len(ids) > _MOST_SORTED * len(probabilities):
            return None
        if probabilities[ids].sum() >= top_p:
            return ids
    return None


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token a row from softmax(logits) by inverting the cumulative distribution: [B, V], [B] in [0, 1) -> [B].

    A masked token is never drawn. What is drawn from numbers that are not finite means nothing, but is a token: an
    index beyond the vocabulary would fail the whole batch.
    """
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    threshold = uniform.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)


def draw_among(logits: Sequence[float], uniform: float) -> int:
    """Do what ``draw`` does for a row of few logits, on the host: give the place of the one that is drawn."""
    most = max(logits)
    cumulative = list(accumulate(math.exp(value - most) for value in logits))
    return min(bisect_right(cumulative, uniform * cumulative[-1]), len(logits) - 1)


def draw_uniform(seed: Tensor, step: Tensor) -> Tensor:
    """Make one random number a row from its seed and step alone, so that no batch and no device changes it.

    The numbers of a seed are those of SplitMix64 (Steele, Lea and Flood 2014, ``java.util.SplittableRandom``) whose
    state is first mixed itself, so that neighbouring seeds share nothing.

    Args:
        seed: int64 [B], an unsigned seed's bits.
        step: int64 [B], tokens that the row has generated.

    Returns:
        fp64 [B] in [0, 1), multiples of 2**-53.
    """
    bits = _mix(_mix(seed) + (step + 1) * _GOLDEN)
    return _shifted(bits, 11).double() * 2.0**-53


def draw_uniform_of(seed: int, step: int) -> float:
    """Make one row's number of ``draw_uniform``, on the host."""
    bits = _mix_bits(_mix_bits(seed & _ALL) + (step + 1) * _GOLDEN & _ALL)
    return (bits >> 11) * 2.0**-53


def _mix_bits(bits: int) -> int:
    bits = (bits ^ bits >> 30) * _MIX_1 & _ALL
    bits = (bits ^ bits >> 27) * _MIX_2 & _ALL
    return bits ^ bits >> 31


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _MIX_1
    bits = (bits ^ _shifted(bits, 27)) * _MIX_2
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift to the right and fill up with zeros: int64's own shift fills up with the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
