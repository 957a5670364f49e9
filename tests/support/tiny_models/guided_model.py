"""A tiny random GPT-2 with a byte-level vocabulary of its own: what it says freely is noise in all 256 bytes."""

from __future__ import annotations

import json
import queue
from pathlib import Path
from typing import Any

import numpy as np

from backends.fastertransformer.engine.engine import Engine
from backends.fastertransformer.engine.rows.answer import Answer
from backends.fastertransformer.engine.settings import Settings
from support.engines.asking import Tensors, ask, generated
from support.shards.gpt2_checkpoint import random_gpt2, write_shards

_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_REST = [byte for byte in range(256) if byte not in _PRINTED]
LETTERS = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + place) for place, byte in enumerate(_REST)}
_LONGER = ['{"', '":', '": ', '", "', '"}', "true", "false", "null", '["', "],", ", ", "12", "-1", "0.", "00", "ab"]
_LONGER += [
    "  ",
    "\n  ",
    "é",
    "日本",
    " the",
    "e+",
    '\\"',
    "\\u00",
    "no",
    "yes",
    "maybe",
    "2026-",
    "]}",
    "}}",
    "a",
    "😀",
]
_BYTES = [bytes([byte]) for byte in range(256)]
TOKENS = [*_BYTES, *(text.encode() for text in _LONGER)]
END = len(TOKENS) + 2  # two tokens before it stand for nothing, as padding of a vocabulary does
DRAWN: dict[str, Any] = {"runtime_top_p": 1.0, "end_id": END}


def guided_gpt2(directory: Path, ranks: int = 1, positions: int = 640, **changes: Any) -> Settings:
    model = random_gpt2(vocab_size=END + 1, n_positions=positions, eos_token_id=END, initializer_range=0.1)
    shards = write_shards(model, directory, ranks)
    write_vocabulary(shards)
    return Settings(shards, ranks, 1, "fp32", cpu_threads=1, **changes)


def write_vocabulary(directory: Path) -> None:
    """Write the tokens of a model that follows grammars."""
    vocabulary = {"".join(LETTERS[byte] for byte in token): index for index, token in reversed(list(enumerate(TOKENS)))}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\n")


def guided(kinds: list[str], guides: list[str], count: int = 400, seed: int = 3, **scalars: Any) -> Tensors:
    """A request of one row for each guide."""
    seeds = [seed + row for row in range(len(kinds))]
    tensors = ask([[5, 6, 7]] * len(kinds), count, random_seed=seeds, **{**DRAWN, **scalars})
    for name, texts in (("guided_decoding_guide_type", kinds), ("guided_decoding_guide", guides)):
        tensors[name] = np.array([[text.encode()] for text in texts], object)
    return tensors


def texts(outputs: Tensors) -> list[bytes]:
    """What rows say, without the end token."""
    rows = [generated(outputs, row) for row in range(len(outputs["output_ids"]))]
    return [b"".join(TOKENS[token] for token in row if token != END) for row in rows]


def submit(engine: Engine, kind: str, text: str, count: int = 60, **more: Any) -> queue.SimpleQueue[Answer]:
    """Submit a request of one row, and give where its answer comes."""
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    engine.submit(engine.parse(guided([kind], [text], count)), answers.put, **more)
    return answers
