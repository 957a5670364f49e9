"""The measurement of drafts: the model says what it was told, and what a text repeats is drafted."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.engine import speculation
from benchmarks.gpu import sizes as gpu_sizes


def test_texts_that_repeat_their_prompts_have_right_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = gpu_sizes.LlamaSize(1, 64, 2, 2000, kv_heads=1, head_size=32, inter=64, positions=1200)
    monkeypatch.setitem(gpu_sizes.SIZES, "tiny", tiny)
    shape = ["--size=tiny", "--rows=[2]", "--tokens=40", "--repeats=1", "--threads=1"]
    speculation.main([*shape, f"--csv={tmp_path / 'table.csv'}"])
    with (tmp_path / "table.csv").open() as file:
        rows = {row["text"]: row for row in csv.DictReader(file)}
    accepted = {text: float(row["accepted"]) for text, row in rows.items()}
    assert accepted["edit"] > 0.8 > accepted["summary"] > 0.2 and accepted["own words"] == accepted["misleading"] == 0
    for row in rows.values():
        assert float(row["ratio"]) == pytest.approx(float(row["drafted"]) / float(row["plain"]), rel=0.01)
