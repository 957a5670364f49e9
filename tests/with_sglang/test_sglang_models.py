"""Converted directories in SGLang itself, on a CPU: its own model classes load every parameter, and compute the source.

SGLang runs with torch's operators: its kernels are for GPUs, and for processors with AMX. A prompt's first tokens are
read at once and the others decoded one by one, so that its cache counts too.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints.llama_files import write_huggingface_tokenizer
from support.checkpoints.llama_sources import Case, write_source
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


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What SGLang says of each directory, by the case: one process, as it imports for half a minute."""
    tokens = input_ids()[0].tolist()
    folders, asked = {str(case): write(case, tmp_path_factory.mktemp("case")) for case in (*COMPUTED, *LOADED)}, ""
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
