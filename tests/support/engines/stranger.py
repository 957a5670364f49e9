"""A Hugging Face checkpoint made into shards and asked by the engine, in this process."""

from __future__ import annotations

import configparser
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.settings import Settings
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

MODEL_TYPES = {"gpt": "GPT", "gptj": "GPT-J", "gptneox": "GPT-NeoX", "encoder": "T5"}


def change_json(file: Path, **changes: Any) -> None:
    """Change keys of a JSON object, or begin one; ... removes a key."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({key: v for key, v in {**content, **changes}.items() if v is not ...}))


def section(root: Path) -> dict[str, str]:
    """The section of ``config.ini`` that names the ids."""
    parser = configparser.ConfigParser()
    parser.read(root / "config.ini")
    return dict(parser[parser.sections()[-1]])


@contextmanager
def engine_of(source: Path, output: Path, ranks: int = 1, **arguments: Any) -> Iterator[Engine]:
    """Convert in fp32 and open what came of it."""
    root = output / f"{ranks}-gpu"
    convert(ConvertArguments(source, root, ranks, "fp32", processes=1, **arguments))
    settings = Settings(
        root, ranks, 1, "fp32", cpu_threads=1, kv_cache_bytes=1 << 20, model_type=MODEL_TYPES[family_of(root)]
    )
    engine = open_engine(settings, torch.device("cpu"))
    try:
        yield engine
    finally:
        engine.close()


def family_of(root: Path) -> str:
    """FasterTransformer's family of shards; of a T5 encoder, the first section of its ``config.ini``."""
    parser = configparser.ConfigParser()
    parser.read(root / "config.ini")
    return parser.sections()[0]


def ask(engine: Engine, prompt: list[int], count: int, **more: Any) -> dict[str, np.ndarray]:
    """Continue one prompt greedily."""
    request = {
        "input_ids": np.array([prompt], np.uint32),
        "input_lengths": np.array([[len(prompt)]], np.uint32),
        "request_output_len": np.array([[count]], np.uint32),
        "runtime_top_k": np.array([[1]], np.uint32),
        **more,
    }
    outputs: dict[str, np.ndarray] = engine.generate([engine.parse(request)])[0]
    return outputs


def continuation(engine: Engine, prompt: list[int], count: int, **more: Any) -> list[int]:
    """What follows a prompt, the end token included."""
    outputs = ask(engine, prompt, count, **more)
    return list(outputs["output_ids"][0, 0, len(prompt) : int(outputs["sequence_length"][0, 0])].tolist())


def log_probs(engine: Engine, prompt: list[int]) -> np.ndarray:
    """Log probability of each token of a prompt but the first."""
    asked = {name: np.array([[True]]) for name in ("is_return_log_probs", "is_return_context_log_probs")}
    result: np.ndarray = ask(engine, prompt, 1, **asked)["context_log_probs"][0, 1 : len(prompt)]
    return result


def log_probs_of(model: Any, prompt: list[int]) -> np.ndarray:
    """The same by transformers."""
    with torch.no_grad():
        rows = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return np.array([rows[place, token] for place, token in enumerate(prompt[1:])])
