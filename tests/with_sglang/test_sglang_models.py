"""Converted directories in SGLang itself, on a CPU: its own model classes load every parameter, and compute the source.

SGLang runs with torch's operators: its kernels are for GPUs, and for processors with AMX. A prompt's first tokens are
read at once and the others decoded one by one, so that its cache counts too. What stands in the place of the kernels
for quantized weights, behind its loader, is in ``plain_weights``.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints.hybrid_models import hybrid, write_bridge
from support.checkpoints.llama_files import write_huggingface_tokenizer
from support.checkpoints.llama_sources import Case, write_source
from support.tiny_models import llama_models
from support.tiny_models.dequantized import E2M1, dequantized, tensors
from support.tiny_models.llama_models import input_ids, save

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

HERE = Path(__file__).resolve().parent
AT_ONCE = 7
HUB = "Hugging Face"
COMPUTED = [
    Case("llama", "Bridge", 2),
    Case("llama31", "Megatron-LM, torch_dist", 4),
    Case("llama_yarn", HUB),
    Case("qwen2", "NeMo 2"),
    Case("qwen3", "NeMo 2, layers apart", 1),
    Case("qwen3_moe_alike", "Bridge", 2),
    Case("mixtral", "core", 2, 2),
    Case("glm4_moe", "Bridge, layers apart", 2),
    Case("ernie4_5_moe", "Megatron-LM", 2),
    Case("olmo2", "Bridge"),
    Case("granite", HUB),
    Case("gemma3", HUB),
]
LOADED = [
    Case("deepseek_v2", "Megatron-LM, torch_dist, layers apart", 2),
    Case("deepseek_v3", "NeMo 2, layers apart", 2),
    Case("glm4_moe_lite", HUB),
    Case("gpt_oss", "Megatron-LM", 2, 2),
    Case("minimax_m2", "Bridge", 2),
]
"""What SGLang computes by kernels alone: latent attention, sinks, norms over the heads of all ranks."""


@dataclass(frozen=True)
class Written:
    """A directory that is made from one of the hub, or of Megatron-Bridge.

    Attributes:
        name: of llama_models.MODELS.
        quantization: of its weights; empty: they are fp32.
        changes: of the model's sizes.
        is_trained: it comes from a checkpoint of Megatron-Bridge.
    """

    name: str
    quantization: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    is_trained: bool = False

    def __str__(self) -> str:
        return f"{self.name}{' of Bridge' if self.is_trained else ''} {self.quantization}".strip()


WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 32}  # of 128, which share a scale
MIXED = {**WIDE, "moe_intermediate_size": 128}
QUANTIZED = [
    *(Written("qwen3", name, WIDE) for name in ("fp8", "fp8_block", "int4")),
    *(Written("qwen3_moe_alike", name, MIXED) for name in ("fp8", "fp8_block", "int4")),
]
WITHOUT_LOGITS = [
    Written("gpt_oss", "mxfp4"),
    *(Written(name, is_trained=is_trained) for name in ("nemotron_h", "nemotron3") for is_trained in (False, True)),
    Written("qwen3_next", changes={"mlp_only_layers": []}),
]
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONPATH": str(HERE / "no_kernels"),
    "TORCHDYNAMO_DISABLE": "1",  # it compiles small functions by g++, a minute each
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
TRITON = ("gpt_oss", "exaone")
"""Families for which SGLang refuses torch's attention before it loads."""


def write(case: Case, folder: Path) -> Path:
    """Convert one model into a directory."""
    source = folder / "source"
    if case.form == HUB:
        save(case.name, source)
    else:
        source = write_source(case, source)
    convert(ConvertArguments(source, folder / "hf", weight_data_type="fp32", format="huggingface"))
    if not (folder / "hf" / "tokenizer_config.json").exists():
        write_huggingface_tokenizer(folder / "hf")
    return folder / "hf"


def write_directory(each: Written, folder: Path) -> Path:
    """Convert a model, quantized where that is asked for."""
    kind = torch.bfloat16 if each.quantization else torch.float32
    if each.is_trained:
        write_bridge(folder / "source", hybrid(each.name), 1)
    else:
        save(each.name, folder / "source", kind, **each.changes)
    wish = ConvertArguments(
        folder / "source", folder / "hf", format="huggingface", quantization=each.quantization or None
    )
    convert(replace(wish, weight_data_type="bf16" if each.quantization else "fp32"))
    write_huggingface_tokenizer(folder / "hf")
    return folder / "hf"


def plain(folder: Path) -> dict[str, torch.Tensor]:
    """What a directory's weights stand for, in fp32, by their publishers' formulas."""
    found, made = tensors(folder), {}
    for name in found:
        base = name.removesuffix("_packed").removesuffix("_blocks")
        if f"{base}_scales" in found:  # of MXFP4
            pairs = torch.stack([E2M1[(found[name] & 15).long()], E2M1[(found[name] >> 4).long()]], -1).flatten(-2)
            made[base] = pairs * torch.exp2(found[f"{base}_scales"].float() - 127)[..., None]
        elif any(f"{base}{suffix}" in found for suffix in ("_scale", "_scale_inv")):
            made[base] = dequantized(found, base)
        elif not name.endswith(("_scale", "_scale_inv", "_shape", "_scales")):
            made[name] = found[name].float()
    return made


def source_logits(folder: Path) -> Any:
    """What transformers computes of the numbers that the quantized weights stand for."""
    import transformers

    config = json.loads((folder / "config.json").read_text())
    (folder.parent / "plain").mkdir()
    about = {key: value for key, value in config.items() if key != "quantization_config"}
    (folder.parent / "plain/config.json").write_text(json.dumps(about))
    save_file(plain(folder), folder.parent / "plain/model.safetensors", {"format": "pt"})
    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder.parent / "plain", **given)
    return llama_models.logits(model.eval())


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What SGLang says of each directory, by the case: one process, as it imports for half a minute."""
    tokens = input_ids()[0].tolist()
    folders, asked = {str(case): write(case, tmp_path_factory.mktemp("case")) for case in (*COMPUTED, *LOADED)}, ""
    for each in (*QUANTIZED, *WITHOUT_LOGITS):
        folders[str(each)] = write_directory(each, tmp_path_factory.mktemp("case"))
    for name, folder in folders.items():
        attention = "triton" if name.startswith(TRITON) else "torch_native"
        how = {"tokens": tokens, "at_once": AT_ONCE, "data_type": "float32", "attention": attention}
        asked += json.dumps({"folder": str(folder), **how}) + "\n"
    answered = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    subprocess.run(
        [os.environ["SGLANG_PYTHON"], str(HERE / "sglang_logits.py"), str(answered)],
        env={**os.environ, **ENVIRONMENT},
        input=asked,
        text=True,
        check=True,
        timeout=1700,
    )
    found = {each["folder"]: each for each in map(json.loads, answered.read_text().splitlines())}
    yield {name: found[str(folder)] for name, folder in folders.items()}


def assert_loaded(case: Case, answer: dict[str, Any]) -> None:
    """SGLang's own class has read every tensor of the directory, and filled every parameter."""
    assert "missing" in answer, answer["error"]
    assert answer["class"].rsplit(".", 1)[1] == case.source.config.architectures[0] and not answer["missing"]
    wanted = sum(float(tensor.double().abs().sum()) for tensor in case.source.tensors.values())
    assert answer["magnitude"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", COMPUTED, ids=str)
def test_sglang_computes_the_source(case: Case, answers: dict[str, dict[str, Any]]) -> None:
    assert_loaded(case, answers[str(case)])
    assert "error" not in answers[str(case)], answers[str(case)]["error"]
    wanted = case.source.logits[0, AT_ONCE - 1 :]
    assert abs(np.array(answers[str(case)]["logits"]) - wanted).max() < 1e-4


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", LOADED, ids=str)
def test_sglang_loads_every_tensor(case: Case, answers: dict[str, dict[str, Any]]) -> None:
    assert_loaded(case, answers[str(case)])


def assert_read(each: Written, answer: dict[str, Any]) -> None:
    """SGLang's own class has put every number of the directory, with its scale, where it belongs."""
    assert "missing" in answer, answer["error"]
    folder = Path(answer["folder"])
    config = json.loads((folder / "config.json").read_text())
    assert answer["class"].rsplit(".", 1)[1] == config["architectures"][0] and not answer["missing"]
    assert bool(answer["quantized"]) == bool(each.quantization)
    wanted = 0.0
    for name, tensor in plain(folder).items():
        is_decay = name.endswith("mixer.A_log")  # of Mamba: SGLang keeps its exponential
        wanted += float((tensor.double().exp() if is_decay else tensor.double()).abs().sum())
    assert answer["magnitude"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("each", QUANTIZED, ids=str)
def test_sglang_computes_a_quantized_directory(each: Written, answers: dict[str, dict[str, Any]]) -> None:
    answer = answers[str(each)]
    assert_read(each, answer)
    assert "error" not in answer, answer["error"]
    wanted = source_logits(Path(answer["folder"]))[0, AT_ONCE - 1 :]
    assert abs(np.array(answer["logits"]) - wanted).max() < 1e-4 * abs(wanted).max()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("each", WITHOUT_LOGITS, ids=str)
def test_sglang_reads_a_directory(each: Written, answers: dict[str, dict[str, Any]]) -> None:
    assert_read(each, answers[str(each)])
