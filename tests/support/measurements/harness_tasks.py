"""A task for lm-evaluation-harness, and its requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

PROJECT = Path(__file__).resolve().parents[3]
SUBSET = PROJECT / "examples" / "data" / "lambada_subset.jsonl"


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@cache
def task_manager() -> TaskManager:
    """The harness's own LAMBADA alone: to find all of its tasks takes some ten seconds."""
    own = Path(lm_eval.tasks.__file__).parent
    return TaskManager(include_path=str(own / "lambada"), include_defaults=False)


def harness_task(file: Path) -> dict[str, Any]:
    """The harness's own ``lambada_openai``, with a file in place of the hub's data."""
    own = dict(task_manager().task_index["lambada_openai"].cfg or {})
    return {**own, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": {"test": str(file)}}}


def choice_task(file: Path) -> dict[str, Any]:
    """A task of the form ``multiple_choice``, like HellaSwag, with the file of ``write_choices`` as its data."""
    return {
        "task": "endings_of_passages",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{passage}}",
        "doc_to_choice": "endings",
        "doc_to_target": "{{label}}",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    }


def write_choices(file: Path, texts: Sequence[str], endings: int = 4, words: int = 8) -> None:
    """Write a line for each text: all but its last words, and endings of which one is its own, the others of others."""
    cut = [text.split(" ") for text in texts]
    with file.open("w", encoding="utf-8") as stream:
        for number, own in enumerate(cut):
            label = number % endings
            others = [cut[(number + place - label) % len(cut)][-words:] for place in range(endings)]
            line = {"passage": " ".join(own[:-words]), "endings": [" ".join(each) for each in others], "label": label}
            stream.write(json.dumps(line) + "\n")
