"""The report in a real browser: nothing on its console, and nothing wider than a phone's screen."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.measurements.results_maker import load_row, static_row, write_results

from evaluation.report import write as report

FIGURES = {"requests_per_s": 9.5, "output_tokens_per_s_per_user": 60.0, "e2e_p50_ms": 300.0, "e2e_p99_ms": 450.0}
MEASURE = "<script>console.log('width', document.documentElement.scrollWidth, innerWidth)</script></body>"


def open_page(page: Path, *flags: str) -> str:
    """Load a page in Debian's chromium; what it prints, console messages included."""
    program = shutil.which("chromium")
    assert program, "there is no browser here: apt-get install chromium"
    argv = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    ended = subprocess.run(
        [*argv, profile, *flags, page.as_uri()], capture_output=True, timeout=180, check=True, stdin=subprocess.DEVNULL
    )
    return (ended.stderr + ended.stdout).decode(errors="replace")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    rows = [
        load_row(size, output_tokens_per_s=90.0 * size, output_tokens_per_s_per_gpu=90.0 * size, **FIGURES)
        for size in (1, 2, 4)
    ]
    rows[1] = dataclasses.replace(rows[1], failed_requests=2, error="/a_path_without_a_place_to_break" * 4)
    rows.append(load_row(8, state="failed", error="no room " * 30))
    static = [static_row(size, [20.0 * size, 25.0 * size]) for size in (1, 8)]
    results = write_results(tmp_path / "run", load=rows, static=static, accuracy={"last_token_accuracy": (0.5, 0.01)})
    requests = [{"timestamp": 0, "response_timestamps": [stamp * 1_000_000]} for stamp in (280, 300, 450)]
    for row in rows[:3]:
        directory = results / "benchmark" / "load" / row.directory
        directory.mkdir()
        (directory / "profile_export.json").write_text(json.dumps({"experiments": [{"requests": requests}]}))
    argv = [f"--results={results}", f"--output={tmp_path / 'report'}", "--title=a_model_with_a_long_name"]
    report.main([*argv, f"--stages={results / 'none'}"])
    return tmp_path / "report" / "report.html"


def test_the_page_opens_without_a_word_on_the_console_and_fits_a_phone(page: Path) -> None:
    opened = open_page(page)
    assert "Under load: load" in opened
    assert "CONSOLE" not in opened
    # The same page with a line that measures it: proof, too, that the console would have been seen.
    phone = page.with_name("phone.html")
    phone.write_text(page.read_text().replace("</body>", MEASURE))
    found = re.search(r'CONSOLE.*"width (\d+) (\d+)"', open_page(phone, "--window-size=500,900"))
    assert found, "chromium did not show what the page said on its console"
    width, screen = map(int, found.groups())
    assert width <= screen <= 500
