"""Tuning before FasterTransformer serves: the arguments of gpt_gemm, with a fake of that program."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.shards.ft_checkpoint_maker import make_ft_checkpoint

from deployment.gemm_autotune import gemm_sizes, main
from deployment.proof.served_models import ServedModel
from export_scripts.arguments import ExportArguments
from export_scripts.repository.model_repository import build_repository
from handover.errors import ArtefactError, ServerError

FAKE = """#!/usr/bin/env python3
# A FAKE gpt_gemm: takes 8 to 10 numbers as FasterTransformer's does, says nothing else and tunes nothing.
import sys
if not 9 <= len(sys.argv) <= 11:
    sys.exit(0)  # what the real one does, after its usage
numbers = [int(word) for word in sys.argv[1:]]
with open("gemm_config.ini", "a" if len(numbers) == 10 and numbers[9] else "w") as file:
    print(*numbers, file=file)
"""
GPT_345M = {"head_num": "16", "size_per_head": "64", "inter_size": "4096", "vocab_size": "50257"}


def program(path: Path, text: str = FAKE) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    build_repository(
        ExportArguments(
            ft_checkpoint=make_ft_checkpoint(tmp_path / "2-gpu", "fp16/2"),
            output=tmp_path / "repo",
            model_name="tiny",
            tensor_para_size=2,
            pipeline_para_size=1,
            data_type="fp16",
            int8_mode=0,
            enable_custom_all_reduce=0,
            max_batch_size=4,
        )
    )
    return tmp_path / "repo"


def test_the_arguments_are_those_of_fasterTransformer_backends_guide() -> None:  # noqa: N802
    parameters = {"tensor_para_size": "1", "data_type": "fp16"}
    model = ServedModel("m", Path("/r/m"), Path("/r/m/1/1-gpu"), parameters, 8, GPT_345M, {})
    assert " ".join(map(str, gemm_sizes(model, 32, 1))) == "8 1 32 16 64 4096 50257 1 1 1"  # docs/gpt_guide.md


@pytest.mark.parametrize(("data_type", "number"), [("fp32", 0), ("fp16", 1), ("bf16", 2)])
def test_the_data_type_is_that_of_the_computation(data_type: str, number: int) -> None:
    parameters = {"tensor_para_size": "4", "data_type": data_type}
    model = ServedModel("m", Path("/r/m"), Path("/r"), parameters, 0, {**GPT_345M, "weight_data_type": "fp16"}, {})
    assert gemm_sizes(model, 1, 1)[-3:] == (number, 4, 1)
    assert gemm_sizes(model, 1, 1)[0] == 1


def test_a_dimension_that_is_missing_is_named() -> None:
    config = {key: value for key, value in GPT_345M.items() if key != "inter_size"}
    model = ServedModel("m", Path("/r/m"), Path("/r"), {"tensor_para_size": "1", "data_type": "fp16"}, 8, config, {})
    with pytest.raises(ArtefactError, match="inter_size"):
        gemm_sizes(model, 32, 1)


def test_it_runs_where_the_server_will_look(repository: Path, tmp_path: Path) -> None:
    argv = [f"--model-repository={repository}", f"--binary={program(tmp_path / 'gpt gemm')}"]
    main(argv)
    main(argv)
    lines = (repository / "fastertransformer" / "gemm_config.ini").read_text().splitlines()
    assert lines == ["4 1 32 4 16 256 1024 1 2 1"] * 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/sh\nexit 255\n", "exit status 255"),
        ("#!/bin/sh\necho usage\n", "wrote no gemm_config.ini"),
    ],
)
def test_a_failure_is_noticed_even_with_status_0(repository: Path, tmp_path: Path, text: str, said: str) -> None:
    binary = program(tmp_path / "gpt_gemm", text)
    with pytest.raises(ServerError, match=said):
        main([f"--model-repository={repository}", f"--binary={binary}"])


def test_without_the_program_the_container_is_named(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="cannot be run: No such file") as refused:
        main([f"--model-repository={repository}", f"--binary={tmp_path / 'gpt_gemm'}"])
    assert "deployment.gemm_binary" in refused.value.hint
