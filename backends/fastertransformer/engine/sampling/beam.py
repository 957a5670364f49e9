"""Beam search, a step of one sequence's beams at a time.

FasterTransformer has two (``OnlineBeamSearchLayer.cu``, ``online_softmax_beamsearch_kernels.cu``).

Its GPT family (no ``beam_hyps``): of the K best continuations of each of the K beams the K best go on. A beam that has
ended stays among them with its score until better ones push it out; the search ends when all K have ended. Where no
beam ends early that is Hugging Face's search. It differs where one does, for Hugging Face takes ended beams out.

Its T5 (``beam_hyps``): an ended beam is taken out and kept with its rank, and the search ends when K are kept: Hugging
Face's search with early_stopping=True. (At the length limit Hugging Face still lets the last step's candidates compete
where that step's endings have just made K; FasterTransformer does not.)

In both a candidate's rank is log-probability / length**len_penalty + diversity_rate * (its place among its beam's own
candidates), so a positive rate favours the less likely children. In T5 the length is that of the output. In the GPT
family it is the first beam's, input included, and thus the same for all K: there len_penalty weighs the score against
the diversity rate and changes nothing without one. FasterTransformer's GPT backend takes widths 1, 2, 3, 4, 8, 16 and
32 and samples instead with any other; here every width up to 64 is searched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.logits import MASKED
from ..request.sampling_params import SamplingParams
from ..rows.beam import Beam, Candidate


def candidates(log_probs: Tensor, beams: Sequence[Beam], params: SamplingParams, length: int) -> list[Candidate]:
    """Return the 2 K best continuations of K beams, best first.

    Args:
        log_probs: [K, V], log softmax of the penalised logits.
        beams: a beam that has ended has a single continuation, which does not change its score.
        params: of the sequence; with an end_id outside the vocabulary no beam ends by it.
        length: by which scores are divided, see the module's docstring.
    """
    (width, vocab), device = log_probs.shape, log_probs.device
    # A beam that a stop word has ended has its continuation even without an end_id.
    is_end = torch.arange(vocab, device=device) == (params.end_id if params.end_id < vocab else 0)
    only_end = torch.where(is_end, 0.0, MASKED)
    has_ended = torch.tensor([each.has_ended for each in beams], device=device)
    log_probs = torch.where(has_ended[:, None], only_end, log_probs)
    best, tokens = log_probs.topk(min(2 * width, vocab), dim=-1)  # [K, 2K], descending
    totals = best + torch.tensor([each.score for each in beams], device=device)[:, None]
    place = torch.arange(best.shape[1], device=device) % width
    penalty = length**params.len_penalty if length > 1 else 1.0
    ranks = totals / penalty + params.beam_search_diversity_rate * place
    order = ranks.flatten().topk(min(2 * width, ranks.numel())).indices  # [2K]
    numbers = torch.stack([each.flatten()[order] for each in (ranks, totals, best)]).tolist()
    places = torch.stack((order // best.shape[1], tokens.flatten()[order])).tolist()
    return [Candidate(*each) for each in zip(*places, *numbers, strict=True)]
