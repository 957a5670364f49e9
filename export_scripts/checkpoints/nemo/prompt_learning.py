"""Prompt tables beside their model: what NeMo's p-tuning and prompt tuning save, a ``.nemo`` without the model itself.

A directory that holds one model and any number of prompt tables is one checkpoint. Whatever encoder trained a table
(mlp, lstm, embedding), the table itself is saved, and the encoder is not needed any more.

Format: NeMo, ``megatron_gpt_prompt_learning_model.py`` and ``prompt_encoder.py`` (``InferenceTable``). ``config.ini``:
FasterTransformer, ``nemo_ckpt_convert.py`` (``prompt_convert``); its loaders look for ``[task_<i>]`` or, in
``ParallelGptTritonModel::createGptModel``, ``[gpt_task_<i>]``, so both are written. The first id that stands for a row
of a table is the size of the tokenizer's own vocabulary, where NeMo adds its pseudo tokens; FasterTransformer's
converter writes GPT-2's 50257 for every model. The templates of the tasks' prompts go beside the shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.distributed import flat
from export_scripts.checkpoints.files.pickled import StoredTensor
from export_scripts.checkpoints.files.rank_files import JoinedTensor
from export_scripts.checkpoints.files.torch_format import open_torch_file
from export_scripts.checkpoints.files.yaml_file import read_yaml
from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.nemo import vocabulary_size
from export_scripts.weights.layouts import unchanged
from export_scripts.weights.schema import Rule, Rules, Sources
from export_scripts.weights.values import Fields
from ft_format.layout import TensorSpec
from handover.errors import CheckpointError
from handover.templates import TEMPLATES_FILE, templates_file
from models.checks import shown

KIND = "prompt_learning"
_KEY_FILE = re.compile(rf"{KIND}/[^/]+/{re.escape(CONFIG_FILE)}$")
_WEIGHTS = ("model_weights.ckpt", "mp_rank_00/model_weights.ckpt", "tp_rank_00_pp_rank_000/model_weights.ckpt")
_TABLE = "prompt_table.prompt_table.{}.prompt_embeddings.weight"
_ENCODER = ("embedding.", "embeddings.", "mlp_head.", "lstm_head.", "prompt_encoder.")
_P_TUNING = 3
"""FasterTransformer's ``PromptLearningType`` of both p-tuning and prompt tuning."""
_TASK_NAME = re.compile(r"\w[\w .+-]*")


@dataclass(frozen=True)
class Task:
    """One task's table.

    Attributes:
        length: rows of the table: virtual tokens.
        table: [length, hidden_units].
        template: how the task's prompts are written, in NeMo's words.
    """

    name: str
    length: int
    table: JoinedTensor
    template: Mapping[str, Any]

    @property
    def target(self) -> str:
        """FasterTransformer's name of the table."""
        return f"model.prompt_table.{self.name}.weight"


def is_prompt_config(config: Mapping[str, Any]) -> bool:
    """Whether a ``model_config.yaml`` is that of prompt tables."""
    is_adapter = "adapter_tuning" in config  # their configuration was made from that of prompt tables
    return not is_adapter and ("virtual_prompt_style" in config or "PromptLearning" in str(config.get("target", "")))


def with_prompts(source: Source, section: str, width: str = "hidden_units", first_id: int | None = None) -> Source:
    """Add the prompt tables that lie beside a model.

    Args:
        source: the model.
        section: of ``config.ini`` that FasterTransformer reads the number of tasks from.
        width: symbol of a row's width.
        first_id: the first id that stands for a row; None: the size of the tokenizer's own vocabulary.

    Raises:
        CheckpointError: a table does not fit the model, or a task is there twice.
    """
    tasks = [
        task for name in sorted(source.archive.sizes) if _KEY_FILE.match(name) for task in _tasks(source.archive, name)
    ]
    if not tasks:
        return source
    names = [task.name for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CheckpointError(f"{source.archive.path}: several prompt tables of {', '.join(twice)}", "keep one of each")
    keys: dict[str, object] = {
        "num_tasks": len(tasks),
        "prompt_learning_start_id": (
            vocabulary_size(source.archive, source.tokenizer) if first_id is None else first_id
        ),
        "prompt_learning_type": _P_TUNING,
    }
    sections: dict[str, Mapping[str, object]] = {section: {**source.extra_config.get(section, {}), **keys}}
    for number, task in enumerate(tasks):
        for prefix in ("", f"{section}_"):
            sections[f"{prefix}task_{number}"] = {"task_name": task.name, "prompt_length": task.length}
    rules: dict[Sources, Rules] = {task.target: Rule(task.target, unchanged) for task in tasks}
    return replace(
        source,
        source_map=replace(source.source_map, rules={**source.source_map.rules, **rules}),
        tensors={**source.tensors, **{task.target: task.table for task in tasks}},
        extra_targets={task.target: TensorSpec((task.length, width)) for task in tasks},
        extra_config={**source.extra_config, **sections},
        extra_files={**source.extra_files, TEMPLATES_FILE: templates_file([task.template for task in tasks])},
    )


def refuse_unread_prompts(source: Source) -> None:
    """Make sure that prompt tables beside a model were added to it.

    Raises:
        CheckpointError: they lie beside a model of a kind for which they are not read.
    """
    if not source.extra_targets and any(_KEY_FILE.match(name) for name in source.archive.sizes):
        raise CheckpointError(
            f"{source.archive.path} holds prompt tables beside a model of {source.source_map.name}",
            "they are read for NeMo's GPT and T5; move them away to convert the model without them",
        )


def _tasks(archive: Archive, config_file: str) -> Iterator[Task]:
    """Read the tasks of one prompt-learning file, in the order of its templates: a task's number is its place."""
    folder = config_file.removesuffix(CONFIG_FILE)
    where = f"{archive.path}: {folder.rstrip('/')}"
    weights = next((folder + name for name in _WEIGHTS if folder + name in archive), None)
    if weights is None:
        raise CheckpointError(f"{where} has no {_WEIGHTS[0]}", "copy it again")
    file = open_torch_file(archive, weights, lambda content, _: flat(content) if isinstance(content, dict) else {})
    templates = Fields(read_yaml(archive, config_file), config_file).entries("task_templates", ())
    by_name = {str(template.get("taskname")): template for template in templates if isinstance(template, Mapping)}
    for name, template in by_name.items():
        yield _task(where, name, file.state.get(_TABLE.format(name)), file, template)
    known = {_TABLE.format(name) for name in by_name}
    if foreign := sorted(key for key in file.state if key not in known and not key.startswith(_ENCODER)):
        raise CheckpointError(f"{where} holds what no task template names: {', '.join(foreign)}")


def _task(where: str, name: str, table: Any, file: Any, template: Mapping[str, Any]) -> Task:
    if not _TASK_NAME.fullmatch(name):
        raise CheckpointError(f"{where}: the task's name {name!r} cannot be part of a file's name")
    if not isinstance(table, StoredTensor) or len(table.shape) != 2:
        raise CheckpointError(
            f"{where} has no table for the task {name}", "NeMo saves it at the end of the training; remove the template"
        )
    length = template.get("total_virtual_tokens", table.shape[0])
    if length != table.shape[0]:
        raise CheckpointError(
            f"{where}: the table of the task {name} has {table.shape[0]} rows, and its template says "
            f"total_virtual_tokens: {shown(length)}",
            "copy the checkpoint again",
        )
    return Task(name, table.shape[0], JoinedTensor(((file, table),), None), template)
