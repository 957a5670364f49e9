"""The lock files name one version of everything, once, each with its digests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
MAIN = "requirements.lock"
OTHERS = ["requirements-test.lock", "requirements-gpu.lock"]


def entries(name: str) -> list[str]:
    """Packages of a file, each with its digests."""
    return re.split(r"\n(?! )", (PROJECT / name).read_text().removeprefix(f"-r {MAIN}\n").strip())


def pins(name: str) -> dict[str, set[str]]:
    """Versions of each package; several versions of one are for different Pythons."""
    found: dict[str, set[str]] = {}
    for package, version in re.findall(r"^([a-z0-9_.\[\]-]+)==([^\s;]+)", (PROJECT / name).read_text(), re.MULTILINE):
        found.setdefault(package, set()).add(version)
    return found


@pytest.mark.parametrize("name", [MAIN, *OTHERS])
def test_every_package_has_digests(name: str) -> None:
    assert len(entries(name)) > 20
    assert [entry.split()[0] for entry in entries(name) if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_files_begin_by_the_first_and_repeat_and_contradict_nothing_of_it(name: str) -> None:
    assert (PROJECT / name).read_text().startswith(f"-r {MAIN}\n")
    assert set(entries(name)) & set(entries(MAIN)) == set()
    both = pins(name).keys() & pins(MAIN).keys()  # for more Pythons
    assert {each: pins(name)[each] for each in both} == {each: pins(MAIN)[each] for each in both}


def test_a_gpus_has_the_torch_that_is_installed_elsewhere_and_the_triton_that_is_tested() -> None:
    (torch,), (triton,) = (pins("requirements-gpu.lock")[name] for name in ("torch", "triton"))
    assert f"\nTORCH := torch=={torch}\n" in (PROJECT / "Makefile").read_text()
    tried = (PROJECT / "tests" / "with_triton" / "requirements.txt").read_text()
    assert f"\ntriton=={triton}\n" in tried, "make test-kernels compiles with what the user of a GPU gets"
