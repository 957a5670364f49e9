"""Sampling against Hugging Face's processors and against FasterTransformer's walk, written out in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.shards.split_mix import split_mix
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from backends.fastertransformer.engine.ops.logits import (
    apply_min_length,
    apply_repetition_penalty,
    apply_temperature,
    decay_top_p,
    draw,
    draw_among,
    draw_uniform,
    draw_uniform_of,
    keep_top_k,
    keep_top_p,
    narrow_to_top_k,
)
from backends.fastertransformer.engine.ops.scoring import token_log_probs
from backends.fastertransformer.engine.request.sampling_params import resolve_top_k_top_p

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
    torch.testing.assert_close(
        apply_repetition_penalty(logits, torch.full((6,), penalty), torch.zeros(6), occurred), expected
    )


@pytest.mark.parametrize("top_k", [1, 5, 50, 400])
def test_top_k_keeps_what_hugging_face_keeps(logits: torch.Tensor, top_k: int) -> None:
    expected = TopKLogitsWarper(top_k)(NO_IDS, logits)
    assert torch.equal(keep_top_k(logits, torch.full((6,), top_k), top_k), expected)


def test_top_k_differs_by_row_and_zero_keeps_all(logits: torch.Tensor) -> None:
    kept = keep_top_k(logits, torch.tensor([0, 1, 2, 3, 0, 50]), 50).isfinite().sum(-1)
    assert kept.tolist() == [50, 1, 2, 3, 50, 50]


def test_top_k_keeps_exactly_k_of_equals() -> None:
    assert keep_top_k(torch.zeros(1, 8), torch.tensor([3]), 3).isfinite().sum() == 3


@pytest.mark.parametrize("top_p", [0.05, 0.4, 0.9])
def test_top_p_keeps_hugging_faces_nucleus(logits: torch.Tensor, top_p: float) -> None:
    expected = TopPLogitsWarper(top_p)(NO_IDS, logits).isfinite()
    assert torch.equal(keep_top_p(logits, torch.full((6,), top_p)).isfinite(), expected)


@pytest.mark.parametrize("top_p", [1e-30, 0.3, 0.9, 0.9999])
def test_the_nucleus_of_a_large_vocabulary_is_hugging_faces_whatever_the_distribution(top_p: float) -> None:
    drawn = torch.randn(5, 20_000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    wide = drawn * torch.tensor([0.1, 1.0, 2.0, 4.0, 30.0])[:, None]
    kept = keep_top_p(torch.cat((wide, wide[3:])), torch.tensor([top_p] * 5 + [1.0, 0.5], dtype=torch.float64))
    assert torch.equal(kept[:5].isfinite(), TopPLogitsWarper(top_p)(NO_IDS, wide).isfinite())
    assert torch.equal(kept[5], wide[3])  # a row's own top_p
    probabilities = wide.softmax(dim=-1)
    for row in range(5):  # each has its probability but the last one, which has what is left
        shares = kept[row].softmax(dim=-1) * top_p
        order = probabilities[row].argsort(descending=True)[: int(kept[row].isfinite().sum())]
        torch.testing.assert_close(shares[order[:-1]], probabilities[row, order[:-1]], rtol=1e-3, atol=1e-9)
        assert shares.sum().item() == pytest.approx(top_p)


def test_of_equal_probabilities_the_nucleus_has_the_first() -> None:
    logits = torch.zeros(2, 4000)
    logits[1, ::2] = -20.0
    kept = keep_top_p(logits, torch.tensor([0.25, 0.1])).isfinite()
    assert kept[0].nonzero()[:, 0].tolist() == list(range(1000))
    assert kept[1].nonzero()[:, 0].tolist() == list(range(1, 400, 2))


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
    chained = keep_top_p(keep_top_k(logits, torch.tensor([top_k]), top_k), torch.tensor([top_p]))
    np.testing.assert_allclose(chained.softmax(-1)[0].numpy(), expected, atol=2e-4)
    drawn = draw(chained.expand(len(grid), -1), torch.from_numpy(grid))
    np.testing.assert_allclose(np.bincount(drawn.numpy(), minlength=20) / len(grid), expected, atol=2e-4)


def test_draw_never_takes_a_masked_token() -> None:
    logits = torch.full((2, 9), float("-inf"))
    logits[:, 4] = 0.0
    logits[:, 6] = -30.0
    edges = torch.tensor([0.0, 1.0 - 2**-24])
    assert set(draw(logits, edges).tolist()) <= {4, 6}


@pytest.mark.parametrize("count", [1, 2, 7, 32])
def test_few_logits_are_drawn_from_on_the_host_as_by_torch(count: int) -> None:
    logits = torch.randn(500, count, generator=torch.Generator().manual_seed(count)) * 3
    uniform = torch.rand(500, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    uniform[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5])
    expected = draw(logits, uniform).tolist()
    assert [draw_among(*each) for each in zip(logits.tolist(), uniform.tolist(), strict=True)] == expected
    assert draw_among([float("nan")] * count, 0.5) < count  # means nothing, but is one of them


def test_what_clients_leave_at_zero_means_what_fastertransformer_says() -> None:
    meant = {(0, 0.0): (1, 1.0), (4, 0.0): (4, 1.0), (0, 0.5): (0, 0.5), (4, 0.5): (4, 0.5)}
    assert {sent: resolve_top_k_top_p(*sent) for sent in meant} == meant


@pytest.mark.parametrize("seed", [0, 1, 7, 2**63, 2**64 - 1])
def test_random_numbers_are_split_mixs_and_depend_on_seed_and_step_only(seed: int) -> None:
    bits = torch.from_numpy(np.array([seed], np.uint64).astype(np.int64))
    assert draw_uniform(bits.expand(50), torch.arange(50)).tolist() == split_mix(seed, 50)
    assert [draw_uniform_of(int(bits), step) for step in range(50)] == split_mix(seed, 50)


def test_random_numbers_are_uniform_and_independent_across_seeds_and_steps() -> None:
    by_seed = draw_uniform(torch.arange(20000), torch.zeros(20000, dtype=torch.long))
    by_step = draw_uniform(torch.zeros(20000, dtype=torch.long), torch.arange(20000))
    for numbers in (by_seed, by_step):
        counts = torch.histc(numbers, 100, 0, 1)
        assert ((counts - 200) ** 2 / 200).sum() < 150  # chi square with 99 degrees of freedom: 1 in 1500
        assert abs(torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1]) < 0.03


def test_presence_penalty_is_subtracted_once(logits: torch.Tensor) -> None:
    occurred = torch.zeros(6, 50, dtype=torch.bool)
    occurred[0, [3, 4]] = True
    result = apply_repetition_penalty(logits, torch.ones(6), torch.full((6,), 0.7), occurred)
    assert torch.equal(result[1:], logits[1:])
    torch.testing.assert_close(result[0] - logits[0], torch.where(occurred[0], -0.7, 0.0))


def test_min_length_forbids_the_end_until_enough_has_come(logits: torch.Tensor) -> None:
    least, count, end = torch.tensor([0, 3, 3, 3, 1, 2]), torch.tensor([0, 2, 3, 0, 0, 1]), torch.arange(6)
    masked = apply_min_length(logits, least, count, end).isneginf()
    assert masked.nonzero().tolist() == [[1, 1], [3, 3], [4, 4], [5, 5]]
    assert torch.equal(apply_min_length(logits, least, count, torch.full((6,), 4000)), logits)


def test_top_p_decays_to_its_least_and_is_reset() -> None:
    top_p = torch.tensor([0.9, 0.9])
    seen = []
    for token in (5, 5, 5, 13, 5):
        seen.append(top_p.tolist())
        top_p = decay_top_p(
            top_p,
            torch.tensor([0.9, 0.9]),
            torch.tensor([0.5, 1.0]),
            torch.tensor([0.3, 1e-6]),
            torch.tensor([13, -1]),
            torch.full((2,), token),
        )
    np.testing.assert_allclose(seen, np.array([[0.9, 0.45, 0.3, 0.3, 0.9], [0.9] * 5]).T, rtol=1e-6)


def test_log_probs_are_fastertransformers_two_kinds(logits: torch.Tensor) -> None:
    tokens = logits.topk(3, dim=-1).indices[:, 1]  # the second largest of each row
    full, reported = token_log_probs(logits, torch.tensor([0, 1, 2, 5, 50, 0]), tokens, 50)
    probabilities = np.exp(logits.double().numpy())
    for row, top_k in enumerate([50, None, 2, 5, 50, 50]):
        chosen = probabilities[row, tokens[row]]
        assert full[row] == pytest.approx(np.log(chosen / probabilities[row].sum()), abs=1e-5)
        if top_k:
            within = np.sort(probabilities[row])[-top_k:].sum()
            assert reported[row] == pytest.approx(np.log(chosen / within), abs=1e-5)
    assert reported[1] == 0.0


def test_a_draw_among_the_k_largest_is_the_draw_among_all() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(400, 300, generator=generator).mul(2).round()  # with ties
    top_k, top_p = torch.randint(1, 40, (400,), generator=generator), torch.rand(400, generator=generator) * 1.2
    uniform = torch.rand(400, generator=generator, dtype=torch.float64)
    expected = draw(keep_top_p(keep_top_k(logits, top_k, 39), top_p), uniform)
    values, ids = narrow_to_top_k(logits, top_k, 39)
    found = ids.gather(1, draw(keep_top_p(values, top_p), uniform)[:, None])[:, 0]
    assert torch.equal(found, expected) and len(set(found.tolist())) > 100
