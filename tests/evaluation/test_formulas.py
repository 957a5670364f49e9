"""The figures, by hand arithmetic."""

from __future__ import annotations

import math

import pytest

from evaluation.speed.tables import formulas


def test_accuracy_is_the_share_of_hits() -> None:
    assert formulas.accuracy([True, False, True, True]) == 0.75


def test_accuracy_standard_error_by_hand() -> None:
    # 3 of 4: mean 0.75, squared deviations 3 * 0.0625 + 0.5625 = 0.75, / 3 = 0.25, / 4 = 0.0625, root 0.25
    assert formulas.standard_error([True, False, True, True]) == pytest.approx(0.25)


def test_standard_error_by_hand() -> None:
    # 2, 4, 6: mean 4, sample variance (4 + 0 + 4) / 2 = 4, / 3
    assert formulas.standard_error([2.0, 4.0, 6.0]) == pytest.approx(math.sqrt(4 / 3))


def test_the_confidence_interval_by_hand() -> None:
    # 2, 4, 6: standard error sqrt(4 / 3), t(0.975, 2) = 4.303; 41 values of which one is 41: deviation 41 / sqrt(41)
    assert formulas.half_width([2.0, 4.0, 6.0]) == pytest.approx(4.303 * math.sqrt(4 / 3))
    assert formulas.half_width([0.0] * 40 + [41.0]) == pytest.approx(2.042 * math.sqrt(41.0) / math.sqrt(41.0))
    assert formulas.half_width([2.0]) is None


def test_perplexity_by_hand() -> None:
    # probabilities 1/2 and 1/8: geometric mean 1/4, so 4
    assert formulas.perplexity([math.log(1 / 2), math.log(1 / 8)]) == pytest.approx(4.0)


def test_perplexity_standard_error_by_hand() -> None:
    # log probabilities -1 and -3: sample deviation sqrt(2), / sqrt(2) = 1, times exp(2)
    assert formulas.perplexity_standard_error([-1.0, -3.0]) == pytest.approx(math.exp(2))


@pytest.mark.parametrize(
    ("percent", "expected"),
    # 10, 20, 30, 40: h = 3 * percent / 100
    [(0, 10.0), (50, 25.0), (90, 37.0), (95, 38.5), (99, 39.7), (100, 40.0)],
)
def test_percentile_interpolates_between_order_statistics(percent: float, expected: float) -> None:
    assert formulas.percentile([40, 10, 30, 20], percent) == pytest.approx(expected)


def test_percentile_of_one_value_is_that_value() -> None:
    assert formulas.percentile([7.0], 99) == 7.0


def test_percentile_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="101"):
        formulas.percentile([1.0], 101)


def test_what_cannot_be_computed_is_none_not_zero() -> None:
    assert formulas.mean([]) is None
    assert formulas.accuracy([]) is None
    assert formulas.standard_error([1.0]) is None
    assert formulas.perplexity([]) is None
    assert formulas.perplexity_standard_error([-1.0]) is None
    assert formulas.percentile([], 50) is None


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_leaves_no_figure(broken: float) -> None:
    values = [1.0, broken, 2.0]
    assert formulas.mean(values) is formulas.standard_error(values) is formulas.half_width(values) is None
    assert formulas.percentile(values, 50) is formulas.perplexity(values) is None


def test_a_perplexity_that_no_float_holds_is_none() -> None:
    assert formulas.perplexity([-800.0, -900.0]) is None  # exp(850)
    assert formulas.perplexity([-700.0]) == pytest.approx(math.exp(700))
