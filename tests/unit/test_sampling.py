"""Sampling against Hugging Face's processors and against FasterTransformer's walk, written out in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from backends.fastertransformer.engine.sampling import (
    SamplingParameters,
    apply_repetition_penalty,
    apply_temperature,
    choose_tokens,
    draw,
    draw_uniform,
    keep_top_k,
    keep_top_p,
    resolve_top_k_top_p,
    token_log_probs,
)

NO_IDS = torch.zeros(1, 0, dtype=torch.long)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(6, 50, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize("temperature", [0.3, 0.9, 2.5])
def test_temperature_divides_as_hugging_face_does(logits: torch.Tensor, temperature: float) -> None:
    expected = TemperatureLogitsWarper(temperature)(NO_IDS, logits)
    torch.testing.assert_close(apply_temperature(logits, torch.full((6,), temperature)), expected, rtol=1e-5, atol=1e-5)


def test_temperature_is_a_row_matter_and_zero_is_greedy(logits: torch.Tensor) -> None:
    result = apply_temperature(logits, torch.tensor([1.0, 0.5, 1.0, 0.0, 1.0, 1.0]))
    assert torch.equal(result[0], logits[0])  # not even the 1e-6
    assert result[3].softmax(-1).max() == 1.0


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3])
def test_repetition_penalty_equals_hugging_faces(logits: torch.Tensor, penalty: float) -> None:
    ids = torch.randint(0, 50, (6, 9), generator=torch.Generator().manual_seed(1))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    occurred = torch.zeros(6, 50, dtype=torch.bool).scatter_(1, ids, True)
    torch.testing.assert_close(apply_repetition_penalty(logits, torch.full((6,), penalty), occurred), expected)


@pytest.mark.parametrize("top_k", [1, 5, 50, 400])
def test_top_k_keeps_what_hugging_face_keeps(logits: torch.Tensor, top_k: int) -> None:
    expected = TopKLogitsWarper(top_k)(NO_IDS, logits)
    assert torch.equal(keep_top_k(logits, torch.full((6,), top_k)), expected)


def test_top_k_differs_by_row_and_zero_keeps_all(logits: torch.Tensor) -> None:
    kept = keep_top_k(logits, torch.tensor([0, 1, 2, 3, 0, 50])).isfinite().sum(-1)
    assert kept.tolist() == [50, 1, 2, 3, 50, 50]


def test_top_k_keeps_exactly_k_of_equals() -> None:
    assert keep_top_k(torch.zeros(1, 8), torch.tensor([3])).isfinite().sum() == 3


@pytest.mark.parametrize("top_p", [0.05, 0.4, 0.9])
def test_top_p_keeps_hugging_faces_nucleus(logits: torch.Tensor, top_p: float) -> None:
    expected = TopPLogitsWarper(top_p)(NO_IDS, logits).isfinite()
    assert torch.equal(keep_top_p(logits, torch.full((6,), top_p)).isfinite(), expected)


def test_top_p_one_keeps_the_logits_and_a_tiny_one_keeps_the_largest(logits: torch.Tensor) -> None:
    assert torch.equal(keep_top_p(logits, torch.ones(6)), logits)
    kept = keep_top_p(logits, torch.full((6,), 1e-30)).isfinite()
    assert torch.equal(kept.nonzero()[:, 1], logits.argmax(-1))


def fastertransformer_walk(logits: np.ndarray[Any, Any], top_k: int, top_p: float, uniform: float) -> int:
    """topk_stage2_sampling and topp_sampling: walk down the sorted probabilities until u * top_p * sum is used up."""
    probabilities = np.exp(logits - logits.max())
    order = np.argsort(-probabilities, kind="stable")[: top_k or None]
    left = uniform * top_p * probabilities[order].sum()
    for token in order:
        left -= probabilities[token]
        if left <= 0:
            return int(token)
    return int(order[-1])


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.6), (12, 0.7), (0, 1.0)])
def test_the_chain_has_the_distribution_of_fastertransformers_walk(top_k: int, top_p: float) -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(8)) * 1.5
    grid = (np.arange(20000) + 0.5) / 20000
    walked = [fastertransformer_walk(logits[0].double().numpy(), top_k, top_p, u) for u in grid]
    expected = np.bincount(walked, minlength=20) / len(grid)
    chained = keep_top_p(keep_top_k(logits, torch.tensor([top_k])), torch.tensor([top_p]))
    np.testing.assert_allclose(chained.softmax(-1)[0].numpy(), expected, atol=2e-4)
    drawn = draw(chained.expand(len(grid), -1), torch.from_numpy(grid))
    np.testing.assert_allclose(np.bincount(drawn.numpy(), minlength=20) / len(grid), expected, atol=2e-4)


def test_draw_never_takes_a_masked_token() -> None:
    logits = torch.full((2, 9), float("-inf"))
    logits[:, 4] = 0.0
    logits[:, 6] = -30.0
    edges = torch.tensor([0.0, 1.0 - 2**-24])
    assert set(draw(logits, edges).tolist()) <= {4, 6}


def test_what_clients_leave_at_zero_means_what_fastertransformer_says() -> None:
    top_k, top_p = resolve_top_k_top_p(torch.tensor([0, 4, 0, 4]), torch.tensor([0.0, 0.0, 0.5, 0.5]))
    assert top_k.tolist() == [1, 4, 0, 4]
    assert top_p.tolist() == [1.0, 1.0, 0.5, 0.5]


def test_random_numbers_depend_on_the_seed_and_the_step_only() -> None:
    alone = draw_uniform([7], [5])
    among = draw_uniform([1, 7, 2**64 - 1], [40, 30, 2])
    assert torch.equal(among[1, :5], alone[0])
    assert not torch.equal(among[0, :5], alone[0])
    assert ((among >= 0) & (among < 1)).all()


def test_rows_choose_alone_what_they_choose_together(logits: torch.Tensor) -> None:
    parameters = SamplingParameters(
        top_k=torch.tensor([1, 4, 0, 10, 0, 3]),
        top_p=torch.tensor([1.0, 1.0, 0.8, 0.5, 1.0, 1e-9]),
        temperature=torch.ones(6),
        repetition_penalty=torch.ones(6),
    )
    uniform = torch.rand(6, generator=torch.Generator().manual_seed(4))
    together = choose_tokens(logits, parameters, uniform)
    for row in range(6):
        index = torch.tensor([row])
        assert choose_tokens(logits[index], parameters.rows(index), uniform[index]) == together[row]
    greedy = logits.argmax(-1)
    assert together[0] == greedy[0] and together[5] == greedy[5]


def test_log_probs_are_fastertransformers_two_kinds(logits: torch.Tensor) -> None:
    tokens = logits.topk(3, dim=-1).indices[:, 1]  # the second largest of each row
    full, reported = token_log_probs(logits, torch.tensor([0, 1, 2, 5, 50, 0]), tokens)
    probabilities = np.exp(logits.double().numpy())
    for row, top_k in enumerate([50, None, 2, 5, 50, 50]):
        chosen = probabilities[row, tokens[row]]
        assert full[row] == pytest.approx(np.log(chosen / probabilities[row].sum()), abs=1e-5)
        if top_k:
            within = np.sort(probabilities[row])[-top_k:].sum()
            assert reported[row] == pytest.approx(np.log(chosen / within), abs=1e-5)
    assert reported[1] == 0.0
