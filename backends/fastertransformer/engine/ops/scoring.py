"""Log-probabilities under the model itself: of given tokens, and of the most probable ones.

They are of the logits as the network gives them, without bias, penalties and temperature. A row's scores are fp32
[1 + 2 K]: the log-probability of its token, the K largest in descending order, and their tokens (fp32 holds a token's
number exactly, for a vocabulary has fewer than 2**24).

Where processes share the vocabulary each makes a summary of its part, fp32 [N, 2 + 2 K]: log-sum-exp, the token's
logit, the K largest logits, and their tokens. That is all that rank 0 needs, so no logits are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from .logits import MASKED, masked_top_k


def score_rows(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Score a token of each row, and the ``most`` largest: logits fp32 [N, V], tokens int64 [N] -> [N, 1 + 2 most]."""
    return merge_parts([summarize_part(logits, tokens, 0, most)], most)


def summarize_part(logits: Tensor, tokens: Tensor, first: int, most: int) -> Tensor:
    """Summarize a part of the vocabulary, see the module.

    Args:
        logits: fp32 [N, part].
        tokens: int64 [N], of the whole vocabulary.
        first: the part's first token.
        most: K.
    """
    columns, width = tokens - first, logits.shape[1]
    is_here = (columns >= 0) & (columns < width)
    own = logits.gather(1, columns.clamp(0, width - 1)[:, None])[:, 0].masked_fill(~is_here, MASKED)
    scores = [logits.logsumexp(dim=-1)[:, None], own[:, None]]
    if most:
        count = min(most, width)
        # Of equal logits the maximum is the first one.
        largest, places = logits.max(-1, keepdim=True) if most == 1 else logits.topk(count, dim=-1)
        scores += [F.pad(largest, (0, most - count), value=MASKED), F.pad((places + first).float(), (0, most - count))]
    return torch.cat(scores, 1)


def merge_parts(parts: Sequence[Tensor], most: int) -> Tensor:
    """Return rows' scores, [N, 1 + 2 most], by the summaries of all parts of the vocabulary, in order."""
    sums, own, largest, tokens = torch.split(torch.stack(list(parts), 1), [1, 1, most, most], dim=-1)  # [N, parts, ...]
    total = sums.logsumexp(dim=1)  # [N, 1]
    if len(parts) > 1 and most:
        largest, places = largest.flatten(1).topk(most) if most > 1 else largest.flatten(1).max(-1, keepdim=True)
        tokens = tokens.flatten(1).gather(1, places)
    rows = len(total)
    return torch.cat((own.amax(dim=1) - total, largest.reshape(rows, -1) - total, tokens.reshape(rows, -1)), 1)


def token_log_probs(logits: Tensor, top_k: Tensor, tokens: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return the tokens' log-probabilities in FasterTransformer's two meanings: [B, V], [B], [B] -> fp32 [B] each.

    Both use the logits after temperature and penalties. The first, which ``cum_log_probs`` sums, is log softmax over
    the whole vocabulary. The second, ``output_log_probs``, is for top-k sampling conditional on the token being among
    the k (log softmax over the k largest, before top-p), and equal to the first without top-k. So a greedy token
    (top_k 1) has output_log_probs 0: FasterTransformer says the same (``topk_stage2_sampling``: "the log_prob is the
    probability of the selected token, conditioned on the event that it is selected"). Use cum_log_probs, or greedy by
    top_k 0 with a tiny top_p, for the probability under the model.
    """
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    full = chosen - logits.logsumexp(dim=-1)
    reported = torch.where(top_k == 1, torch.zeros_like(full), full)
    largest = min(largest, logits.shape[-1])
    if largest <= 1:
        return full, reported
    within = chosen - masked_top_k(logits, top_k, largest)[0].logsumexp(dim=-1)
    return full, torch.where(top_k > 1, within, reported)
