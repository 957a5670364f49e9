"""The p-tuned tasks of a served checkpoint: templates, virtual tokens and prompt tables, read from its directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evaluation.client.request_tensors import LearntPrompt
from evaluation.tasks.prompt_template import Template, make_template
from ft_format.config_ini import FILE_NAME, ConfigIni
from ft_format.values import INDEX, one_of
from handover.errors import ArtefactError, ConfigError, nearest
from handover.templates import TEMPLATES_FILE, read_templates

_TEMPLATE_KEYS = ("prompt_template", "answer_field", "truncate_field", "virtual_token_splits")
_NUMPY_TYPES = {"fp32": "<f4", "fp16": "<f2", "bf16": "<u2"}  # of weights on disk; numpy has no bf16


def read_task(
    directory: Path | None, name: str, known: Sequence[str], brings_table: bool
) -> tuple[Template, LearntPrompt]:
    """Read a task of an FT checkpoint.

    Args:
        directory: directory of the checkpoint; None where it is not on this machine.
        name: name of the task, NeMo's ``taskname``.
        known: fields of the samples.
        brings_table: whether requests contain the prompt table instead of the task's number.

    Raises:
        ConfigError: the checkpoint is not on this machine, has no such task, or its template has other fields.
        ArtefactError: a file of the checkpoint is damaged.
    """
    if directory is None:
        raise ConfigError(f"the task {name}: the served checkpoint is not on this machine", "give --prompt instead")
    templates = read_templates(directory)
    names = [str(template.get("taskname")) for template in templates]
    if name not in names:
        hint = nearest(name, names) if names else "put the p-tuned .nemo beside the model's and convert again"
        raise ConfigError(f"{directory} has no template of a task {name}", hint)
    number = names.index(name)
    content = {key: templates[number][key] for key in _TEMPLATE_KEYS if templates[number].get(key) is not None}
    template = make_template(content, known, f"{directory / TEMPLATES_FILE}, task {name}")
    ini = ConfigIni.read(directory, ArtefactError)
    section = ini.with_key("prompt_learning_start_id")
    if section is None:
        raise ArtefactError(f"{directory / FILE_NAME} has no prompt_learning_start_id", "convert again")
    data_type = section.get("weight_data_type", one_of({each: each for each in _NUMPY_TYPES}), "fp32")
    table = _read_table(directory, name, ini, data_type) if brings_table else None
    return template, LearntPrompt(number, section.get("prompt_learning_start_id", INDEX), table)


def _read_table(directory: Path, name: str, ini: ConfigIni, data_type: str) -> npt.NDArray[np.float16]:
    """Read a task's prompt table as a request contains it: float16 [virtual tokens, hidden]."""
    path = directory / f"model.prompt_table.{name}.weight.bin"
    rows = next(each.get("prompt_length", INDEX) for each in ini.values() if each.get("task_name", str, "") == name)
    try:
        raw = np.fromfile(path, _NUMPY_TYPES[data_type])
        if data_type == "bf16":  # the upper half of a float32
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        table: npt.NDArray[np.float16] = raw.reshape(rows, -1).astype(np.float16)
    except (OSError, ValueError) as error:
        raise ArtefactError(f"{path} cannot be read: {error}", "convert again") from error
    return table
