"""Prompts that are not tokens of the vocabulary: embeddings sent with a request, or learned and stored as weights.

FasterTransformer's numbers for ``request_prompt_type`` and config.ini's ``prompt_learning_type``: 0 none; 1 soft prompt
(a request's embeddings precede its input); 2 prefix prompt (a task's keys and values of every layer, see prefixes.py; a
request cannot send its own); 3 p/prompt tuning (ids from ``prompt_learning_start_id`` on are rows of a table: the
task's, or the request's own). Positions count prompts; answers and penalties leave them out.
Sources: ``ParallelGpt.cc``, ``gpt_kernels.cu``, ``ParallelGptTritonModel.cc``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ..arrays import Array
from ..errors import RequestError
from ..model.config import ModelConfig, PromptType
from ..model.precision import TORCH_TYPES
from ..model.shards import map_file
from .schema import Inputs, checked, refuse_rows

_EMBEDDING, _LENGTHS, _TYPE = "request_prompt_embedding", "request_prompt_lengths", "request_prompt_type"
_TASK = "prompt_learning_task_name_ids"
_PROMPTS = frozenset((_EMBEDDING, _LENGTHS, _TYPE, _TASK))


@dataclass(frozen=True)
class Context:
    """What a row's generation starts from."""

    ids: Array  # int64 [T], T > 0; any legal id in place of an embedding
    embeddings: Array | None = None  # fp32 [T, hidden], NaN where the token's own embedding is used; None: everywhere
    prefix: int = -1  # the task whose prefix precedes the ids; -1: none
    prefix_length: int = 0  # entries of the cache that the prefix takes
    ia3_task: int = -1  # whose IA3 adapters apply to an encoder's input; -1: none

    @property
    def own_tokens(self) -> Array:
        """Whether each place is a token, not a prompt's embedding, bool [T]."""
        own: Array = np.ones(len(self.ids), bool) if self.embeddings is None else np.isnan(self.embeddings[:, 0])
        return own


def read_prompt_tables(directory: Path, config: ModelConfig) -> list[Array] | None:
    """Read the tables of config.ini's tasks, fp32 [prompt_length, hidden] each; None: there is no p/prompt tuning.

    Raises:
        WeightsError: ``model.prompt_table.<task_name>.weight.bin`` is missing or has another size.
    """
    if config.prompt_learning_type != PromptType.TUNED:
        return None
    dtype = TORCH_TYPES[config.weight_data_type]
    return [
        map_file(directory / f"model.prompt_table.{name}.weight.bin", (length, config.hidden_units), dtype)
        .to(torch.float32, copy=True)
        .numpy()
        for name, length in config.prompt_tasks
    ]


def place_prompts(sent: Inputs, config: ModelConfig, prompts: Sequence[Array] | None) -> list[tuple[Context, Array]]:
    """Insert prompts, the request's own or its tasks', into the inputs; a row without input starts from its start_id.

    Returns:
        What each row starts from, and the part of its input that is shown, int64 [n].
    """
    if sent.tensors.keys().isdisjoint(_PROMPTS) and sent.lengths.all() and sent.ids.shape[1]:
        rows = [sent.ids[row, :length] for row, length in enumerate(sent.lengths.tolist())]
        return [(Context(_legal(tokens, row, config)), tokens) for row, tokens in enumerate(rows)]
    kinds, own = _request_prompts(sent, config)
    tasks = _tasks(sent, config, prompts)
    is_empty, starts = (sent.lengths == 0) | (sent.ids.shape[1] == 0), sent.scalars["start_id"]
    begins = is_empty & ((kinds != PromptType.SOFT) | (sent.scalars[_LENGTHS] == 0))
    legal = f"below vocab_size {config.vocab_size}, for a row without input starts from it"
    refuse_rows("start_id", starts, begins & (starts >= config.vocab_size), legal)
    first_virtual, placed = config.prompt_learning_start_id, []
    for row, (kind, table) in enumerate(zip(kinds.tolist(), own, strict=True)):
        tokens = sent.ids[row, : sent.lengths[row]]
        if tasks and prompts is not None and kind == PromptType.NONE:
            kind, table = PromptType.TUNED, prompts[tasks[row]]
        if kind == PromptType.NONE and not tasks and not is_empty[row]:
            placed.append((Context(_legal(tokens, row, config)), tokens))
            continue
        # The row of the table that replaces each token; negative: the token stays.
        virtual = tokens - first_virtual if kind == PromptType.TUNED else np.full_like(tokens, -1)
        if (virtual >= len(table)).any():
            legal = f"{first_virtual} + 0 to {len(table) - 1}"
            raise RequestError(f"input_ids holds {tokens.max()}; the prompt's ids are {legal}")
        shown = tokens[virtual < 0]
        if kind == PromptType.SOFT:
            tokens, virtual = (np.concatenate((np.arange(len(table)), each)) for each in (tokens, virtual))
        if begins[row]:
            tokens, virtual = starts[row : row + 1].astype(np.int64), np.full(1, -1)
        context = _context(tokens, virtual, table)
        if tasks and config.has_prefixes and (entries := config.prompt_tasks[tasks[row]][1]):
            if is_empty[row]:
                raise RequestError(f"row {row} has no input: a prefix prompt must come with one")
            context = replace(context, prefix=tasks[row], prefix_length=entries)
        _legal(context.ids, row, config)
        placed.append((context, shown))
    return placed


def _legal(tokens: Array, row: int, config: ModelConfig) -> Array:
    """Return a row's tokens, [T], or refuse those beyond the vocabulary."""
    if (bad := tokens[tokens >= config.vocab_size]).size:
        raise RequestError(f"input_ids holds {bad[0]} in row {row}; the vocabulary has {config.vocab_size} tokens")
    return tokens


def _context(tokens: Array, virtual: Array, table: Array) -> Context:
    """Replace tokens, [T], by the rows of a table that ``virtual``, [T], numbers; a negative one keeps the token."""
    is_prompt = virtual >= 0
    if not is_prompt.any():
        return Context(tokens)
    embeddings = np.where(is_prompt[:, None], table[np.maximum(virtual, 0)], np.float32(np.nan))
    return Context(np.where(is_prompt, 0, tokens), embeddings)


def _request_prompts(sent: Inputs, config: ModelConfig) -> tuple[Array, list[Array]]:
    """Check a request's own prompts; returns each row's type, [B] (0: none), and embeddings, fp32 [n, hidden].

    FasterTransformer applies no prompt, and warns, if one of the three tensors is missing; here that is an error unless
    there is nothing to apply.
    """
    lengths, kinds, batch = sent.scalars[_LENGTHS], sent.scalars[_TYPE], sent.batch
    given = {name: sent.tensors[name] for name in (_EMBEDDING, _LENGTHS, _TYPE) if name in sent.tensors}
    if config.encoder and _EMBEDDING in given and _TYPE not in given:  # T5 has one type only, and no tensor for it
        given[_TYPE] = kinds = np.full(batch, PromptType.TUNED)
    if _EMBEDDING in given:
        checked(_EMBEDDING, given[_EMBEDDING], (np.float32, np.float16), batch, "n", config.hidden_units)
    if not any(array.any() for array in given.values()):
        return kinds, [np.zeros((0, config.hidden_units), np.float32)] * batch
    if missing := [name for name in (_EMBEDDING, _LENGTHS, _TYPE) if name not in given]:
        raise RequestError(f"{next(iter(given))} needs {' and '.join(missing)} too")
    embedding = given[_EMBEDDING]
    refuse_rows(_LENGTHS, lengths, lengths > embedding.shape[1], f"at most {embedding.shape[1]}")
    legal = "0, 1 (soft) or 3 (tuned): a prefix prompt comes from the checkpoint only"
    refuse_rows(_TYPE, kinds, ~np.isin(kinds, (PromptType.NONE, PromptType.SOFT, PromptType.TUNED)), legal)
    own = [embedding[row, : lengths[row]].astype(np.float32) for row in range(batch)]
    for row, embeddings in enumerate(own):
        if not np.isfinite(embeddings).all():
            raise RequestError(f"{_EMBEDDING} holds a number in row {row} that is not finite")
    return kinds, own


def _tasks(sent: Inputs, config: ModelConfig, prompts: Sequence[Array] | None) -> list[int]:
    """Return each row's task, if any was sent; refuse tasks that the checkpoint does not have."""
    if _TASK not in sent.tensors:
        return []
    if prompts is None and not config.has_prefixes:
        if config.prompt_learning_type == PromptType.PREFIX:
            raise RequestError(
                f"{_TASK}: this checkpoint has prefix prompts (prompt_learning_type = 2), which FasterTransformer reads"
                f" and never uses in a {config.family}; GPT-J and GPT-NeoX have them. Leave it out"
            )
        raise RequestError(f"{_TASK}: this checkpoint's config.ini has no prompt_learning_type = 3; leave it out")
    tasks = sent.scalars[_TASK]
    if (tasks >= len(config.prompt_tasks)).any():
        raise RequestError(f"{_TASK} is {tasks.max()}; the checkpoint has tasks 0 to {len(config.prompt_tasks) - 1}")
    found: list[int] = tasks.tolist()
    return found
