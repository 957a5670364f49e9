"""Llama out of FT shards to Hugging Face: tensors and configuration are those that transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models.llama_hub_models import save_llama

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert


def convert_to(source: Path, output: Path, **changes: object) -> Path:
    convert(ConvertArguments(source, output, **{"processes": 1, "weight_data_type": "bf16", **changes}))  # type: ignore[arg-type]
    return output


@pytest.mark.parametrize("name", ["llama", "llama 2 70B", "codellama"])
def test_shards_go_back_to_the_same_tensors_and_a_model_that_means_the_same(name: str, tmp_path: Path) -> None:
    import transformers

    save_llama(name, tmp_path / "source", dtype=torch.bfloat16)
    shards = convert_to(tmp_path / "source", tmp_path / "2-gpu", tensor_para_size=2)
    output = convert_to(shards, tmp_path / "hub", format="huggingface")
    wanted, made = (load_file(folder / "model.safetensors") for folder in (tmp_path / "source", output))
    assert made.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(wanted[key], made[key])] == []
    kinds = [json.loads((folder / "config.json").read_text())["model_type"] for folder in (tmp_path / "source", output)]
    assert kinds[0] == kinds[1]
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32, attn_implementation="eager")
        for f in (tmp_path / "source", output)
    ]
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(models[0](ids).logits, models[1](ids).logits)
