"""The repository of Triton's vLLM backend: the format of its README, over the files that the conversion wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from export_scripts.arguments import ConvertArguments, ExportVllmArguments
from export_scripts.convert import convert
from export_scripts.repository.pbtxt import parse
from export_scripts.repository.vllm_repository import build_vllm_repository
from handover.errors import ArtefactError
from handover.manifest import Manifest

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "llama_demo" / "checkpoints"


@pytest.fixture
def arguments(tmp_path: Path) -> ExportVllmArguments:
    directory = tmp_path / "hf_fp16"
    convert(ConvertArguments(CHECKPOINT, directory, weight_data_type="fp16", format="huggingface"))
    root = tmp_path / "it's here"
    return ExportVllmArguments(directory, root, root, "mine", "bf16", tensor_para_size=2, max_model_len=512)


def test_the_repository_is_what_the_backend_reads(arguments: ExportVllmArguments) -> None:
    manifest = build_vllm_repository(arguments)
    model = arguments.output / "mine"
    config = parse((model / "config.pbtxt").read_text())
    assert (config.name, config.backend) == ("mine", "vllm")
    (group,) = config.instance_group
    assert group.count == 1 and group.kind == group.KIND_MODEL
    assert not config.input and not config.output, "the backend completes them"
    settings = json.loads((model / "1" / "model.json").read_text())
    directory = Path(settings.pop("model"))
    assert settings == {
        "served_model_name": "mine",
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "max_model_len": 512,
    }
    served = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float16)
    source = transformers.AutoModelForCausalLM.from_pretrained(arguments.huggingface, dtype=torch.float16)
    assert all(torch.equal(one, other) for one, other in zip(served.parameters(), source.parameters(), strict=True))
    assert directory.joinpath("model.safetensors").samefile(arguments.huggingface / "model.safetensors")
    assert manifest.problems(arguments.output) == []
    assert manifest.made_from["huggingface_digest"] == Manifest.read(arguments.huggingface).digest


def test_it_is_built_again_over_itself_and_not_over_anything_else(arguments: ExportVllmArguments) -> None:
    first = build_vllm_repository(arguments)
    assert build_vllm_repository(arguments).files == first.files
    other = replace(arguments, output=arguments.huggingface.with_name("another"))
    other.output.mkdir()
    (other.output / "notes.txt").write_text("mine")
    with pytest.raises(ArtefactError, match="files that export did not write: notes.txt"):
        build_vllm_repository(other)
    (arguments.huggingface / "model.safetensors").unlink()
    with pytest.raises(ArtefactError, match="is not what its manifest says"):
        build_vllm_repository(arguments)
