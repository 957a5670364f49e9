"""Prompts that are not tokens of the vocabulary: embeddings sent with a request, or learnt and kept in the checkpoint.

FasterTransformer's numbers for ``request_prompt_type`` and config.ini's ``prompt_learning_type``: 0 none; 1 soft prompt
(a request's embeddings stand in front of its input); 2 prefix prompt (a task's keys and values of every layer, see
prefixes.py; a request cannot bring its own); 3 p/prompt tuning (ids from ``prompt_learning_start_id`` on stand for rows
of a table: the task's, or the request's own). Positions count prompts; answers and penalties leave them out.
Sources: ``ParallelGpt.cc``, ``gpt_kernels.cu``, ``ParallelGptTritonModel.cc``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .config import PROMPT_TYPES, ModelConfig
from .errors import RequestError
from .precision import TORCH_TYPES
from .shards import map_file

Array = npt.NDArray[Any]

_NONE, _SOFT, _PREFIX, _TUNED = range(4)
_REQUEST_NAMES = ("request_prompt_embedding", "request_prompt_lengths", "request_prompt_type")
PROMPT_NAMES = ("prompt_learning_task_name_ids", *_REQUEST_NAMES)


@dataclass(frozen=True)
class Context:
    """What a row's generation starts from.

    Attributes:
        ids: int64 [T], at least one; any legal id where an embedding stands.
        embeddings: fp32 [T, hidden], NaN where the token has its own; None: all have.
        prefix: the task whose prefix precedes all that; -1: none.
        prefix_length: entries of the cache that the prefix takes.
    """

    ids: Array
    embeddings: Array | None = None
    prefix: int = -1
    prefix_length: int = 0

    @property
    def own_tokens(self) -> Array:
        """Whether a token, and no prompt's embedding, stands at each place, bool [T]."""
        shown: Array = np.ones(len(self.ids), bool) if self.embeddings is None else np.isnan(self.embeddings[:, 0])
        return shown


def read_prompt_tables(directory: Path, config: ModelConfig) -> list[Array] | None:
    """Read the tables that config.ini's tasks name, ``model.prompt_table.<task_name>.weight.bin``.

    Returns:
        fp32 [prompt_length, hidden] of each task, by its number; None where its prompt_learning_type is not p/prompt
        tuning.

    Raises:
        WeightsError: a table is missing or has another size.
    """
    if config.prompt_learning_type != PROMPT_TYPES[_TUNED]:
        return None
    dtype = TORCH_TYPES[config.weight_data_type]
    return [
        map_file(directory / f"model.prompt_table.{name}.weight.bin", (length, config.hidden_units), dtype)
        .to(torch.float32, copy=True)
        .numpy()
        for name, length in config.prompt_tasks
    ]


def place_prompts(
    tensors: Mapping[str, Array],
    ids: Array,
    lengths: Array,
    start_ids: Array,
    config: ModelConfig,
    prompts: Sequence[Array] | None,
) -> tuple[list[Context], list[Array]]:
    """Put prompts where they belong.

    Args:
        tensors: of the request.
        ids: int64 [B, L].
        lengths: int64 [B]; 0 in a row without input, which starts from its start_id.
        start_ids: [B].
        config: dimensions.
        prompts: the tasks' tables.

    Returns:
        What each row starts from, and the part of its input that is shown, int64 [n] each.

    Raises:
        RequestError: a prompt tensor is malformed or incomplete, a task does not exist, an id stands for nothing.
    """
    batch = len(ids)
    kinds, own = _request_prompts(tensors, batch, config)
    tasks = _tasks(tensors, batch, config, prompts)
    start_id = config.prompt_learning_start_id or config.end_id + 1
    contexts, shown = [], []
    for row in range(batch):
        line, table = ids[row, : lengths[row]], own[row] if kinds[row] == _TUNED else None
        if tasks is not None and prompts is not None and not kinds[row]:
            table = prompts[tasks[row]]
        contexts.append(_context(line, kinds[row] == _SOFT, own[row], table, start_id, int(start_ids[row])))
        if tasks is not None and config.has_prefixes:
            contexts[-1] = _behind_prefix(contexts[-1], tasks[row], row, not len(line), config)
        shown.append(line if table is None else line[line < start_id])
        bad = contexts[-1].ids[contexts[-1].ids >= config.vocab_size]
        if bad.size:
            raise RequestError(f"input_ids holds {bad[0]} in row {row}; the vocabulary has {config.vocab_size} tokens")
    return contexts, shown


def _context(line: Array, is_soft: bool, own: Array, table: Array | None, start_id: int, first: int) -> Context:
    if is_soft and len(own):
        embeddings = np.full((len(own) + len(line), own.shape[1]), np.nan, np.float32)
        embeddings[: len(own)] = own
        return Context(np.concatenate([np.zeros(len(own), np.int64), line]), embeddings)
    if table is not None:
        virtual = line - start_id
        if (virtual >= len(table)).any():
            raise RequestError(f"input_ids holds {line.max()}; the prompt's ids are {start_id} + 0 to {len(table) - 1}")
        embeddings = np.where((virtual >= 0)[:, None], table[np.maximum(virtual, 0)], np.float32(np.nan))
        return Context(np.where(virtual >= 0, 0, line), embeddings)
    return Context(line if len(line) else np.array([first], np.int64))


def _behind_prefix(context: Context, task: int, row: int, is_empty: bool, config: ModelConfig) -> Context:
    length = config.prompt_tasks[task][1]
    if length and is_empty:
        raise RequestError(f"row {row} has no input: a prefix prompt must come with one")
    return replace(context, prefix=task, prefix_length=length)


def _request_prompts(tensors: Mapping[str, Array], batch: int, config: ModelConfig) -> tuple[Array, list[Array]]:
    """Check the three tensors of a request's own prompts: type of each row (0: none) and its embeddings, [n, hidden].

    FasterTransformer applies no prompt, and warns, where one of the three is missing; here that is an error unless
    there is nothing to apply.
    """
    nothing = np.zeros(batch, np.int64), [np.zeros((0, config.hidden_units), np.float32)] * batch
    if config.encoder and _REQUEST_NAMES[0] in tensors:  # T5 has this kind only, and no tensor that says so
        tensors = {_REQUEST_NAMES[2]: np.full((batch, 1), _TUNED, np.uint32), **tensors}
    present = [name for name in _REQUEST_NAMES if name in tensors]
    columns = {name: _column(name, tensors, batch) for name in present if name != _REQUEST_NAMES[0]}
    if _REQUEST_NAMES[0] in present:
        _check_embedding(tensors[_REQUEST_NAMES[0]], batch, config)
    if not any(tensors[name].any() for name in present):
        return nothing
    missing = [name for name in _REQUEST_NAMES if name not in tensors]
    if missing:
        raise RequestError(f"{present[0]} needs {' and '.join(missing)} too")
    embedding, lengths, kinds = tensors[_REQUEST_NAMES[0]], *(columns[name] for name in _REQUEST_NAMES[1:])
    for row in range(batch):
        if lengths[row] > embedding.shape[1]:
            raise RequestError(f"request_prompt_lengths is {lengths[row]} in row {row}; at most {embedding.shape[1]}")
        if not np.isfinite(embedding[row, : lengths[row]]).all():
            raise RequestError(f"request_prompt_embedding holds a number in row {row} that is not finite")
        if kinds[row] not in (_NONE, _SOFT, _TUNED):
            raise RequestError(
                f"request_prompt_type is {kinds[row]} in row {row}; it must be 0, 1 (soft) or 3 (tuned): a prefix"
                " prompt comes from the checkpoint only"
            )
    return kinds, [embedding[row, : lengths[row]].astype(np.float32) for row in range(batch)]


def _check_embedding(embedding: Array, batch: int, config: ModelConfig) -> None:
    name = _REQUEST_NAMES[0]
    is_float = embedding.dtype in (np.float32, np.float16)
    if not is_float or embedding.ndim != 3 or embedding.shape[::2] != (batch, config.hidden_units):
        raise RequestError(
            f"{name} is {embedding.dtype.name} of shape {list(embedding.shape)}, expected float32 or float16"
            f" [{batch}, n, {config.hidden_units}]"
        )


def _tasks(
    tensors: Mapping[str, Array], batch: int, config: ModelConfig, prompts: Sequence[Array] | None
) -> list[int] | None:
    """Check each row's task; None: the rows have none."""
    name = PROMPT_NAMES[0]
    if name not in tensors:
        return None
    if prompts is None and not config.has_prefixes:
        if config.prompt_learning_type == PROMPT_TYPES[_PREFIX]:
            raise RequestError(
                f"{name}: this checkpoint has prefix prompts (prompt_learning_type = 2), which FasterTransformer reads"
                f" and never uses in a {config.family}; GPT-J and GPT-NeoX have them. Leave it out"
            )
        raise RequestError(f"{name}: this checkpoint's config.ini has no prompt_learning_type = 3; leave it out")
    tasks = _column(name, tensors, batch)
    if (tasks >= len(config.prompt_tasks)).any():
        raise RequestError(f"{name} is {tasks.max()}; the checkpoint has tasks 0 to {len(config.prompt_tasks) - 1}")
    found: list[int] = tasks.tolist()
    return found


def _column(name: str, tensors: Mapping[str, Array], batch: int) -> Array:
    array = tensors[name]
    if array.dtype != np.uint32:
        raise RequestError(f"{name} has type {array.dtype.name}, expected uint32")
    if array.shape not in ((batch,), (batch, 1)):
        raise RequestError(f"{name} has shape {list(array.shape)}, expected [{batch}, 1]")
    return array.reshape(batch).astype(np.int64)
