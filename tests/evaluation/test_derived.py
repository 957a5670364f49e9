"""What tokens cost and the energy that they take: by hand, and recomputed from the table alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest
from support.servers.fake_triton import FakeTriton, count_up

from evaluation import benchmark, load
from evaluation.arguments import BenchmarkArguments
from evaluation.report.directions import direction
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.tables.derived import cost_per_million, derive, energy_per_token_j
from evaluation.speed.tables.table import DERIVED_FIGURES, Row
from evaluation.tasks.metric import HIGHER, LOWER

FIGURES = {"output_tokens_per_s": 500.0, "total_tokens_per_s": 2000.0, "gpu_power_mean_watts": 700.0}


def test_costs_by_hand() -> None:
    # 3.60 an hour is 0.001 a second; 1,000 tokens/s make a million in 1,000 s, which cost 1.00 on one GPU.
    assert cost_per_million(3.6, 1, 1000) == pytest.approx(1.0)
    assert cost_per_million(3.6, 8, 1000) == pytest.approx(8.0)
    assert cost_per_million(None, 1, 1000) is None
    assert cost_per_million(3.6, 1, None) is None
    assert energy_per_token_j(700, 500) == pytest.approx(1.4)
    assert energy_per_token_j(None, 500) is None


@pytest.mark.parametrize(("gpu", "gpus"), [("4 x NVIDIA H200", 4), ("", 1)])
def test_a_row_costs_as_much_as_its_gpus(gpu: str, gpus: int) -> None:
    row = Row(tensor_para_size="2", pipeline_para_size="2", gpu=gpu, gpu_hour_price=1.8, figures=FIGURES)
    figures = derive(row).figures
    assert figures["cost_per_million_tokens"] == pytest.approx(0.25 * gpus)  # 1.8 / 3600 / 2000 * 1e6
    assert figures["cost_per_million_output_tokens"] == pytest.approx(gpus)
    assert figures["gpu_energy_per_output_token_j"] == pytest.approx(1.4)


def test_what_is_missing_stays_missing() -> None:
    figures = derive(Row(figures={"output_tokens_per_s": 500.0})).figures
    assert {figures[name] for name in DERIVED_FIGURES} == {None}


@pytest.mark.parametrize("price", [4.5, None])
def test_the_tables_have_the_cost_of_each_point(price: float | None, tmp_path: Path) -> None:
    common: dict[str, Any] = {"vocab_size": 100, "warmup": 1, "repeats": 2, "gpu_hour_price": price}
    with FakeTriton(count_up) as fake:
        static: dict[str, Any] = {"batch_sizes": (1, 4), "lengths": ((3, 2),), "output": tmp_path / "static"}
        benchmark.main(BenchmarkArguments(endpoint=fake.url, **static, **common).to_argv())
        under_load: dict[str, Any] = {
            "concurrencies": (1, 2),
            "lengths": ("3/2",),
            "requests": 2,
            "output": tmp_path / "load",
        }
        load.main(LoadArguments(endpoint=fake.url, **under_load, **common).to_argv())
    for table, output in (
        ("static/benchmark.csv", "throughput_tokens_per_s"),
        ("load/load.csv", "output_tokens_per_s"),
    ):
        points = pandas.read_csv(tmp_path / table)
        costs = points.cost_per_million_output_tokens
        if price is None:
            assert len(points) == 2 and costs.isna().all() and points.cost_per_million_tokens.isna().all()
            continue
        hours = 1e6 / points[output] / 3600  # in which a million tokens are generated, on one GPU or CPU
        assert costs.to_numpy() == pytest.approx((points.gpu_hour_price * hours).to_numpy(), rel=1e-4)
        if "total_tokens_per_s" in points:  # 3 tokens given, 2 generated
            assert points.cost_per_million_tokens.to_numpy() == pytest.approx((costs * 0.4).to_numpy(), rel=1e-4)


def test_less_cost_and_energy_are_better() -> None:
    assert {direction(name) for name in DERIVED_FIGURES} == {LOWER}
    assert direction("gpu_power_mean_watts") == ""
    assert direction("output_tokens_per_s") == HIGHER
