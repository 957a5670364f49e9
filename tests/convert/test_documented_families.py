"""Every family that is read has targets, tests of the way back, and its place in docs/sources.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_models.llama_models import MODELS, save, tensors

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.huggingface.decoder import ARCHITECTURES
from export_scripts.convert import convert
from export_scripts.targets.huggingface import TARGETS
from ft_format.families import FAMILIES

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/sources.md").read_text()
# transformers' model_type -> the document's word for it.
WORDS = {
    "gpt2": "GPT-2",
    "opt": "OPT",
    "bloom": "BLOOM",
    "xglm": "XGLM",
    "gptj": "GPT-J",
    "gpt_neox": "GPT-NeoX",
    "gpt_bigcode": "GPT-BigCode",
    "t5": "T5",
    "llama": "Llama",
    "mistral": "Mistral",
    "nemotron": "Nemotron",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "olmo2": "OLMo 2",
    "granite": "Granite 3",
    "smollm3": "SmolLM3",
    "phi3": "Phi-3",
    "exaone4": "EXAONE 4",
    "starcoder2": "StarCoder2",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "olmoe": "OLMoE",
    "minimax_m2": "MiniMax M2",
    "glm4_moe": "GLM 4.5",
    "ernie4_5_moe": "Ernie 4.5 with experts",
    "exaone_moe": "EXAONE with experts",
    "gpt_oss": "GPT-OSS",
    "deepseek_v2": "DeepSeek V2",
    "deepseek_v3": "Moonlight, Kimi K2",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "qwen3_next": "Qwen3-Next",
    **{"qwen3_5_text": "Qwen3.5", "qwen3_5_moe_text": "qwen3_5_moe_text"},
    "llama4_text": "Llama 4",
    "nemotron_h": "Nemotron-H",
    "falcon_h1": "Falcon-H1",
}


def test_every_family_has_a_target() -> None:
    assert {family.name for family in FAMILIES} == set(TARGETS)


def test_the_document_names_every_architecture_among_the_sources_and_among_the_targets() -> None:
    read = {each.model_type for each in ARCHITECTURES} | {"t5"}
    written = {target.model_type for targets in TARGETS.values() for target in targets}
    assert read == set(WORDS)
    assert written <= read
    sources, targets = DOCUMENT.split("## To Hugging Face")
    llamas = sources.split("## Llama and its relatives")[1]
    for model_type in read:
        assert WORDS[model_type] in sources
        is_llama = model_type in {target.model_type for target in TARGETS["llama"]}
        assert WORDS[model_type] in (llamas if is_llama else targets), model_type


@pytest.mark.parametrize("name", MODELS)
def test_a_llama_like_directory_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    """The old families do in test_huggingface_target.py."""
    save(name, tmp_path / "source", torch.bfloat16)
    convert(ConvertArguments(tmp_path / "source", tmp_path / "out", weight_data_type="bf16", format="huggingface"))
    wanted, made = tensors(tmp_path / "source"), tensors(tmp_path / "out")
    assert sorted(made) == sorted(wanted)
    assert [key for key in wanted if not torch.equal(made[key], wanted[key])] == []
