"""Requests to a T5 in the engine, and Hugging Face's answers to the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.fastertransformer.engine.settings import Settings
from support.engines.asking import Tensors

LONG = 20  # enough for all beams to end: at the limit the two definitions differ, see beam.py


def settings_of(directory: Path, model_type: str = "T5") -> Settings:
    return Settings(directory, 1, 1, "fp32", cpu_threads=1, model_type=model_type, kv_cache_bytes=1 << 26)


def sources(*lengths: int, vocab: int = 90) -> list[list[int]]:
    generator = np.random.default_rng(2)
    return [generator.integers(2, vocab, length).tolist() for length in lengths]


def ask(rows: list[list[int]], output: Any, **scalars: Any) -> Tensors:
    ids = np.full((len(rows), max(map(len, rows))), 3, np.uint32)
    for row, line in enumerate(rows):
        ids[row, : len(line)] = line
    types: dict[str, Any] = {"len_penalty": np.float32, "ia3_tasks": np.int32, "random_seed": np.uint64}
    tensors = {"input_ids": ids, "sequence_length": np.array([[len(line)] for line in rows], np.uint32)}
    if output is not None:
        tensors["max_output_len"] = np.broadcast_to(np.array(output, np.uint32).reshape(-1, 1), (len(rows), 1)).copy()
    for name, value in scalars.items():
        dtype = np.bool_ if name.startswith("is_") else types.get(name, np.uint32)
        tensors[name] = np.broadcast_to(np.array(value, dtype).reshape(-1, 1), (len(rows), 1)).copy()
    return tensors


def by_hugging_face(model: Any, line: list[int], count: int, **more: Any) -> Any:
    ids = torch.tensor([line])
    more = {
        "decoder_start_token_id": 0,
        "num_beams": 1,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
    } | more
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **more)


def cut(line: list[int], end_id: int) -> list[int]:
    return line[: line.index(end_id) + 1] if end_id in line else line
