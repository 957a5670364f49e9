"""docs/cluster.md says what each stage needs in an image; the oracle is what its programs import."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from evaluation.task_table import TASKS

PROJECT = Path(__file__).resolve().parents[2]
OURS = {"models", "ft_format", "handover", "launcher", "export_scripts", "deployment", "evaluation"}
PROGRAMS = {
    "convert": ["export_scripts.convert"],
    "export": ["export_scripts.export"],
    "deploy": ["deployment.serve", "deployment.replicas.serve", "deployment.gemm_autotune"],
    "evaluate": [f"evaluation.{name}" for name in TASKS],
    "benchmark": ["evaluation.benchmark", "evaluation.load"],
    "report, gate": ["evaluation.report", "evaluation.sweep_report", "evaluation.gate"],
}
PACKAGES = {
    "google": "protobuf",
    "grpc": "grpcio",
    "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
}  # by another name than what is imported
OPTIONAL = {"isal"}
COPIED = {"byte_pieces"}  # an exported tokenizer imports its copy of ft_format.byte_pieces


def file_of(module: str) -> Path | None:
    path = PROJECT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def packages(programs: list[str]) -> set[str]:
    """What programs of ours import of others, at once or when it is needed."""
    seen: set[str] = set()
    foreign: set[str] = set()
    waiting = list(programs)
    while waiting:
        module = waiting.pop()
        root = module.split(".")[0]
        if root not in OURS:
            foreign |= {root} - set(sys.stdlib_module_names) - COPIED - {"__future__", "backends"}
        elif module not in seen and (file := file_of(module)):
            seen.add(module)
            waiting += imports(file)
    return {PACKAGES.get(name, name) for name in foreign - OPTIONAL}


@pytest.mark.parametrize("stage", PROGRAMS)
def test_the_page_lists_what_a_stage_imports(stage: str) -> None:
    row = re.search(rf"^\| {stage} \| (.*) \|$", (PROJECT / "docs" / "cluster.md").read_text(), re.MULTILINE)
    assert row and set(row[1].split(", ")) == packages(PROGRAMS[stage])
