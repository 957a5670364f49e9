"""Texts by our engine in this process, with Hugging Face's tokenizer on both sides of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import GPT2Tokenizer

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.settings import Settings


def generated_texts(shards: Path, prompts: Sequence[str], output_len: int) -> list[str]:
    """Each prompt and its completion."""
    tokenizer = GPT2Tokenizer(str(shards / "vocab.json"), str(shards / "merges.txt"))
    engine = open_engine(Settings(shards, 1, 1, "fp32"))
    texts = []
    for prompt in prompts:
        row = generated_ids(engine, tokenizer.encode(prompt), output_len)
        texts.append(tokenizer.decode(row, clean_up_tokenization_spaces=False).removesuffix("<|endoftext|>"))
    return texts


def generated_ids(engine: Engine, ids: list[int], output_len: int) -> list[int]:
    """A prompt and its completion."""
    tensors = {
        "input_ids": np.array([ids], np.uint32),
        "input_lengths": np.array([[len(ids)]], np.uint32),
        "request_output_len": np.array([[output_len]], np.uint32),
    }
    (answer,) = engine.generate([engine.parse(tensors)])
    row: list[int] = answer["output_ids"][0, 0, : int(answer["sequence_length"][0, 0])].tolist()
    return row
