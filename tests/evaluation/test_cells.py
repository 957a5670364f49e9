"""Tables hold strangers' words: a spreadsheet that opens them computes nothing, and a number stays a number."""

from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path

import pytest
from support.measurements.results_maker import load_row, static_row

from evaluation.compare import render_csv
from evaluation.report.sweep_points import Point
from evaluation.speed.tables.cells import plain, unquoted
from evaluation.speed.tables.table import LOAD_TABLE, STATIC_TABLE
from evaluation.sweep_report import render_csv as render_sweep
from evaluation.tasks import outcome

FORMULAS = ["=2+3", '=HYPERLINK("http://x","y")', "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "'=1", "-", "+"]
NUMBERS = ["-1.5", "+3", "-1e-3", "-inf", "-1.5e+10", "0", "nan"]
TEXTS = ["", "'quoted'", "a=b", " =1", "1-2", "'", "it's", "ümläut"]


def starts(cell: str) -> bool:
    return cell[:1] in ("=", "+", "-", "@", "\t", "\r", "\n")


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_becomes_a_text_and_is_read_back(text: str) -> None:
    assert not starts(plain(text)) and unquoted(plain(text)) == text


@pytest.mark.parametrize("value", [*NUMBERS, *TEXTS, -1.5, -3, None, True])
def test_anything_else_stays_as_it_is(value: object) -> None:
    assert plain(value) == value and plain(value) is value
    if isinstance(value, str):
        assert unquoted(value) == value


@dataclasses.dataclass(frozen=True)
class Sample:
    index: int
    text: str
    logprob: float
    error: str = ""


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


@pytest.mark.parametrize("hostile", FORMULAS)
def test_no_table_of_ours_holds_a_formula(hostile: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.csv" for number in range(4)]
    STATIC_TABLE.write(files[0], [static_row(1, [10.0], model=hostile, error=hostile)])
    LOAD_TABLE.write(files[1], [load_row(model=hostile, workload=hostile)])
    outcome.write_rows(files[2], [Sample(0, hostile, -1.5, hostile)])
    outcome.write_rows(files[3], [{"prompt": hostile, "logit_difference": -0.25}])
    texts = [file.read_bytes().decode() for file in files]
    texts += [render_csv([hostile], {hostile: []}), render_sweep([Point(hostile, hostile, hostile, hostile)])]
    for text in texts:
        cells = [cell for row in rows(text) for cell in row]
        assert any(hostile.replace("\r", "\n") in cell.replace("\r", "\n") for cell in cells)
        assert not [cell for cell in cells if starts(cell) and cell not in ("-1.5", "-0.25")]
    assert "-1.5" in texts[2] and "-0.25" in texts[3], "numbers stay numbers"
    assert STATIC_TABLE.read(files[0])[0].model == hostile.replace("\r", "\n")
    assert LOAD_TABLE.read(files[1])[0].workload == hostile.replace("\r", "\n")
