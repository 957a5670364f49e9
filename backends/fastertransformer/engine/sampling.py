"""From logits to tokens: a chain of small pure functions on [B, V], each row with its own parameters.

Order and formulas are FasterTransformer's: ``BaseSamplingLayer.cc`` (temperature, then repetition penalty),
``sampling_penalty_kernels.cu``, ``sampling_topk_kernels.cu`` and ``sampling_topp_kernels.cu``. Every function leaves a
row alone whose parameter is neutral, so a row's numbers do not depend on its neighbours' parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASKED = float("-inf")


@dataclass(frozen=True)
class SamplingParameters:
    """One value a row, each [B].

    Attributes:
        top_k: candidates; 0 means no limit.
        top_p: candidate probability; 1 means no limit.
        temperature: divisor of the logits.
        repetition_penalty: for tokens that have occurred.
    """

    top_k: Tensor
    top_p: Tensor
    temperature: Tensor
    repetition_penalty: Tensor

    def rows(self, index: Tensor) -> SamplingParameters:
        """Keep some rows: index [N] -> parameters of N rows."""
        return SamplingParameters(
            self.top_k[index], self.top_p[index], self.temperature[index], self.repetition_penalty[index]
        )


def resolve_top_k_top_p(top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Translate what clients send into what is meant ([B] each), as FasterTransformer does.

    top_k 0 and top_p 0: greedy (top_k 1). top_p 0 with top_k: no nucleus (top_p 1). top_k 0 with top_p: nucleus only.
    """
    top_k = torch.where((top_k == 0) & (top_p == 0), torch.ones_like(top_k), top_k)
    top_p = torch.where((top_k > 0) & (top_p == 0), torch.ones_like(top_p), top_p)
    return top_k, top_p


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Multiply by 1 / (temperature + 1e-6): [B, V], [B] -> [B, V]. The 1e-6 is FasterTransformer's; 1 is neutral."""
    scale = torch.where(temperature == 1.0, torch.ones_like(temperature), 1.0 / (temperature + 1e-6))
    return logits * scale[:, None]


def apply_repetition_penalty(logits: Tensor, penalty: Tensor, occurred: Tensor) -> Tensor:
    """Penalise tokens that have occurred in the row's input or output.

    A positive logit is divided by the penalty and a negative one multiplied, once however often the token occurred.
    (FasterTransformer skips the first step of a batch whose longest input is one token; here it is not skipped.)

    Args:
        logits: [B, V].
        penalty: [B]; 1 is neutral.
        occurred: bool [B, V].
    """
    by_row = penalty[:, None]
    return torch.where(occurred, torch.where(logits < 0, logits * by_row, logits / by_row), logits)


def keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Mask all but the k largest: [B, V], [B] -> [B, V] with exactly k finite entries a row; k = 0 keeps all."""
    largest = min(int(top_k.max()), logits.shape[-1])
    if largest == 0:
        return logits
    values, ids = logits.topk(largest, dim=-1)  # [B, largest], descending
    beyond = torch.arange(largest, device=logits.device) >= top_k[:, None]
    kept = torch.full_like(logits, MASKED).scatter(1, ids, values.masked_fill(beyond, MASKED))
    return torch.where((top_k == 0)[:, None], logits, kept)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the nucleus: the fewest largest probabilities that sum to top_p: [B, V], [B] -> [B, V].

    FasterTransformer draws u * top_p and walks down the sorted probabilities, so the last token of the nucleus only
    has what is left up to top_p, not its whole probability (Hugging Face gives it the whole). The logits returned are
    such that softmax gives exactly that distribution. top_p = 1 keeps all.
    """
    probabilities, ids = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    share = torch.minimum(probabilities, top_p[:, None] - before).clamp(min=0.0)
    share[:, 0] = probabilities[:, 0].minimum(top_p.clamp(min=torch.finfo(share.dtype).tiny))  # never an empty nucleus
    kept = torch.empty_like(logits).scatter(1, ids, share.log())
    return torch.where((top_p >= 1.0)[:, None], logits, kept)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token a row from softmax(logits) by inverting the cumulative distribution.

    Args:
        logits: [B, V].
        uniform: [B] in [0, 1), from each row's own generator.

    Returns:
        [B] token ids; a masked token is never drawn.
    """
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    threshold = uniform.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


def draw_uniform(seeds: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Make every row's random numbers in advance, from its own generator: [B, max(counts)] in [0, 1).

    They depend on the row's seed and the step alone, not on the batch, and are made on the CPU so that a GPU gives the
    same ones.
    """
    uniform = torch.zeros(len(seeds), max(counts, default=0))
    for row, (seed, count) in enumerate(zip(seeds, counts, strict=True)):
        uniform[row, :count] = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return uniform


def choose_tokens(logits: Tensor, parameters: SamplingParameters, uniform: Tensor) -> Tensor:
    """Filter and draw: penalised logits [B, V] -> token ids [B].

    A row takes its largest logit if top_k is 1 or if that token alone fills the nucleus; nothing is sorted if all do.
    """
    greedy = logits.argmax(dim=-1)
    is_greedy = parameters.top_k == 1
    if not bool(is_greedy.all()):
        is_greedy |= (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp() >= parameters.top_p
    if bool(is_greedy.all()):
        return greedy
    candidates = keep_top_p(keep_top_k(logits, parameters.top_k), parameters.top_p)
    return torch.where(is_greedy, greedy, draw(candidates, uniform))


def token_log_probs(logits: Tensor, top_k: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the chosen tokens, in FasterTransformer's two meanings.

    Both use the logits after temperature and repetition penalty. The first, which ``cum_log_probs`` sums, is
    log softmax over the whole vocabulary. The second, ``output_log_probs``, is for top-k sampling conditional on the
    token being among the k (log softmax over the k largest, before top-p), and equal to the first without top-k. So a
    greedy token (top_k 1) has output_log_probs 0: FasterTransformer says the same
    (``topk_stage2_sampling``: "the log_prob is the probability of the selected token, conditioned on the event that it
    is selected"). Use cum_log_probs, or greedy by top_k 0 with a tiny top_p, for the probability under the model.

    Args:
        logits: [B, V].
        top_k: [B].
        tokens: [B].

    Returns:
        Two fp32 [B].
    """
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    full = chosen - logits.logsumexp(dim=-1)
    reported = torch.where(top_k == 1, torch.zeros_like(full), full)
    largest = min(int(top_k.max()), logits.shape[-1])
    if largest <= 1:
        return full, reported
    values = logits.topk(largest, dim=-1).values  # [B, largest]
    beyond = torch.arange(largest, device=logits.device) >= top_k[:, None]
    within = chosen - values.masked_fill(beyond, MASKED).logsumexp(dim=-1)
    return full, torch.where(top_k > 1, within, reported)
