"""Every form of NeMo and Megatron-LM as a directory of Hugging Face: bytes and logits of the original model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.checkpoints.llama_configs import megatron_lm, padded_vocabulary
from support.checkpoints.llama_files import write_megatron_lm
from support.checkpoints.llama_sources import Case, write_source
from support.checkpoints.llama_state import core_state
from support.tiny_models.llama_models import VOCAB, Saved, logits, save, tensors
from support.tiny_models.same_model import assert_same_model

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

FP32, BF16 = torch.float32, torch.bfloat16
CASES = [
    Case("llama_mha", "legacy", 1, 1, BF16),
    Case("llama_mha", "legacy", 2, 2),
    Case("llama_mha", "legacy, two matrices", 4, 1),
    Case("llama_mha", "legacy, two matrices", 1, 2, BF16),
    Case("llama", "core", 4, 1, BF16),
    Case("llama", "core, local", 2, 1),
    Case("llama_linear", "core", 2, 2),
    Case("llama31", "core", 1, 2, BF16),
    Case("llama32", "core", 2, 2),
    Case("mistral", "core", 4, 1, BF16),
    Case("nemotron", "core", 2, 2),
    Case("qwen2", "core", 4, 2, BF16),
    Case("gemma", "core", 2, 1, BF16),
    Case("gemma2", "core", 4, 1),
    Case("mixtral", "core", 2, 2, BF16),
    Case("starcoder2", "core", 2, 1),
    Case("llama", "zarr", 4, 1, BF16),
    Case("nemotron", "zarr", 1, 1),
    Case("gemma", "zarr", 2, 1),
    Case("mixtral", "zarr", 2, 1),
    Case("qwen2", "torch_dist", 2, 1),
    Case("mistral", "torch_dist", 1, 1),
    Case("llama", "NeMo 2", 1),
    Case("llama31", "NeMo 2, gate and up apart", 4, 1, BF16),
    Case("llama32", "NeMo 2, layers apart", 2),
    Case("mistral", "NeMo 2, layers apart, gate and up apart", 2, 1, BF16),
    Case("nemotron", "NeMo 2", 4, 1, BF16),
    Case("qwen2", "NeMo 2", 1, 1, BF16),
    Case("qwen3", "NeMo 2", 4),
    Case("qwen3", "NeMo 2, layers apart", 1, 1, BF16),
    Case("gemma", "NeMo 2", 4, 1, BF16),
    Case("gemma2", "NeMo 2, gate and up apart", 2, 1, BF16),
    Case("mixtral", "NeMo 2", 4),
    Case("mixtral", "NeMo 2, layers apart, gate and up apart", 1, 1, BF16),
    Case("qwen3_moe", "Megatron-LM", 2, 1),
    Case("qwen3_moe", "Megatron-LM, torch_dist, layers apart", 2, 1, BF16),
    Case("qwen3_moe", "Megatron-LM, torch_dist, layers apart", 2, 1),
    Case("qwen3_moe", "NeMo 2, layers apart, gate and up apart", 2),
    Case("qwen3_moe", "Bridge, layers apart", 1, 1, BF16),
    Case("qwen3_moe_alike", "Megatron-LM, torch_dist", 2, 1, BF16),
    Case("qwen3_moe_alike", "NeMo 2", 4),
    Case("qwen3_moe_alike", "Bridge", 2),
    Case("olmoe", "Bridge", 1, 1, BF16),
    Case("olmoe", "Bridge, layers apart, gate and up apart"),
    Case("olmoe", "Megatron-LM"),
    Case("minimax_m2", "Bridge", 2),
    Case("minimax_m2", "Bridge, layers apart, gate and up apart", 4, 1, BF16),
    Case("glm4_moe", "Bridge, layers apart", 2),
    Case("glm4_moe", "Megatron-LM", 2, 1, BF16),
    Case("glm4_moe_air", "Bridge, layers apart, gate and up apart", 1),
    Case("ernie4_5_moe", "Bridge, layers apart", 2, 1, BF16),
    Case("ernie4_5_moe", "Megatron-LM", 2),
    Case("exaone_moe", "Bridge, layers apart", 2, 1, BF16),
    Case("gpt_oss", "Megatron-LM", 2, 2),
    Case("gpt_oss", "Megatron-LM, torch_dist", 2, 1, BF16),
    Case("gpt_oss", "Megatron-LM, torch_dist, layers apart", 1, 1),
    Case("gpt_oss", "Megatron-LM, torch_dist, gate and up apart", 2, 1),
    Case("olmo2", "Bridge", 1, 1, BF16),
    Case("olmo2", "Megatron-LM, torch_dist", 2),
    Case("olmo2", "Megatron-LM", 2),
    Case("llama4_scout", "Bridge", 2),
    Case("llama4_scout", "Bridge, layers apart, gate and up apart", 1, 1, BF16),
    Case("llama4_plain", "Megatron-LM, torch_dist, layers apart", 2, 1, BF16),
    Case("llama4_plain", "Megatron-LM", 2, 2),
    Case("starcoder2", "NeMo 2", 4, 1, BF16),
    Case("deepseek_v3", "NeMo 2, layers apart", 2),
    Case("deepseek_v3", "NeMo 2, layers apart, gate and up apart", 1, 1, BF16),
    Case("deepseek_v3", "Megatron-LM", 2, 3),
    Case("moonlight", "Megatron-LM, torch_dist, layers apart", 2, 1, BF16),
    Case("deepseek_v2", "Megatron-LM, torch_dist, layers apart", 2),
    Case("deepseek_v2", "NeMo 2, layers apart", 1, 1, BF16),
    Case("llama_mha", "Megatron-LM, legacy", 2, 2, BF16),
    Case("llama", "Megatron-LM", 2, 2),
    Case("nemotron", "Megatron-LM", 4),
    Case("mixtral", "Megatron-LM", 2, 1, BF16),
    Case("llama31", "Megatron-LM, torch_dist", 4, 1, BF16),
    Case("qwen2", "Megatron-LM, torch_dist", 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_model_comes_out(case: Case, tmp_path: Path) -> None:
    path = write_source(case, tmp_path / "source")
    data_type = "fp32" if case.dtype == FP32 else "bf16"
    convert(ConvertArguments(path, tmp_path / "out", weight_data_type=data_type, format="huggingface"))
    assert_same_model(tmp_path / "out", case.source)


@pytest.mark.parametrize(("form", "ranks"), [("NeMo 2", 2), ("Bridge", 1)])
def test_phi_3_becomes_llama_which_computes_the_same(form: str, ranks: int, tmp_path: Path) -> None:
    """megatron-core has none of Phi-3's longer rotations, and query, key and value in one tensor of its own."""
    from transformers import AutoModelForCausalLM

    case = Case("phi3_plain", form, ranks)
    path = write_source(case, tmp_path / "source")
    convert(ConvertArguments(path, tmp_path / "out", weight_data_type="fp32", format="huggingface"))
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM" and not any(loading.values())
    model.set_attn_implementation("eager")
    assert abs(logits(model.eval()) - case.source.logits).max() < 1e-5


@pytest.mark.parametrize(("name", "grid"), [("llama", (2, 2)), ("qwen3_moe", (1, 2))])
def test_interleaved_pipeline_stages(name: str, grid: tuple[int, int], tmp_path: Path) -> None:
    """A file has two parts of the model: those of all ranks' first parts come before those of the second ones."""
    model = save(name, tmp_path / "hub", num_hidden_layers=4)
    source = Saved(model.config, tensors(tmp_path / "hub"), logits(model))
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, grid[0]))
    path = write_megatron_lm(tmp_path / "run", megatron_lm(source.config, grid), state, grid, parts=2)
    convert(ConvertArguments(path, tmp_path / "out", weight_data_type="fp32", format="huggingface"))
    assert_same_model(tmp_path / "out", source)


@pytest.mark.parametrize("form", ["core", "Megatron-LM"])
def test_the_tokenizer_has_as_many_tokens_as_the_model_rows(form: str, tmp_path: Path) -> None:
    """The model's SentencePiece file has no padding token: with ``sentencepiece_legacy: False`` NeMo adds none."""
    from transformers import AutoTokenizer

    path = write_source(Case("llama", form, 4), tmp_path / "source")
    convert(ConvertArguments(path, tmp_path / "out", weight_data_type="fp32", format="huggingface"))
    about = json.loads((tmp_path / "out/config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == about["vocab_size"] == VOCAB
    assert (about["bos_token_id"], about["eos_token_id"], about.get("pad_token_id")) == (1, 2, None)
    assert tokenizer.decode(tokenizer("abcdefgh")["input_ids"], skip_special_tokens=True).strip() == "abcdefgh"
