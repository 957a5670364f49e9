"""IA3 vectors beside a NeMo T5: Hugging Face's logits of the model with the vectors multiplied into its weights."""

from __future__ import annotations

import configparser
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints.nemo_archive import DATA, write_gpt, write_nemo
from support.checkpoints.t5_adapters import CLASSES, base, huggingface_copy, multiplied, write_task
from support.shards.t5_forward import T5
from support.tiny_models.t5_models import (
    DECODER_IDS,
    ENCODER_IDS,
    INTER,
    WIDTH,
    Saving,
    filling,
    logits_of,
)

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from handover.errors import CheckpointError

FT: dict[str, dict[str, str]] = json.loads((DATA / "ft_t5_ia3_digests.json").read_text())


def run(checkpoint: Path, output: Path, ranks: int = 1, data_type: str = "fp32") -> Path:
    convert(ConvertArguments(checkpoint, output, ranks, data_type))
    return output


@pytest.mark.parametrize(
    ("version", "saving"),
    [
        ("first", Saving()),
        ("middle", Saving(tensor=2)),
        ("middle", Saving(tensor=2, pipeline=4)),
        ("last", Saving(tensor=4)),
    ],
)
def test_each_task_computes_hugging_faces_logits(version: str, saving: Saving, tmp_path: Path) -> None:
    model = base(tmp_path / "both/t5.nemo")
    plain_logits = logits_of(model)
    write_task(tmp_path / "both/boolq.nemo", "boolq", version, saving)
    write_task(tmp_path / "both/squad.nemo", "squad", version, saving)
    for ranks in (1, 2):
        out = run(tmp_path / "both", tmp_path / f"out{ranks}", ranks)
        assert np.abs(T5(out).forward(ENCODER_IDS, DECODER_IDS) - plain_logits).max() < 1e-4
        for number, task in enumerate(("boolq", "squad")):
            expected = logits_of(multiplied(huggingface_copy(model), task))
            assert np.abs(T5(out, number).forward(ENCODER_IDS, DECODER_IDS) - expected).max() < 1e-4
            assert np.abs(expected - plain_logits).max() > 0.1
    parser = configparser.ConfigParser()
    parser.read(out / "config.ini")
    assert parser["structure"]["ia3_num_tasks"] == "2"
    assert parser["structure"]["ia3_task_names"] == "boolq, squad"


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_byte_is_that_of_fastertransformers_converter(ranks: int, tmp_path: Path) -> None:
    """Adapters of one task: for a second its converter needs heads * size = width and one rank."""
    base(tmp_path / "both/t5.nemo")
    write_task(tmp_path / "both/squad.nemo", "squad", "first")
    out = run(tmp_path / "both", tmp_path / "out", ranks)
    made = {p.name: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in out.glob("*.ia3.*")}
    assert made == FT[f"{ranks}-gpu"]


def test_resharding_carries_the_vectors_along(tmp_path: Path) -> None:
    base(tmp_path / "both/t5.nemo")
    for task in ("boolq", "squad"):
        write_task(tmp_path / f"both/{task}.nemo", task, "middle")
    one, two = (run(tmp_path / "both", tmp_path / str(ranks), ranks) for ranks in (1, 2))
    again = run(two, tmp_path / "again", 1)
    for file in one.glob("*.bin"):
        assert (again / file.name).read_bytes() == file.read_bytes()


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        inspect_source(path, 1, "fp32")
    return str(refused.value)


def test_vectors_without_their_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = write_task(tmp_path / "alone/squad.nemo", "squad", "middle")
    assert "squad.nemo holds IA3 vectors, not a T5" in refusal(alone)
    assert "squad.nemo holds IA3 vectors, not a T5" in refusal(tmp_path / "alone")
    write_task(tmp_path / "alone/boolq.nemo", "boolq", "middle")
    assert "holds prompt tables or adapters and no model for them" in refusal(tmp_path / "alone")


def test_linear_adapters_are_refused_by_what_they_are(tmp_path: Path) -> None:
    base(tmp_path / "both/t5.nemo")
    config = {
        "target": f"{CLASSES}MegatronT5AdapterLearningModel",
        "virtual_prompt_style": "no-prompts",
        "adapter_tuning": {"type": "linear_adapter", "adapter_dim": 8},
    }
    write_nemo(tmp_path / "both/linear.nemo", config, {"model_weights.ckpt": {}}, files={})
    assert "linear.nemo holds linear adapters, not a T5" in refusal(tmp_path / "both/linear.nemo")
    assert "holds 2 checkpoints" in refusal(tmp_path / "both")


def test_two_models_in_one_directory_are_refused(tmp_path: Path) -> None:
    base(tmp_path / "both/a.nemo")
    (tmp_path / "both/b.nemo").write_bytes((tmp_path / "both/a.nemo").read_bytes())
    write_task(tmp_path / "both/squad.nemo", "squad", "middle")
    message = refusal(tmp_path / "both")
    assert "holds 2 checkpoints\n  a.nemo\n  b.nemo" in message
    assert "squad.nemo" not in message


def test_vectors_beside_another_kind_of_model_are_refused(tmp_path: Path) -> None:
    write_gpt(tmp_path / "gpt.nemo")
    write_task(tmp_path / "squad.nemo", "squad", "middle")
    assert "holds IA3 vectors beside a model of NeMo" in refusal(tmp_path)


def test_vectors_of_another_size_or_place_are_named(tmp_path: Path) -> None:
    base(tmp_path / "both/t5.nemo")
    config = {"target": f"{CLASSES}MegatronT5InfusedAdapterModel"}
    state = {
        "encoder:model.layers.0.mlp:mlp_infused_adapter": {"scalers": torch.ones(INTER + 1)},
        "encoder:model.layers.0.mlp:lora_adapter": {"weight": torch.ones(3)},
    }
    write_nemo(tmp_path / "both/odd.nemo", config, {"model_weights.ckpt": state}, files={})
    message = refusal(tmp_path / "both")
    assert "encoder.block.0.layer.1.DenseReluDense.ia3.weight as [1, 21] instead of [1, 20]" in message
    assert "lora_adapter.weight  [3]  has no rule" in message
    assert "decoder.block.3.layer.1.EncDecAttention.v.ia3.weight  [1, 4, 8]  has no source" in message


def test_other_vectors_are_another_conversion(tmp_path: Path) -> None:
    """A conversion that was killed continues only with the same files beside the model."""
    base(tmp_path / "both/t5.nemo")
    write_task(tmp_path / "both/squad.nemo", "squad", "middle")
    run(tmp_path / "both", tmp_path / "out")
    first = (tmp_path / "out/encoder.block.0.layer.0.SelfAttention.k.ia3.weight.0.bin").read_bytes()
    write_task(tmp_path / "both/squad.nemo", "other", "middle")
    run(tmp_path / "both", tmp_path / "out")
    assert (tmp_path / "out/encoder.block.0.layer.0.SelfAttention.k.ia3.weight.0.bin").read_bytes() != first


def write_prompts(path: Path, task: str, does_start_with_pad: bool) -> torch.Tensor:
    """Save a table as NeMo's ``MegatronT5PromptLearningModel`` does; returns it."""
    table = filling(f"prompt {task}", (5, WIDTH))
    config = {
        "target": "megatron_t5_prompt_learning_model.MegatronT5PromptLearningModel",
        "virtual_prompt_style": "p-tuning",
        "task_templates": [{"taskname": task, "total_virtual_tokens": 5}],
        "data": {"decoder_starts_with_pad": does_start_with_pad},
    }
    state = {"prompt_table": {f"prompt_table.{task}.prompt_embeddings.weight": table}}
    write_nemo(path, config, {"model_weights.ckpt": state}, files={})
    return table


@pytest.mark.parametrize("does_start_with_pad", [True, False])
def test_prompt_tables_as_fastertransformers_converter_writes_them(does_start_with_pad: bool, tmp_path: Path) -> None:
    """nemo_t5_ckpt_convert.py, ``prompt_convert``: keys of [encoder] and [task_N], and where the decoder starts."""
    base(tmp_path / "both/t5.nemo")
    write_task(tmp_path / "both/a_task.nemo", "squad", "middle")
    tables = [write_prompts(tmp_path / f"both/{task}.nemo", task, does_start_with_pad) for task in ("nli", "squad")]
    out = run(tmp_path / "both", tmp_path / "out", 2)
    parser = configparser.ConfigParser()
    parser.read(out / "config.ini")
    encoder = {key: parser["encoder"][key] for key in parser["encoder"] if "prompt" in key or key == "num_tasks"}
    assert encoder == {
        "num_tasks": "2",
        "prompt_learning_start_id": parser["encoder"]["vocab_size"],
        "prompt_learning_type": "3",
    }
    for number, (task, table) in enumerate(zip(("nli", "squad"), tables, strict=True)):
        assert dict(parser[f"task_{number}"]) == {"task_name": task, "prompt_length": "5"}
        assert (out / f"model.prompt_table.{task}.weight.bin").read_bytes() == table.numpy().tobytes()
    pad_id, start_id = parser["decoder"]["pad_id"], parser["decoder"]["decoder_start_token_id"]
    assert (start_id == pad_id) is does_start_with_pad
    assert parser["structure"]["ia3_num_tasks"] == "1"


def test_prompt_tables_that_start_differently_are_refused(tmp_path: Path) -> None:
    base(tmp_path / "both/t5.nemo")
    write_prompts(tmp_path / "both/nli.nemo", "nli", True)
    write_prompts(tmp_path / "both/squad.nemo", "squad", False)
    assert "some prompt tables were trained with decoder_starts_with_pad and some without" in refusal(tmp_path / "both")
