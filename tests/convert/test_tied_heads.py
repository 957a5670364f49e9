"""A tensor that the configuration calls a copy: it goes where it is one, and is the head where it is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines.network_runs import open_network, prefill_logits
from support.tiny_models.huggingface_models import filling, logits, save
from support.tiny_models.llama_hub_models import save_llama
from support.tiny_models.t5_models import huggingface_t5

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from handover.errors import CheckpointError
from models.decoder import Decoder

IDS = torch.arange(3, 19)[None]
MODELS: dict[str, tuple[Any, str, str, str]] = {
    "llama": (save_llama, "model.embed_tokens", "lm_head", "Llama"),
    "qwen2": (save_llama, "model.embed_tokens", "lm_head", "Llama"),
    "gemma2": (save_llama, "model.embed_tokens", "lm_head", "Llama"),
    "gpt2": (save, "transformer.wte", "lm_head", "GPT"),
    "bloom": (save, "transformer.word_embeddings", "lm_head", "GPT"),
    "opt": (save, "model.decoder.embed_tokens", "lm_head", "GPT"),
    "xglm": (save, "model.embed_tokens", "lm_head", "GPT"),
    "gptj": (save, "transformer.wte", "lm_head", "GPT-J"),
    "gpt_neox": (save, "gpt_neox.embed_in", "embed_out", "GPT-NeoX"),
}
"""How each is saved, its embedding and its head, and the engine's type of model."""


def with_head(name: str, path: Path, change: float, **changes: Any) -> Path:
    """A tied model whose file holds the head too: the embedding, with something added."""
    make, embedding, head, _ = MODELS[name]
    make(name, path, tie_word_embeddings=True, **changes)
    tensors = load_file(path / "model.safetensors")
    copy = tensors[f"{embedding}.weight"].clone()
    tensors[f"{head}.weight"] = copy + change * torch.from_numpy(filling("head", tuple(copy.shape)))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def shards(source: Path, output: Path, **changes: Any) -> Path:
    convert(ConvertArguments(source, output, weight_data_type="fp32", processes=1, **changes))
    return output


def transformers_logits(path: Path) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return logits(model.eval(), IDS.numpy())


@pytest.mark.parametrize("name", MODELS)
def test_a_head_that_differs_is_the_head_as_in_transformers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = with_head(name, tmp_path / "hf", 1.0)
    has_shards = name not in ("qwen2", "gemma2")
    served = shards(source, tmp_path / "1-gpu", format="fastertransformer" if has_shards else "huggingface")
    made = prefill_logits(open_network(served, 1, MODELS[name][3]), IDS)
    wanted = transformers_logits(source)
    assert np.abs(made[..., : wanted.shape[-1]].numpy() - wanted).max() < 2e-4
    assert "differs from" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_head_that_is_the_copy_goes_without_a_word(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = with_head(name, tmp_path / "twice", 0.0)
    MODELS[name][0](name, tmp_path / "once", tie_word_embeddings=True)
    twice, once = (shards(path, tmp_path / f"{path.name}/1-gpu") for path in (source, tmp_path / "once"))
    assert "differs" not in capsys.readouterr().err
    assert sorted(path.name for path in twice.iterdir()) == sorted(path.name for path in once.iterdir())
    assert all((once / path.name).read_bytes() == path.read_bytes() for path in twice.glob("*.bin"))


def test_a_directory_of_hugging_face_keeps_the_head_and_says_that_it_is_not_tied(tmp_path: Path) -> None:
    source, out = with_head("llama", tmp_path / "hf", 1.0), tmp_path / "out"
    convert(ConvertArguments(source, out, weight_data_type="fp32", processes=1, format="huggingface"))
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert np.abs(transformers_logits(out) - transformers_logits(source)).max() == 0


def test_the_narrow_head_of_opt_350m_is_compared_too(tmp_path: Path) -> None:
    source = with_head("opt", tmp_path / "hf", 1.0, word_embed_proj_dim=16, do_layer_norm_before=False)
    made = prefill_logits(open_network(shards(source, tmp_path / "1-gpu"), 1, "GPT"), IDS)
    assert np.abs(made.numpy() - transformers_logits(source)).max() < 2e-4


def test_the_same_numbers_in_another_type_are_a_copy(tmp_path: Path) -> None:
    source = with_head("llama", tmp_path / "hf", 0.0)
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].float()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    dims = inspect_source(source, 1, "fp32").dims
    assert isinstance(dims, Decoder) and dims.has_tied_head


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_t5_whose_embeddings_differ_is_refused(side: str, tmp_path: Path) -> None:
    huggingface_t5().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{side}.embed_tokens.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{side}.embed_tokens.weight differs from shared.weight"):
        inspect_source(tmp_path, 1, "fp32")
