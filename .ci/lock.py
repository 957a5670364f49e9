"""Resolve the lock files again, by uv. What is pinned stays, unless pyproject.toml says otherwise.

requirements.lock is whole; the other two begin by it and have what it lacks, so that each package is stated once.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
MAIN = "requirements.lock"
COMPILE = (
    *("uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.10", "--no-header", "--no-annotate"),
    *("--no-strip-extras", "--generate-hashes", "pyproject.toml"),
)
# torch and what it brings for GPUs. Its builds differ (CUDA from PyPI, CPU elsewhere) and so do their digests: where no
# GPU is meant the Makefile installs it by its version. requirements-gpu.lock has PyPI's build with all digests.
OF_GPUS = re.compile(r"(torch|triton|cuda-[a-z]+|nvidia-(cu|nccl|nv)[a-z0-9-]*)(\[.*\])?==")


def entries(name: str) -> list[str]:
    """Return a file's packages, each with its digests."""
    found = re.split(r"\n(?=\S)", (PROJECT / name).read_text().strip())
    return [entry for entry in found if not entry.startswith("-r ")]


def resolve(name: str, *options: str) -> None:
    """Write a lock file; its pins, and those of the one that it begins by, are preferred."""
    preferred = entries(name) if name == MAIN else entries(MAIN) + entries(name)
    whole = PROJECT / f"{name}.whole"
    whole.write_text("\n".join(preferred) + "\n")
    subprocess.run([*COMPILE, *options, f"--output-file={whole.name}"], cwd=PROJECT, check=True)
    resolved = [entry for entry in entries(whole.name) if name == "requirements-gpu.lock" or not OF_GPUS.match(entry)]
    whole.unlink()
    stated = [] if name == MAIN else entries(MAIN)
    first = [] if name == MAIN else [f"-r {MAIN}"]
    (PROJECT / name).write_text("\n".join([*first, *(entry for entry in resolved if entry not in stated)]) + "\n")


if __name__ == "__main__":
    resolve(MAIN)
    resolve("requirements-gpu.lock")
    resolve("requirements-test.lock", "--extra=test", "--extra=lint", "--extra=docs")
