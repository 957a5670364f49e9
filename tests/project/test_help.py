"""Every program of the project says what it is for: ``--help`` of each module that can be run, found in the tree."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "backends",
    "benchmarks",
    "deployment",
    "evaluation",
    "examples",
    "export_scripts",
    "launcher",
    "slipway",
)


def programs() -> list[Path]:
    """Files that do something when they are run."""
    found = [PROJECT / "main.py", *(file for package in PACKAGES for file in sorted((PROJECT / package).rglob("*.py")))]
    return [file for file in found if '__name__ == "__main__"' in file.read_text() or file.name == "__main__.py"]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("file", programs(), ids=lambda file: str(file.relative_to(PROJECT)))
def test_help_says_what_a_program_is_for(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    monkeypatch.syspath_prepend(file.parent if file.parent.name == "examples" else PROJECT)
    for name, value in (("HYDRA_FULL_ERROR", "1"), ("GOMP_SPINCOUNT", "2000")):
        monkeypatch.setenv(
            name, value
        )  # else main.py sets the one for good, and a benchmark starts over with the other
    with pytest.raises(SystemExit) as ended:
        if file.parent.name == "examples" or file.name == "main.py":
            runpy.run_path(str(file), run_name="__main__")
        else:
            module = ".".join(file.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__main__")
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    GlobalHydra.instance().clear()
    printed = capsys.readouterr()
    assert ended.value.code in (0, None), printed.err
    assert ("usage" in printed.out or "python -m" in printed.out) and len(printed.out.split()) > 20, printed.out


def test_all_programs_are_found() -> None:
    listed = subprocess.run(
        ["git", "grep", "-l", "__main__", "--", "*.py", ":!tests"], cwd=PROJECT, capture_output=True, text=True
    )
    without = {".ci/lock.py", "benchmarks/convert/peer.py", "slipway/cli.py"}
    assert set(listed.stdout.split()) - without <= {str(file.relative_to(PROJECT)) for file in programs()}
