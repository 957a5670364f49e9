"""Converted Hugging Face models through the drop-in engine, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models.huggingface_models import greedy, save

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.settings import Settings
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

PROMPTS = [[11, 3, 95, 0, 42, 17], [1, 2, 30]]
COUNT = 5
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "untied gpt2": ("gpt2", {"tie_word_embeddings": False}),
    "opt": ("opt", {}),
    "opt, norm behind each block": ("opt", {"do_layer_norm_before": False}),
    "bloom": ("bloom", {}),
    "xglm": ("xglm", {}),
    "gptj": ("gptj", {}),
    "gpt_neox": ("gpt_neox", {}),
    "OPT-350m": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "serial gpt_neox": ("gpt_neox", {"use_parallel_residual": False}),
}
MODEL_TYPES = {"gptj": "GPT-J", "gpt_neox": "GPT-NeoX"}


def column(values: list[int] | int, dtype: Any) -> np.ndarray:
    return np.broadcast_to(np.asarray(values, dtype).reshape(-1, 1), (len(PROMPTS), 1)).copy()


# Two ranks need what one needs, and the sums as well.
@pytest.mark.in_ci(when=lambda at: at.ranks == 2 or at.name == "gpt2")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_engine_continues_as_transformers_does(name: str, ranks: int, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    model = save(family, tmp_path / "source", **changes)
    root = tmp_path / f"{ranks}-gpu"
    convert(ConvertArguments(tmp_path / "source", root, ranks, "fp32", processes=1))
    engine = open_engine(
        Settings(
            root, ranks, 1, "fp32", cpu_threads=1, kv_cache_bytes=1 << 20, model_type=MODEL_TYPES.get(family, "GPT")
        ),
        torch.device("cpu"),
    )
    ids = np.full((len(PROMPTS), max(map(len, PROMPTS))), 11, np.uint32)
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)] = prompt
    request = {
        "input_ids": ids,
        "input_lengths": column([len(prompt) for prompt in PROMPTS], np.uint32),
        "request_output_len": column(COUNT, np.uint32),
        "runtime_top_p": column(0, np.float32) + np.float32(1e-7),
        "is_return_log_probs": column(1, np.bool_),
    }
    outputs = engine.generate([engine.parse(request)])[0]
    engine.close()
    for row, prompt in enumerate(PROMPTS):
        expected, log_probs = greedy(model, prompt, COUNT)
        ended = expected.index(7) + 1 if 7 in expected else COUNT  # the end token of the model
        made = outputs["output_ids"][row, 0, len(prompt) : len(prompt) + ended].tolist()
        assert made == expected[:ended]
        assert np.abs(outputs["output_log_probs"][row, 0, :ended] - log_probs[:ended]).max() < 1e-3
