"""A task for lm-evaluation-harness, and its requests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

PROJECT = Path(__file__).resolve().parents[2]
SUBSET = PROJECT / "examples" / "data" / "lambada_subset.jsonl"


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@cache
def task_manager() -> TaskManager:
    """The harness's index of its tasks; making it takes some ten seconds."""
    return TaskManager()


def harness_task(file: Path) -> dict[str, Any]:
    """The harness's own ``lambada_openai``, with a file in place of the hub's data."""
    own = dict(task_manager().task_index["lambada_openai"].cfg or {})
    return {**own, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": {"test": str(file)}}}
