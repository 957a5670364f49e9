"""Tasks of lm-evaluation-harness on local files: the harness's own definitions, with files in the hub's place.

For each task a file is written that includes the harness's own, whatever its version says there, and changes nothing
but the name and the place of the data: ``gsm8k`` becomes ``gsm8k_file``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from handover.errors import ConfigError

SUFFIX = "_file"
_BUILDERS = {".jsonl": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Preset:
    """A task, or a group of tasks that share their data.

    Attributes:
        files: its tasks' definitions below the harness's directory of tasks, as a pattern.
        splits: of the data that it reads.
        group: definition of the group; empty for a single task.
    """

    files: str
    splits: tuple[str, ...]
    group: str = ""


PRESETS: Mapping[str, Preset] = {
    "gsm8k": Preset("gsm8k/gsm8k.yaml", ("train", "test")),
    "humaneval": Preset("humaneval/humaneval.yaml", ("test",)),
    "ifeval": Preset("ifeval/ifeval.yaml", ("train",)),
    "mmlu_pro": Preset("mmlu_pro/mmlu_pro_*.yaml", ("validation", "test"), "mmlu_pro/_mmlu_pro.yaml"),
}


def write_tasks(data: Path, own: Path, output: Path) -> list[str]:
    """Write a definition for each preset that has a directory of its name in the data.

    Args:
        data: ``<preset>/<split>*.jsonl`` or ``.parquet``, in the form that the hub has.
        own: the harness's directory of tasks.
        output: directory for the definitions.

    Returns:
        Names of the tasks and groups.

    Raises:
        ConfigError: there is no such directory, or one lacks a split.
    """
    found = [name for name in PRESETS if (data / name).is_dir()]
    if not found:
        raise ConfigError(
            f"{data} has data of no task that is known here", f"it needs a directory of one of: {', '.join(PRESETS)}"
        )
    for name in found:
        preset, place = PRESETS[name], _place(data / name, PRESETS[name].splits)
        tasks = []
        for definition in sorted(own.glob(preset.files)):
            tasks.append(f"{definition.stem}{SUFFIX}")
            _write(output, tasks[-1], {"include": str(definition), "task": tasks[-1], **place})
        if not tasks:
            raise ConfigError(f"this lm_eval has no {preset.files}", "pip install 'lm_eval==0.4.13'")
        if preset.group:
            group = f"{name}{SUFFIX}"
            _write(output, group, {"include": str(own / preset.group), "group": group, "task": tasks})
    return [f"{name}{SUFFIX}" for name in found]


def _place(directory: Path, splits: tuple[str, ...]) -> dict[str, Any]:
    """Return the keys of a definition that say where its data is."""
    files = {split: sorted(p for p in directory.glob(f"{split}*") if p.suffix in _BUILDERS) for split in splits}
    for split, listed in files.items():
        if not listed:
            raise ConfigError(f"{directory} has no {split}.jsonl or {split}*.parquet", "copy it from the hub's dataset")
    kinds = {path.suffix for listed in files.values() for path in listed}
    if len(kinds) > 1:
        raise ConfigError(f"{directory} has files of both kinds: {', '.join(sorted(kinds))}", "leave one of them")
    named = {split: [str(path.absolute()) for path in listed] for split, listed in files.items()}
    return {"dataset_path": _BUILDERS[kinds.pop()], "dataset_name": None, "dataset_kwargs": {"data_files": named}}


def _write(output: Path, name: str, content: Mapping[str, Any]) -> None:
    (output / f"{name}.yaml").write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
