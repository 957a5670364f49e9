"""The measurement of a long prompt beside rows that decode: by chunks the rows wait for less of it at a time."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.engine import long_prompt
from benchmarks.gpu import sizes as gpu_sizes


def test_rows_wait_less_for_chunks_than_for_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_sizes.SIZES, "tiny", gpu_sizes.Size(2, 128, 4, 500))
    shape = ['--sizes=["tiny"]', "--data-type=fp32", "--rows=2", "--prompt=1600", "--before=20", "--repeats=1"]
    long_prompt.main([*shape, "--chunk-tokens=[0, 100]", f"--csv={tmp_path / 'table.csv'}"])
    with (tmp_path / "table.csv").open() as file:
        whole, chunked = csv.DictReader(file)
    assert (whole["chunk_tokens"], chunked["chunk_tokens"], whole["prompt"]) == ("0", "100", "1600")
    assert float(whole["most_while"]) > float(chunked["p50_while"]) > 0
