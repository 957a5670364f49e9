"""Conversion to Hugging Face: the bytes that transformers saved come back, and transformers computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.huggingface_models import logits, save

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

INPUT_IDS = np.array([[11, 3, 95, 0, 42, 17, 17, 8], [1, 2, 3, 90, 60, 30, 20, 5]])
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2_untied": ("gpt2", {"tie_word_embeddings": False}),
    "opt": ("opt", {}),
    "opt_post_norm": ("opt", {"do_layer_norm_before": False}),
    "bloom": ("bloom", {}),
    "xglm": ("xglm", {}),
    "gptj": ("gptj", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox_serial": ("gpt_neox", {"use_parallel_residual": False}),
}
# Through FasterTransformer's shards these come back as another architecture, or with other numbers of equal effect.
OTHERWISE = {
    "xglm": "GPT2LMHeadModel",
    "gpt_bigcode": "GPT2LMHeadModel",
}


def to_huggingface(source: Path, output: Path, data_type: str = "fp32", **more: Any) -> Path:
    convert(ConvertArguments(source, output, 1, data_type, format="huggingface", **more))
    return output


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def loaded(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory).eval()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("data_type", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_model_of_transformers_comes_back_byte_for_byte(
    name: str, data_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    family, changes = MODELS[name]
    model = save(family, tmp_path / "source", dtype=dtype, **changes)
    output = to_huggingface(tmp_path / "source", tmp_path / "hf", data_type)
    given, made = tensors(tmp_path / "source"), tensors(output)
    assert made.keys() == given.keys()
    assert all(torch.equal(made[key], given[key]) and made[key].dtype == dtype for key in given)
    assert json.loads((output / "config.json").read_text())["architectures"] == [type(model).__name__]
    assert np.array_equal(logits(loaded(output), INPUT_IDS), logits(loaded(tmp_path / "source"), INPUT_IDS))


@pytest.mark.parametrize("name", MODELS)
def test_shards_of_two_ranks_become_what_transformers_saved(name: str, tmp_path: Path) -> None:
    """The tables of targets are held against transformers here: no source of Hugging Face goes through them."""
    family, changes = MODELS[name]
    model = save(family, tmp_path / "source", **changes)
    convert(ConvertArguments(tmp_path / "source", tmp_path / "2-gpu", 2, "fp32"))
    output = to_huggingface(tmp_path / "2-gpu", tmp_path / "hf")
    again = loaded(output)
    assert np.abs(logits(again, INPUT_IDS) - logits(model, INPUT_IDS)).max() < 1e-5
    assert type(again).__name__ == OTHERWISE.get(name, type(model).__name__)
    if name in OTHERWISE:
        return
    given, made = tensors(tmp_path / "source"), tensors(output)
    assert made.keys() == given.keys()
    differing = {key for key in given if not torch.equal(made[key], given[key])}
    assert {key for key in differing if not key.endswith(unlike(name))} == set()


def unlike(name: str) -> tuple[str, ...]:
    """Ends of the names of tensors that shards do not hold as they were."""
    if name == "gpt_neox":  # the two biases are one sum
        return ("attention.dense.bias", "mlp.dense_4h_to_h.bias")
    return ("embed_positions.weight",) if name.startswith("opt") else ()  # two rows that no position uses


def test_a_directory_that_was_written_is_a_source_again(tmp_path: Path) -> None:
    save("gptj", tmp_path / "source")
    output = to_huggingface(tmp_path / "source", tmp_path / "hf")
    for source in (tmp_path / "source", output):
        convert(ConvertArguments(source, tmp_path / f"of_{source.name}", 2, "fp16"))
    shards = {path.name: path.read_bytes() for path in (tmp_path / "of_source").glob("*.bin")}
    assert shards
    assert shards == {path.name: path.read_bytes() for path in (tmp_path / "of_hf").glob("*.bin")}


def test_files_of_a_limited_size_have_an_index(tmp_path: Path) -> None:
    model = save("gpt2", tmp_path / "source")
    output = to_huggingface(tmp_path / "source", tmp_path / "hf", largest_file_bytes=30_000)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in output.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    for name in files:
        held = load_file(output / name)
        assert set(held) == {key for key, where in index["weight_map"].items() if where == name}
        assert sum(tensor.nbytes for tensor in held.values()) <= 30_000
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors(output).values())
    assert np.array_equal(logits(loaded(output), INPUT_IDS), logits(model, INPUT_IDS))
