"""A model's size from its configuration alone, against transformers' own count of parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.checkpoints.llama_configs import nemo1, nemo2
from support.tiny_models.huggingface_models import save
from support.tiny_models.llama_models import saved

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.description import read_description
from export_scripts.conversion.plan.random_weights import plan_random
from export_scripts.conversion.plan.sizing import measure
from export_scripts.convert import convert
from export_scripts.targets.huggingface.sizing import measure_huggingface
from handover.errors import CheckpointError

LLAMA_405B = {
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
IN_NEMOS_WORDS = {
    "num_layers": 126,
    "hidden_size": 16384,
    "ffn_hidden_size": 53248,
    "num_attention_heads": 128,
    "num_query_groups": 8,
    "kv_channels": 128,
}


def parameters(config: dict[str, Any]) -> int:
    """transformers' count, of a model without memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return int(LlamaForCausalLM(LlamaConfig(**config)).num_parameters())


def described(form: str, folder: Path, name: str = "llama31") -> Path:
    """Llama 3.1 405B as each kind of file says it; as ``llama``, without the scaling of its rotation."""
    source = saved(name).config
    if form == "huggingface":
        content = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **LLAMA_405B}
        (folder / "config.json").write_text(json.dumps(content))
        return folder / "config.json"
    if form == "nemo1":
        content = {**nemo1(source, (8, 16)), **IN_NEMOS_WORDS, "vocab_size": 128256, "rotary_base": 500000.0}
        content |= {"megatron_amp_O2": True, "precision": "bf16"}
    else:
        model = nemo2(source, name)
        model["config"] |= {**IN_NEMOS_WORDS, "vocab_size": 128256}
        model["config"]["params_dtype"] = {"_target_": "torch.bfloat16", "_call_": False}
        content = model if form == "nemo2" else {"model": model["config"], "tokenizer": None}
    (folder / f"{form}.yaml").write_text(yaml.safe_dump(content))
    return folder / f"{form}.yaml"


@pytest.mark.parametrize("form", ["huggingface", "nemo1", "nemo2", "megatron_bridge"])
def test_a_405b_from_its_configuration_alone(form: str, tmp_path: Path) -> None:
    count = parameters(LLAMA_405B)
    assert count == 405_853_388_800, "what Meta calls 405B"
    sizing = measure(described(form, tmp_path, "llama"), 8, "bf16", 16)
    assert (sizing.parameter_count, sizing.written_bytes, sizing.read_bytes) == (count, 2 * count, 2 * count)
    assert sizing.files_read == (8 * 16 if form == "nemo1" else 1)
    # Per layer two norms, and five matrices of 8 ranks; three files outside of the layers; config.ini and others.
    assert sizing.files_written - 126 * (2 + 5 * 8) - 3 in range(1, 8)
    assert sizing.memory_bytes < 1 << 30
    said = "\n".join(sizing.lines())
    assert "405.9 billion" in said and "memory" in said and "time" in said


def test_what_fastertransformer_does_not_compute_has_no_size_of_shards(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layers.rotary = (.|\n)*format=huggingface"):
        measure(described("nemo2", tmp_path), 8, "bf16", 16)


@pytest.mark.parametrize("form", ["huggingface", "nemo1", "nemo2", "megatron_bridge"])
def test_a_405b_for_hugging_face_from_its_configuration_alone(form: str, tmp_path: Path) -> None:
    count = parameters(LLAMA_405B)
    sizing = measure_huggingface(described(form, tmp_path), "bf16", 16)
    assert (sizing.parameter_count, sizing.written_bytes, sizing.read_bytes) == (count, 2 * count, 2 * count)
    # The largest matrix has 1.7 GB, so that a file of at most 5 GB may be left with a third of its room unused.
    assert 2 * count / 5e9 <= sizing.files_written - 6 <= 2 * count / 3.3e9
    assert sizing.largest == ("model.embed_tokens.weight", 2 * 128256 * 16384)
    # What Hugging Face's own directory holds is copied, the rest may be rearranged.
    assert sizing.memory_bytes < (200 << 20 if form == "huggingface" else 1 << 30)
    said = "\n".join(sizing.lines())
    assert "405.9 billion" in said and "memory" in said and "time" in said


def test_a_tied_head_is_neither_counted_nor_written(tmp_path: Path) -> None:
    config = {**LLAMA_405B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    config |= {"num_attention_heads": 32, "tie_word_embeddings": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config}))
    count = parameters(config)
    assert count == 1_235_814_400, "Llama 3.2 1B"
    sizing = measure_huggingface(path, "bf16", 2)
    assert (sizing.parameter_count, sizing.written_bytes, sizing.read_bytes) == (count, 2 * count, 4 * count)
    assert sizing.files_written == 1 + 5
    assert measure(path, 1, "bf16", 2).parameter_count > count, "shards hold the head as well"


@pytest.mark.parametrize("data_type", ["fp32", "bf16"])
def test_what_is_said_of_a_checkpoint_is_what_its_conversion_writes(data_type: str, tmp_path: Path) -> None:
    save("gpt2", tmp_path / "source")
    sizing = measure_huggingface(tmp_path / "source", data_type, 1)
    manifest = convert(ConvertArguments(tmp_path / "source", tmp_path / "out", 1, data_type, format="huggingface"))
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert sizing.parameter_count == sum(tensor.numel() for tensor in tensors.values())
    is_copied = data_type == "fp32"
    source, made = (tmp_path / name / "model.safetensors" for name in ("source", "out"))
    assert source.samefile(made) == is_copied, "what is as it shall be is linked"
    assert sizing.written_bytes == (0 if is_copied else sum(tensor.nbytes for tensor in tensors.values()))
    assert sizing.files_written == len(manifest.files) + 1
    assert (sizing.memory_bytes < 70e6) == is_copied


def test_ranks_that_do_not_divide_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor_para_size 12"):
        measure(described("huggingface", tmp_path), 12, "bf16", 16)


def test_no_random_weights_of_what_is_not_served(tmp_path: Path) -> None:
    path = described("nemo1", tmp_path)
    assert read_description(path).family.name == "llama"
    with pytest.raises(CheckpointError, match="describes a model of the family llama"):
        plan_random(path, 1, "fp16")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", '{"model_type": "falcon"}', "model_type 'falcon' has no table here"),
        ("config.json", "[]", "not a mapping"),
        ("m.yaml", "num_layers: 2\nhidden_size: 8\nnum_attention_heads: 2\n", "does not say vocab_size"),
        ("m.yaml", "model: 3\nconfig: 4\n", "num_layers|vocab_size|hidden_size"),
    ],
)
def test_what_describes_no_model_is_refused(name: str, content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=words):
        read_description(tmp_path / name)
