"""The measurement of grammars: both sides generate as many tokens, and a line has their ratio."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.engine import structured
from benchmarks.gpu import sizes as gpu_sizes


def test_each_line_has_the_ratio_of_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu_sizes.SIZES, "tiny", gpu_sizes.Size(1, 64, 4, 500))
    shape = ["--size=tiny", "--rows=[2]", "--tokens=8", "--repeats=1", "--threads=1"]
    structured.main([*shape, f"--csv={tmp_path / 'table.csv'}"])
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["choice"] for row in rows] == ["greedy", "drawn"]
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(float(row["guided"]) / float(row["plain"]), rel=0.01)
    assert capsys.readouterr().out.count("beyond a plain step; the host waits 0.00 ms for tokens") == 2


def test_what_is_beyond_a_plain_step_and_what_the_host_waits_are_of_a_step() -> None:
    times = structured.HostTimes()
    times.masks_s, times.waits_s = [0.001, 0.002, 0.009], [0.0015] * 2
    words = times.describe(plain_s=0.003, guided_s=0.004)
    expected = "masks: 2.00 ms median, 4.00 mean, 8.86 p99, 9.00 most, 2.00 beyond a plain step; the host waits 1.00 ms"
    assert expected in words
