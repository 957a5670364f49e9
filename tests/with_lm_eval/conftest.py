"""These tests need lm-evaluation-harness: ``make test-lm-eval`` runs them in a virtual environment of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.servers.served import Deployment

PROJECT = Path(__file__).resolve().parents[2]
# The hub must not be asked for anything.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
sys.path.append(str(PROJECT / "tests"))
collect_ignore_glob = [] if find_spec("lm_eval") else ["test_*.py"]


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The demonstration checkpoint behind a real tritonserver and its OpenAI endpoint."""
    from support.servers.served import Deployment

    from export_scripts.arguments import ConvertArguments, ExportArguments
    from export_scripts.convert import convert
    from export_scripts.repository.model_repository import build_repository

    root = tmp_path_factory.mktemp("demo")
    convert(ConvertArguments(PROJECT / "examples" / "gpt3_demo" / "checkpoints", root / "1-gpu", 1, "fp32", 2))
    build_repository(ExportArguments(root / "1-gpu", root / "repository", "demo", 1, 1, "fp32", 0, 0, 16))
    running = Deployment(root / "repository", root / "deployment", openai_port=0)
    running.wait_until_published()
    yield running
    running.stop()
