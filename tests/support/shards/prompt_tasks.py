"""Prompt-learning tasks beside the shards of a GPT-2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from backends.fastertransformer.engine.settings import Settings

START = 97  # prompt_learning_start_id: end_id + 1
HIDDEN = 32
TABLES = [
    np.random.default_rng(task).normal(0, 0.5, (length, HIDDEN)).astype(np.float32) for task, length in ((0, 4), (1, 6))
]


def add_tasks(settings: Settings, dtype: str = "<f4", kind: int = 3) -> Path:
    return write_tasks(settings, TABLES, START, dtype, kind)


def write_tasks(
    settings: Settings, tables: list[np.ndarray[Any, Any]], start: int, dtype: str = "<f4", kind: int = 3
) -> Path:
    """Add two tasks to the last section of config.ini; virtual tokens begin at start."""
    with (settings.checkpoint / "config.ini").open("a") as ini:
        ini.write(f"num_tasks = 2\nprompt_learning_type = {kind}\nprompt_learning_start_id = {start}\n")
        for task, (name, table) in enumerate(zip(("squad", "intent"), tables, strict=True)):
            ini.write(f"[task_{task}]\ntask_name = {name}\nprompt_length = {len(table)}\n")
            table.astype(dtype).tofile(settings.checkpoint / f"model.prompt_table.{name}.weight.bin")
    return settings.checkpoint
