"""The measurement of grammars: both sides generate as many tokens, and a line has their ratio."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import gpu_sizes, structured


def test_each_line_has_the_ratio_of_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_sizes.SIZES, "tiny", gpu_sizes.Size(1, 64, 4, 500))
    shape = ["--size=tiny", "--rows=[2]", "--tokens=8", "--repeats=1", "--threads=1"]
    structured.main([*shape, f"--csv={tmp_path / 'table.csv'}"])
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["choice"] for row in rows] == ["greedy", "drawn"]
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(float(row["guided"]) / float(row["plain"]), rel=0.01)
