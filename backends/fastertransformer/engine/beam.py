"""Beam search, a step of one sequence's beams at a time.

FasterTransformer's GPT family (``OnlineBeamSearchLayer.cu``, ``online_softmax_beamsearch_kernels.cu``, without its
``beam_hyps``): of the K best continuations of each of the K beams the K best go on. A beam that has ended stays among
them with its score until better ones push it out; the search ends when all K have ended. Where no beam ends early that
is Hugging Face's search. It differs where one does: Hugging Face takes ended beams out, keeps the best K of them in a
list, scored by log-probability / length**len_penalty, and goes on with K others.

Here as there a candidate's rank is log-probability / length**len_penalty + diversity_rate * (its place among its beam's
own candidates). The length is the first beam's and thus the same for all K, so len_penalty weighs the score against
the diversity rate and changes nothing without one; the place counts up, so a positive rate favours the less likely
children. FasterTransformer's backend takes widths 1, 2, 3, 4, 8, 16 and 32 and samples instead with any other; here
every width up to 64 is searched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sampling import MASKED

DEAD = -1e20  # score of the beams that do not exist at the first step: all K start from one sequence


@dataclass(frozen=True)
class Step:
    """The beams that go on.

    Attributes:
        parents: int64 [K], which beam each continues.
        tokens: int64 [K]; of no meaning behind a beam that had ended.
        scores: fp32 [K], sums of log-probabilities.
        gains: fp32 [K], of the token alone.
    """

    parents: Tensor
    tokens: Tensor
    scores: Tensor
    gains: Tensor


def step(
    log_probs: Tensor,
    scores: Tensor,
    has_ended: Tensor,
    end_id: int,
    length: int,
    len_penalty: float,
    diversity_rate: float,
) -> Step:
    """Choose the next beams.

    Args:
        log_probs: [K, V], log softmax of the penalised logits.
        scores: [K], of the beams.
        has_ended: bool [K].
        end_id: of the sequence; outside the vocabulary no beam ends.
        length: tokens of the first beam before this step, its input included.
        len_penalty: of the request.
        diversity_rate: of the request.
    """
    width, vocab = log_probs.shape
    # An ended beam has one continuation, for nothing. One that a stop word ended has it even without an end_id.
    is_end = torch.arange(vocab, device=log_probs.device) == (end_id if end_id < vocab else 0)
    only_end = torch.where(is_end, 0.0, MASKED)
    log_probs = torch.where(has_ended[:, None], only_end, log_probs)
    best, tokens = log_probs.topk(min(2 * width, vocab), dim=-1)  # [K, 2K], descending
    totals = best + scores[:, None]
    place = torch.arange(best.shape[1], device=best.device) % width
    ranks = totals / (length**len_penalty if length > 1 else 1.0) + diversity_rate * place
    chosen = ranks.flatten().topk(width).indices  # [K]
    parents = chosen // best.shape[1]
    return Step(parents, tokens.flatten()[chosen], totals.flatten()[chosen], best.flatten()[chosen])
