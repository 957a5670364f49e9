"""Requests by FasterTransformer's names and types, and what comes back, for tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2LMHeadModel

from backends.fastertransformer.engine.settings import Settings
from ft_format.tensors import INPUTS
from support.shards.gpt2_checkpoint import random_gpt2, write_shards

END, VOCABULARY, POSITIONS = 96, 97, 48  # of the tiny GPT-2
CPU = torch.device("cpu")
Tensors = dict[str, np.ndarray[Any, Any]]


def tiny_gpt2(directory: Path, **ini: object) -> tuple[GPT2LMHeadModel, Settings]:
    model = random_gpt2()
    return model, Settings(write_shards(model, directory, 1, **ini), 1, 1, "fp32", cpu_threads=1)


def prompts(*lengths: int, seed: int = 5) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, END, length).tolist() for length in lengths]


def ask(rows: list[list[int]], output_lengths: Any, **scalars: Any) -> Tensors:
    """A request of several rows; a scalar is one value or one a row, an array with more axes goes as it is."""

    def column(values: Any, dtype: Any) -> np.ndarray[Any, Any]:
        return np.broadcast_to(np.asarray(values, dtype).reshape(-1, 1), (len(rows), 1)).copy()

    ids = np.full((len(rows), max(map(len, rows))), 11, np.uint32)  # 11: padding that must not matter
    for row, prompt in enumerate(rows):
        ids[row, : len(prompt)] = prompt
    tensors = {"input_ids": ids, "input_lengths": column([len(row) for row in rows], np.uint32)}
    tensors["request_output_len"] = column(output_lengths, np.uint32)
    for name, value in scalars.items():
        is_whole = isinstance(value, np.ndarray) and value.ndim > 2
        tensors[name] = value if is_whole else column(value, INPUTS[name].kind)
    return tensors


def generated(outputs: Tensors, row: int = 0, beam: int = 0) -> list[int]:
    start, end = outputs["response_input_lengths"][row, beam], outputs["sequence_length"][row, beam]
    tokens: list[int] = outputs["output_ids"][row, beam, start:end].tolist()
    return tokens


def padded(rows: Sequence[Sequence[float]], dtype: Any = np.int32) -> np.ndarray[Any, Any]:
    """Lists of tokens, or of what belongs to them, one a row, [B, n], padded with -1."""
    lists = np.full((len(rows), max(map(len, rows))), -1, dtype)
    for row, values in enumerate(rows):
        lists[row, : len(values)] = values
    return lists


def word_list(words: list[list[int]]) -> np.ndarray[Any, Any]:
    """The layout of FasterTransformer's GPT guide for one row, [1, 2, n]."""
    flat = [token for word in words for token in word]
    ends = np.full(len(flat), -1)
    ends[: len(words)] = np.cumsum([len(word) for word in words])
    return np.array([[flat, ends]], np.int32)
