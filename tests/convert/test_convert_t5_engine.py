"""Converted T5s in the engine: the tokens that transformers generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.t5_adapters import base, huggingface_copy, multiplied, write_task
from support.engines.asking import CPU
from support.tiny_models.t5_models import ENCODER_IDS, huggingface_t5

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.settings import Settings
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

COUNT = 8
MODELS: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5_v1_1": {"is_untied": True, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": {"is_multilingual": True, "is_untied": True, "feed_forward_proj": "gated-gelu"},
    "ul2": {"is_untied": True, "feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
}


def converted(checkpoint: Path, output: Path) -> Engine:
    convert(ConvertArguments(checkpoint, output, 1, "fp32"))
    return open_engine(Settings(output, 1, 1, "fp32", cpu_threads=1, model_type="T5"), CPU)


def generated(engine: Engine, **more: Any) -> list[list[int]]:
    rows = len(ENCODER_IDS)
    tensors = {
        "input_ids": ENCODER_IDS.astype(np.uint32),
        "sequence_length": np.full((rows, 1), ENCODER_IDS.shape[1], np.uint32),
        "max_output_len": np.full((rows, 1), COUNT, np.uint32),
        **more,
    }
    outputs = engine.generate([engine.parse(tensors)])[0]
    lengths = outputs["sequence_length"][:, 0]
    return [outputs["output_ids"][row, 0, : lengths[row]].tolist() for row in range(rows)]


def by_transformers(model: Any, **ids: int) -> list[list[int]]:
    inputs = torch.from_numpy(ENCODER_IDS)
    # Its cache counts the encoder's layers, which are fewer here.
    how = {"do_sample": False, "num_beams": 1, "use_cache": False, "max_new_tokens": COUNT}
    with torch.no_grad():
        found = model.generate(inputs, attention_mask=torch.ones_like(inputs), **how, **ids)
    rows = [row.tolist()[1:] for row in found]
    end_id = ids.get("eos_token_id", model.config.eos_token_id)
    return [row[: row.index(end_id) + 1] if end_id in row else row for row in rows]


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_generates_what_transformers_generates(name: str, tmp_path: Path) -> None:
    model = huggingface_t5(**MODELS[name])
    model.save_pretrained(tmp_path / "hf")
    tokens = generated(converted(tmp_path / "hf", tmp_path / "out"))
    assert tokens == by_transformers(model)
    assert len({token for row in tokens for token in row}) > 3, "the model says something"


def test_the_engine_serves_each_task_with_its_vectors(tmp_path: Path) -> None:
    """BERT's ids, which the archive's vocabulary gives: start 2, end 3."""
    model = base(tmp_path / "both/t5.nemo")
    for task in ("boolq", "squad"):
        write_task(tmp_path / f"both/{task}.nemo", task, "middle")
    engine = converted(tmp_path / "both", tmp_path / "out")
    ids = {"decoder_start_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    assert generated(engine) == by_transformers(model, **ids)
    tasks = np.array([[0], [1]], np.int32)
    per_task = [by_transformers(multiplied(huggingface_copy(model), task), **ids) for task in ("boolq", "squad")]
    assert generated(engine, ia3_tasks=tasks) == [per_task[0][0], per_task[1][1]]
