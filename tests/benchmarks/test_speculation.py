"""The measurement of drafts: the model says what it was told, and what a text repeats is drafted."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from backends.fastertransformer.engine.scheduling import speculation as scheduling
from backends.fastertransformer.engine.scheduling.draft_costs import DraftCosts
from benchmarks.engine import speculation
from benchmarks.gpu import sizes as gpu_sizes


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, dict[str, str]]:
    """What the measurement says of a tiny model, by text."""
    tiny = gpu_sizes.LlamaSize(1, 64, 2, 2000, kv_heads=1, head_size=32, inter=64, positions=1200)
    monkeypatch.setitem(gpu_sizes.SIZES, "tiny", tiny)
    shape = ["--size=tiny", "--rows=[2]", "--tokens=40", "--repeats=1", "--threads=1"]
    speculation.main([*shape, f"--csv={folder / 'table.csv'}", *more])
    with (folder / "table.csv").open() as file:
        return {row["text"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize("way", ["draft", "mtp"])
def test_what_drafts_says_what_it_is_told(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "DraftCosts", lambda _: DraftCosts(0.0))
    rows = measured(tmp_path, monkeypatch, f"--way={way}")
    accepted = {text: float(row["accepted"]) for text, row in rows.items()}
    assert accepted["known"] == 1 > accepted["half known"] > accepted["unknown"] == 0
    assert {row["way"] for row in rows.values()} == {way}


def test_texts_that_repeat_their_prompts_have_right_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(tmp_path, monkeypatch)
    accepted = {text: float(row["accepted"]) for text, row in rows.items()}
    assert accepted["edit"] > 0.8 > accepted["summary"] > 0.2 and accepted["own words"] == accepted["misleading"] == 0
    for row in rows.values():
        assert float(row["ratio"]) == pytest.approx(float(row["drafted"]) / float(row["plain"]), rel=0.01)
