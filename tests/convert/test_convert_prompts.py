"""Prompt tables that NeMo's p-tuning saved, beside their model."""

from __future__ import annotations

import configparser
import io
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.checkpoints.nemo_archive import HIDDEN, NEMO, TOKENIZER, gpt_config, gpt_state, write_gpt, write_nemo
from support.checkpoints.prompt_tables import write_tables
from support.tiny_models.huggingface_models import build

from backends.fastertransformer.engine.model.families import read_config
from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from handover.errors import CheckpointError
from handover.manifest import Manifest
from handover.templates import read_templates

SAMPLE = NEMO / "ptuning_mlp.nemo"


def sample_state() -> dict[str, Any]:
    with tarfile.open(SAMPLE) as tar:
        return torch.load(io.BytesIO(tar.extractfile("./model_weights.ckpt").read()), weights_only=True)  # type: ignore[union-attr]


def read_ini(root: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(root / "config.ini")
    return parser


def run(source: Path, output: Path, ranks: int = 1, data_type: str = "fp32") -> Path:
    convert(ConvertArguments(source, output, ranks, data_type))
    return output


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A directory with the model that the sample was trained for and the sample itself."""
    root = tmp_path / "models"
    root.mkdir()
    shutil.copy(NEMO / "gpt122_tp1_pp1.nemo", root)
    shutil.copy(SAMPLE, root)
    return root


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("data_type", ["fp32", "fp16", "bf16"])
def test_the_table_is_the_one_that_nemo_saved(data_type: str, ranks: int, beside: Path, tmp_path: Path) -> None:
    root = run(beside, tmp_path / "out", ranks, data_type)
    table = sample_state()["prompt_table"]["prompt_table.squad.prompt_embeddings.weight"]
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[data_type]
    expected = table.to(dtype).view(torch.uint8).numpy().tobytes()
    assert (root / "model.prompt_table.squad.weight.bin").read_bytes() == expected
    assert Manifest.read(root).problems(root) == []


def test_the_table_is_what_the_trained_encoder_computes(beside: Path, tmp_path: Path) -> None:
    """NeMo's MLP, by its source: two linear layers around a ReLU, over the embeddings."""
    state = sample_state()
    mlp = state["mlp_head"]
    hidden = torch.relu(state["embeddings"]["weight"] @ mlp["0.weight"].T + mlp["0.bias"])
    expected = hidden @ mlp["2.weight"].T + mlp["2.bias"]
    written = np.fromfile(run(beside, tmp_path / "out") / "model.prompt_table.squad.weight.bin", "<f4")
    assert np.abs(written.reshape(expected.shape) - expected.numpy()).max() < 1e-6


def test_config_ini_has_what_fastertransformers_loaders_read(beside: Path, tmp_path: Path) -> None:
    """Keys by the GPT guide; the first virtual token follows the 1000 tokens of the vocabulary, not its padding."""
    root = run(beside, tmp_path / "out")
    ini = read_ini(root)
    assert {key: ini["gpt"][key] for key in ("num_tasks", "prompt_learning_start_id", "prompt_learning_type")} == {
        "num_tasks": "1",
        "prompt_learning_start_id": "1000",
        "prompt_learning_type": "3",
    }
    assert ini["gpt"]["vocab_size"] == "1024"
    for section in ("task_0", "gpt_task_0"):
        assert dict(ini[section]) == {"task_name": "squad", "prompt_length": "9"}
    config = read_config(root)
    assert config.prompt_tasks == (("squad", 9),) and config.prompt_learning_start_id == 1000


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_templates_of_the_tasks_go_along(beside: Path, ranks: int, tmp_path: Path) -> None:
    """And on to another FT checkpoint, cut from the first."""
    with tarfile.open(SAMPLE) as tar:
        config = yaml.safe_load(tar.extractfile("./model_config.yaml").read())  # type: ignore[union-attr]
    root = run(beside, tmp_path / "out")
    (template,) = read_templates(root)
    assert template == config["task_templates"][0] and template["virtual_token_splits"] == [9]
    assert read_templates(run(root, tmp_path / "cut", ranks)) == [template]
    assert read_templates(run(NEMO / "gpt122_tp1_pp1.nemo", tmp_path / "alone")) == []


def test_the_other_shards_are_those_of_the_model_alone(beside: Path, tmp_path: Path) -> None:
    alone = run(NEMO / "gpt122_tp1_pp1.nemo", tmp_path / "alone", 2)
    together = run(beside, tmp_path / "together", 2)
    for file in alone.glob("*.bin"):
        assert file.read_bytes() == (together / file.name).read_bytes()


@pytest.mark.parametrize("encoder", ["mlp", "lstm", "embedding"])
@pytest.mark.parametrize("folder", ["", "mp_rank_00/", "tp_rank_00_pp_rank_000/"])
def test_every_form_of_the_encoder_and_every_training(encoder: str, folder: str, tmp_path: Path) -> None:
    source = tmp_path / "models"
    source.mkdir()
    write_gpt(source / "gpt.nemo")
    write_tables(source / "tuned.nemo", {"sentiment": 2, "intent and slot": 3}, folder, encoder)
    root = run(source, tmp_path / "out")
    assert np.fromfile(root / "model.prompt_table.intent and slot.weight.bin", "<f4").tolist() == list(
        range(3 * HIDDEN)
    )
    ini = read_ini(root)
    assert (ini["gpt"]["num_tasks"], ini["task_1"]["task_name"]) == ("2", "intent and slot")
    # The tiny vocabulary ends with <|endoftext|> as number 3; NeMo's next token gets 4.
    assert ini["gpt"]["prompt_learning_start_id"] == "4"


def test_several_files_are_numbered_one_after_another(tmp_path: Path) -> None:
    source = tmp_path / "models"
    source.mkdir()
    write_gpt(source / "gpt.nemo")
    write_tables(source / "a.nemo", {"one": 2, "two": 3})
    write_tables(source / "b.nemo", {"three": 4})
    ini = read_ini(run(source, tmp_path / "out"))
    assert [ini[f"task_{i}"]["task_name"] for i in range(3)] == ["one", "two", "three"]
    assert ini["gpt"]["num_tasks"] == "3"


def test_an_unpacked_model_and_an_unpacked_table(tmp_path: Path) -> None:
    source = tmp_path / "models"
    for name, archive in (
        ("gpt", write_gpt(tmp_path / "g.nemo")),
        ("tuned", write_tables(tmp_path / "t.nemo", {"x": 1})),
    ):
        with tarfile.open(archive) as tar:
            tar.extractall(source / name, filter="data")
    assert read_ini(run(source, tmp_path / "out"))["task_0"]["task_name"] == "x"


def test_sentencepiece_counts_its_pieces(tmp_path: Path) -> None:
    source = tmp_path / "models"
    source.mkdir()
    shutil.copy(NEMO / "gpt_spm.nemo", source)
    write_tables(source / "tuned.nemo", {"x": 1}, hidden=64)
    with tarfile.open(source / "gpt_spm.nemo") as tar:
        member = next(member for member in tar if member.name.endswith("spm.model"))
        import sentencepiece

        pieces = sentencepiece.SentencePieceProcessor(model_proto=tar.extractfile(member).read())  # type: ignore[union-attr]
    ini = read_ini(run(source, tmp_path / "out"))
    assert int(ini["gpt"]["prompt_learning_start_id"]) == pieces.get_piece_size()


def refusal(source: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        inspect_source(source, 1, "fp32")
    return str(refused.value)


@pytest.mark.parametrize(
    ("tasks", "changes", "words"),
    [
        ({"squad": 2}, {"hidden": HIDDEN + 1}, "gives model.prompt_table.squad.weight as [2, 9] instead of [2, 8]"),
        ({"a/b": 2}, {}, "the task's name 'a/b' cannot be part of a file's name"),
        ({"..": 2}, {}, "cannot be part of a file's name"),
        ({"squad": 2}, {"task_templates": []}, "holds what no task template names: prompt_table.prompt_table.squad"),
        ({}, {"task_templates": [{"taskname": "squad"}]}, "has no table for the task squad"),
    ],
)
def test_tables_that_do_not_fit(tasks: dict[str, int], changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = tmp_path / "models"
    source.mkdir()
    write_gpt(source / "gpt.nemo")
    write_tables(source / "tuned.nemo", tasks, **changes)
    assert words in refusal(source)


def test_a_table_alone_a_table_twice_and_two_models(tmp_path: Path) -> None:
    source = tmp_path / "models"
    source.mkdir()
    write_tables(source / "a.nemo", {"squad": 2})
    assert "holds prompt tables, not a GPT" in refusal(source / "a.nemo")
    named = write_gpt(tmp_path / "named.nemo", target="nemo.MegatronGPTPromptLearningModel")
    assert "holds prompt tables, not a GPT" in refusal(named)
    write_tables(source / "b.nemo", {"squad": 2})
    assert "no model for them" in refusal(source)
    write_gpt(source / "gpt.nemo")
    assert "several prompt tables of squad" in refusal(source)
    write_gpt(source / "gpt2.nemo")
    assert "holds 2 checkpoints\n  gpt.nemo\n  gpt2.nemo" in refusal(source)


def test_compressed_archives_and_models_of_another_kind(tmp_path: Path) -> None:
    source = tmp_path / "models"
    source.mkdir()
    write_tables(source / "tuned.nemo", {"squad": 2})
    write_nemo(source / "gpt.nemo", gpt_config(), {"model_weights.ckpt": gpt_state()}, mode="w:gz")
    assert "gpt.nemo is compressed" in refusal(source)


def test_tables_beside_a_model_of_another_kind_are_not_dropped(tmp_path: Path) -> None:
    source = tmp_path / "models"
    build("gpt2").save_pretrained(source / "gpt2")
    (source / "gpt2/vocab.json").write_bytes(TOKENIZER["vocab.json"])
    (source / "gpt2/merges.txt").write_bytes(TOKENIZER["merges.txt"])
    write_tables(source / "tuned.nemo", {"squad": 2})
    assert "holds prompt tables beside a model of" in refusal(source)


def test_a_bare_encoder_in_training_has_no_table(tmp_path: Path) -> None:
    source = tmp_path / "models"
    source.mkdir()
    write_gpt(source / "gpt.nemo")
    config = {"virtual_prompt_style": "p-tuning", "task_templates": [{"taskname": "squad"}]}
    write_nemo(
        source / "t.nemo", config, {"model_weights.ckpt": {"mlp_head": {"0.bias": torch.ones(2)}}}, files=TOKENIZER
    )
    assert "has no table for the task squad" in refusal(source)
    (source / "t.nemo").unlink()
    with tarfile.open(source / "t.nemo", "w") as tar:
        content = yaml.safe_dump(config).encode()
        member = tarfile.TarInfo("./model_config.yaml")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    assert "has no model_weights.ckpt" in refusal(source)
