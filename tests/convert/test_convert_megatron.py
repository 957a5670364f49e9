"""Megatron-LM's checkpoints: files laid out as its own code lays them out, logits of Hugging Face's GPT-2."""

from __future__ import annotations

import enum
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.checkpoints.megatron_checkpoints import (
    HEADS,
    HIDDEN,
    LAYERS,
    POSITIONS,
    SIZE,
    VOCAB,
    content,
    layer_state,
    with_arguments,
    write,
)
from support.engines.network_runs import open_network, prefill_logits
from support.shards.gpt2_checkpoint import random_gpt2
from support.shards.reference_forward import forward
from transformers import GPT2LMHeadModel

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.megatron.arguments import without_arguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from export_scripts.weights.schema import ModelDims
from handover.errors import CheckpointError


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    return random_gpt2(n_layer=LAYERS, n_positions=POSITIONS)


def run(source: Path, output: Path, ranks: int = 1) -> Path:
    convert(ConvertArguments(source, output, ranks, "fp32"))
    return output


def assert_hugging_faces_logits(model: GPT2LMHeadModel, source: Path, tmp_path: Path, ranks: int = 2) -> None:
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (2, POSITIONS)))
    with torch.inference_mode():
        expected = model(ids).logits.numpy()
    root = run(source, tmp_path / "out", ranks)
    for logits in (forward(root, ids.numpy()), prefill_logits(open_network(root, ranks), ids).numpy()):
        assert np.abs(logits[:, :, :VOCAB] - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (2, 2)])
def test_versions_and_training_ranks(
    version: float, grid: tuple[int, int], gpt2: GPT2LMHeadModel, tmp_path: Path
) -> None:
    assert_hugging_faces_logits(gpt2, write(tmp_path / "gpt", gpt2, version, grid), tmp_path)


@pytest.mark.parametrize("version", [0, 3.0])
def test_files_of_torch_before_its_zip(version: float, gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    source = write(tmp_path / "gpt", gpt2, version, (2, 1), is_zip=False)
    assert_hugging_faces_logits(gpt2, source, tmp_path, 4)


@pytest.mark.parametrize("form", ["release", "iteration alone", "named by the user"])
def test_release_and_iterations(form: str, gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    source = write(tmp_path / "gpt", gpt2, 3.0)
    if form == "release":
        (source / "iter_0000500").rename(source / "release")
        (source / "latest_checkpointed_iteration.txt").write_text("release")
    if form == "iteration alone":
        (source / "latest_checkpointed_iteration.txt").unlink()
    if form == "named by the user":
        for file in ("gpt2-vocab.json", "gpt2-merges.txt"):
            (source / file).rename(source / "iter_0000500" / file)
        source /= "iter_0000500"
    assert inspect_source(source, 2, "fp16").dims == ModelDims(HEADS, SIZE, 4 * HIDDEN, LAYERS, POSITIONS, 128)


def test_the_newest_iteration_is_the_trackers(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    source = write(tmp_path / "gpt", gpt2, 3.0)
    (source / "iter_0000400").mkdir()
    (source / "iter_0000400/notes.txt").write_text("cut off")
    assert_hugging_faces_logits(gpt2, source, tmp_path, 1)
    (source / "latest_checkpointed_iteration.txt").write_text("600")
    assert "names iter_0000600, which is not there" in refusal(source)
    (source / "latest_checkpointed_iteration.txt").unlink()
    assert_hugging_faces_logits(gpt2, source, tmp_path, 2)
    (source / "iter_0000400").rename(source / "iter_0000600")
    assert "iter_0000600, the newest step, is incomplete" in refusal(source)
    (source / "iter_0000600").rename(source / "release")
    assert "give one of: iter_0000500, release" in refusal(source)


def refusal(source: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        inspect_source(source, 1, "fp32")
    return str(refused.value)


def test_objects_of_megatron_itself_are_not_imported(
    gpt2: GPT2LMHeadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("megatron.enums")
    kind = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module="megatron.enums")  # type: ignore[misc]
    module.ModelType = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.enums", module)
    source = write(tmp_path / "gpt", gpt2, 3.0, model_type=kind(1))
    monkeypatch.undo()
    assert vars(inspect_source(source, 1, "fp32").dims)["num_layer"] == LAYERS


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_of_megatron_lm(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    spelled = {
        "self_attention.query_key_value.": "self_attention.linear_qkv.",
        "self_attention.dense.": "self_attention.linear_proj.",
        "mlp.dense_h_to_4h.": "mlp.linear_fc1.",
        "mlp.dense_4h_to_h.": "mlp.linear_fc2.",
        "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_",
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    }
    layers = [layer_state(gpt2, layer, 3.0, 1, 0) for layer in range(LAYERS)]
    state = {"embedding.position_embeddings.weight": gpt2.transformer.wpe.weight.detach()}
    state["embedding.word_embeddings.weight"] = gpt2.transformer.wte.weight.detach()
    for name in layers[0]:
        prefix = next(old for old in spelled if name.startswith(old))
        key = f"decoder.layers.{spelled[prefix]}{name.removeprefix(prefix)}"
        state[key] = torch.stack([layer[name] for layer in layers])
    state |= {f"decoder.final_layernorm.{n}": v.detach() for n, v in gpt2.transformer.ln_f.state_dict().items()}
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(9)
    source = tmp_path / "gpt"
    write(source, gpt2, 3.0)
    folder = source / "iter_0000500"
    (folder / "mp_rank_00/model_optim_rng.pt").unlink()
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    torch.save(
        with_arguments({"iteration": 500, "optimizer": {"step": torch.ones(1)}}, 3.0, (2, 2)), folder / "common.pt"
    )
    assert_hugging_faces_logits(gpt2, source, tmp_path)


def test_missing_heads_of_a_checkpoint_without_arguments(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    source = write(tmp_path / "gpt", gpt2, 0)
    (source / "args.json").unlink()
    assert "nothing says how many heads it has" in refusal(source)


def test_the_345m_model_has_sixteen_heads() -> None:
    """The file of the GPT guide holds version 0 and no arguments; the guide converts it with ``-head_num 16``."""

    class Shapes:
        shape = (1024, 1024)
        data_type = "fp16"
        axis = None

        def parts(self) -> tuple[Any, ...]:
            return ()

    class Keys:
        def tensors(self, _: Any) -> dict[str, Any]:
            layers = [f"language_model.transformer.layers.{layer}.mlp.dense_4h_to_h.weight" for layer in range(24)]
            return dict.fromkeys(["language_model.embedding.position_embeddings.weight", *layers], Shapes())

    config, remarks = without_arguments(Path("release"), Keys(), {})  # type: ignore[arg-type]
    assert (config["num_attention_heads"], config["num_layers"], config["layernorm_epsilon"]) == (16, 24, 1e-5)
    assert remarks == ("saved without its arguments: 16 heads are taken from GPT-2 of 24 x 1024",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"swiglu": True}, "activation: swiglu"),
        ({"normalization": "RMSNorm"}, "normalization: rmsnorm"),
        ({"position_embedding_type": "mrope"}, "position_embedding_type: mrope"),
        ({"use_rotary_position_embeddings": True, "rotary_interleaved": True}, "rotary_interleaved: True"),
        ({"add_position_embedding": False}, "position_embedding_type: none"),
        ({"num_experts": 8}, "num_moe_experts: 8"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm: True"),
        ({"multi_latent_attention": True}, "multi_latent_attention: True"),
        ({"untie_embeddings_and_output_weights": True}, "model.lm_head.weight  [128, 32]  has no source"),
    ],
)
def test_models_that_cannot_be_expressed(
    change: dict[str, Any], words: str, gpt2: GPT2LMHeadModel, tmp_path: Path
) -> None:
    assert words in refusal(write(tmp_path / "gpt", gpt2, 3.0, **change))


def test_what_is_missing_is_named(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    source = write(tmp_path / "gpt", gpt2, 3.0, (2, 2))
    (source / "gpt2-merges.txt").unlink()
    assert "put gpt2-vocab.json and gpt2-merges.txt" in refusal(source)
    (source / "iter_0000500/mp_rank_01_000/model_optim_rng.pt").unlink()
    assert "lacks the files of the training ranks (tensor, pipeline) (1, 0)" in refusal(source)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"model0": {}, "model1": {}}, "has no position embeddings"),
        ({"model1": {}}, "holds model1 instead of model"),
        ({"weights": 1}, "holds something else instead of model"),
        ([1], "holds something else instead of model"),
    ],
)
def test_contents_of_another_kind(saved: Any, words: str, gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    source = write(tmp_path / "gpt", gpt2, 3.0)
    torch.save(saved, source / "iter_0000500/mp_rank_00/model_optim_rng.pt")
    assert words in refusal(source)


def test_unknown_version_and_unknown_key(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    source = write(tmp_path / "gpt", gpt2, 3.0)
    file = source / "iter_0000500/mp_rank_00/model_optim_rng.pt"
    saved = with_arguments(content(gpt2, 3.0, (1, 1), (0, 0)), 3.0, (1, 1))
    torch.save({**saved, "adapters": {}}, file)
    assert "adapters  is not a tensor and has no rule" in refusal(source)
    torch.save({**saved, "checkpoint_version": 4.0}, file)
    assert "has checkpoint_version 4.0" in refusal(source)
