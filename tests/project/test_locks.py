"""The lock files name one version of everything, each with its digests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
LOCKS = ["requirements.lock", "requirements-test.lock", "requirements-gpu.lock"]


def pins(name: str) -> set[tuple[str, str]]:
    """Package and version; several versions of one are for different Pythons."""
    return set(re.findall(r"^([a-z0-9_.\[\]-]+)==([^\s;]+)", (PROJECT / name).read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_digests(name: str) -> None:
    entries = re.split(r"\n(?! )", (PROJECT / name).read_text().strip())
    assert len(entries) > 50
    assert [entry.split()[0] for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []


def test_the_lock_files_agree_and_a_gpus_has_the_torch_that_is_installed_elsewhere() -> None:
    usual, gpu = pins("requirements.lock"), pins("requirements-gpu.lock")
    assert usual <= gpu and usual <= pins("requirements-test.lock")
    makefile = (PROJECT / "Makefile").read_text()
    (torch,) = (version for package, version in gpu if package == "torch")
    assert f"\nTORCH := torch=={torch}\n" in makefile
    (triton,) = (version for package, version in gpu if package == "triton")
    tried = re.findall(r"--target \S+ triton==(\S+)", makefile)
    assert triton in tried, "make test-kernels compiles with what the user of a GPU gets"
