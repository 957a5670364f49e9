"""The measurement of answers that are shorter than request_output_len: both ways give the same tokens."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.engine.page_growth import main


def test_both_lengths_are_measured_on_the_same_tokens(tmp_path: Path) -> None:
    sizes = ["--layers=1", "--hidden=64", "--requests=8", "--rows-in-cache=6", "--rounds=1"]
    main([*sizes, f"--csv={tmp_path / 'growth.csv'}"])
    with (tmp_path / "growth.csv").open() as file:
        exact, long = csv.DictReader(file)
    assert (exact["factor"], exact["ratio"], long["factor"]) == ("1", "1", "4") and exact["tokens"] == long["tokens"]
    assert float(long["ratio"]) > 0
