"""NeMo's T5 and mT5 against what others computed: FasterTransformer's bytes, NeMo's and Hugging Face's logits."""

from __future__ import annotations

import configparser
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.checkpoints.nemo_archive import DATA, NEMO, write_nemo
from support.shards.t5_forward import T5
from support.tiny_models.t5_models import (
    DECODER_IDS,
    ENCODER_IDS,
    HEADS,
    INTER,
    VOCABULARY,
    WIDTH,
    Saving,
    huggingface_t5,
    logits_of,
    nemo_states,
    plain_from_huggingface,
    plain_from_nemo,
    relative_config,
)

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from handover.errors import CheckpointError

FT = json.loads((DATA / "ft_t5_abs_digests.json").read_text())
ACTIVATIONS = {"gated-gelu": "geglu", "gated-silu": "swiglu", "gated-relu": "reglu", "relu": "relu"}


def run(checkpoint: Path, output: Path, ranks: int = 1, data_type: str = "fp32") -> Path:
    convert(ConvertArguments(checkpoint, output, ranks, data_type))
    return output


def sections(root: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser()
    parser.read(root / "config.ini")
    return {name: dict(parser[name]) for name in parser.sections()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_byte_is_that_of_fastertransformers_converter(ranks: int, tmp_path: Path) -> None:
    out, oracle = run(NEMO / "t5_abs.nemo", tmp_path / "out", ranks), FT[f"fp32/{ranks}-gpu"]
    made = {p.name: "sha256:" + hashlib.sha256(p.read_bytes()).hexdigest() for p in out.iterdir()}
    assert made.keys() - oracle["files"].keys() == {"config.ini", "manifest.json"}
    assert {name: made[name] for name in oracle["files"]} == oracle["files"]
    written = sections(out)
    assert written.keys() == oracle["config"].keys()
    for section, values in oracle["config"].items():
        kept = {key: value for key, value in values.items() if key != "_name_or_path"}  # the name its caller gave
        assert kept.items() <= written[section].items()


def nemo_sample() -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, bytes]]:
    """Configuration, weights and tokenizer of the file that NeMo wrote."""
    with tarfile.open(NEMO / "t5_abs.nemo") as tar:
        files = {member.name[2:]: tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]
    config = yaml.safe_load(files.pop("model_config.yaml"))
    return config, torch.load(io.BytesIO(files.pop("model_weights.ckpt")), weights_only=True), files


def nemo_error(root: Path) -> float:
    ids = (np.load(NEMO / f"t5_abs.{side}_ids.npy") for side in ("enc", "dec"))
    return float(np.abs(T5(root).forward(*ids) - np.load(NEMO / "t5_abs.logits.npy")).max())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_compute_nemos_logits(ranks: int, tmp_path: Path) -> None:
    assert nemo_error(run(NEMO / "t5_abs.nemo", tmp_path / "out", ranks)) < 1e-5


def test_a_reference_and_a_tokenizer_without_padding(tmp_path: Path) -> None:
    """The launcher's configurations say ``max_position_embeddings: ${.seq_length}``; GPT-2's BPE has no padding."""
    config, state, _ = nemo_sample()
    config["max_position_embeddings"] = "${.seq_length}"
    tokenizer = {"library": "megatron", "type": "GPT2BPETokenizer"}
    config["tokenizer"] = {**tokenizer, "vocab_file": "nemo:vocab.json", "merge_file": "nemo:merges.txt"}
    out = run(write_nemo(tmp_path / "t5.nemo", config, {"model_weights.ckpt": state}), tmp_path / "out")
    assert nemo_error(out) < 1e-5
    assert "pad_id" not in sections(out)["decoder"]
    assert sections(out)["decoder"]["decoder_start_token_id"] == "3"


@pytest.mark.parametrize(
    "saving",
    [
        Saving(tensor=2),
        Saving(pipeline=4),
        Saving(tensor=2, pipeline=2, has_wrapper=True),
        Saving(tensor=4, is_legacy=True),
        Saving(tensor=2, has_norm_less_one=True),
    ],
    ids=str,
)
def test_the_same_model_saved_otherwise_gives_nemos_logits(saving: Saving, tmp_path: Path) -> None:
    config, state, files = nemo_sample()
    config |= {"tensor_model_parallel_size": saving.tensor, "pipeline_model_parallel_size": saving.pipeline}
    for side in ("encoder", "decoder"):
        config[side]["megatron_legacy"] = saving.is_legacy
        config[side]["normalization"] = "layernorm1p" if saving.has_norm_less_one else "layernorm"
    states = nemo_states(plain_from_nemo(state, heads=4), 4, saving)
    out = run(write_nemo(tmp_path / "t5.nemo", config, states, files=files), tmp_path / "out", 2)
    assert nemo_error(out) < 1e-5
    if not saving.has_norm_less_one:  # - 1 + 1 rounds
        files_made = {p.name for p in out.iterdir()} - {"config.ini", "manifest.json"}
        assert files_made == FT["fp32/2-gpu"]["files"].keys()
        for name, digest in FT["fp32/2-gpu"]["files"].items():
            assert "sha256:" + hashlib.sha256((out / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize(
    ("saving", "kind", "is_untied"),
    [
        (Saving(), "gated-gelu", True),
        (Saving(tensor=2), "gated-silu", True),
        (Saving(tensor=2, pipeline=4), "gated-relu", False),
        (Saving(tensor=2, has_fused_gate=True), "gated-gelu", False),
        (Saving(pipeline=2), "relu", True),
    ],
)
def test_relative_positions_and_gates_give_hugging_faces_logits(
    saving: Saving, kind: str, is_untied: bool, tmp_path: Path
) -> None:
    """Hugging Face's weights as NeMo would keep them; NeMo never scales logits, so the model does not either."""
    model = huggingface_t5(is_multilingual=True, is_untied=is_untied, feed_forward_proj=kind, num_decoder_layers=4)
    config = relative_config(saving, ACTIVATIONS[kind])
    states = nemo_states(plain_from_huggingface(model), HEADS, saving)
    checkpoint = write_nemo(tmp_path / "t5.nemo", config, states, files=VOCABULARY)
    for ranks in (1, 4):
        out = run(checkpoint, tmp_path / f"out{ranks}", ranks)
        assert np.abs(T5(out).forward(ENCODER_IDS, DECODER_IDS) - logits_of(model)).max() < 1e-4
    decoder = sections(out)["decoder"]
    assert (decoder["decoder_start_token_id"], decoder["eos_token_id"], decoder["pad_id"]) == ("2", "3", "0")
    assert (out / "vocab.txt").read_bytes() == VOCABULARY["vocab.txt"]


def test_keys_on_top_hold_for_both_sides(tmp_path: Path) -> None:
    model = huggingface_t5(is_multilingual=True, feed_forward_proj="gated-gelu", num_decoder_layers=2)
    states = nemo_states(plain_from_huggingface(model), HEADS, Saving())
    checkpoint = write_nemo(
        tmp_path / "t5.nemo", relative_config(Saving(), "geglu", is_flat=True), states, files=VOCABULARY
    )
    out = run(checkpoint, tmp_path / "out", 2)
    assert np.abs(T5(out).forward(ENCODER_IDS, DECODER_IDS) - logits_of(model)).max() < 1e-4


def test_biases_of_a_gate_are_split_with_it_and_missing_ones_are_zeros(tmp_path: Path) -> None:
    model = huggingface_t5(is_multilingual=True, feed_forward_proj="gated-gelu", num_decoder_layers=4)
    plain = plain_from_huggingface(model)
    for name in list(plain):
        if "DenseReluDense.wi" in name:
            plain[name.replace("weight", "bias")] = torch.arange(INTER, dtype=torch.float32) + ("wi_1" in name) * 100
    config = relative_config(
        Saving(tensor=2), "geglu", normalization="layernorm", bias=None, normalize_attention_scores=True
    )
    states = nemo_states(plain, HEADS, Saving(tensor=2))
    out = run(write_nemo(tmp_path / "t5.nemo", config, states, files=VOCABULARY), tmp_path / "out", 4)
    name = "decoder.block.3.layer.2.DenseReluDense"
    for rank in range(4):
        local = np.arange(rank * INTER // 4, (rank + 1) * INTER // 4)
        assert np.fromfile(out / f"{name}.wi.bias.{rank}.bin", "<f4").tolist() == local.tolist()
        assert np.fromfile(out / f"{name}.wi2.bias.{rank}.bin", "<f4").tolist() == (local + 100).tolist()
    assert np.fromfile(out / f"{name}.wo.bias.bin", "<f4").tolist() == [0.0] * WIDTH
    assert sections(out)["structure"]["t5_with_bias"] == "True"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("arch", "perceiver"),
        ("activation", "squared-relu"),
        ("normalization", "batchnorm"),
        ("position_embedding_type", "alibi"),
        ("transformer_block_type", "normformer"),
        ("headscale", True),
        ("num_moe_experts", 4),
        ("bias", True),
        ("normalize_attention_scores", True),
        ("relative_position_bias_self_attention_only", False),
    ],
)
def test_architecture_is_refused_by_key_and_value(key: str, value: Any, tmp_path: Path) -> None:
    config = relative_config(Saving(), "geglu")
    config["encoder"][key] = value
    with pytest.raises(CheckpointError, match=f"encoder.{key}: {value}  \\("):
        inspect_source(write_nemo(tmp_path / "t5.nemo", config, {}, files=VOCABULARY), 1, "fp16")


def test_sides_that_differ_and_embeddings_apart_are_refused(tmp_path: Path) -> None:
    config = {**relative_config(Saving(), "geglu"), "share_token_embeddings": False}
    config["decoder"]["hidden_size"] = 48
    with pytest.raises(CheckpointError) as refused:
        inspect_source(write_nemo(tmp_path / "t5.nemo", config, {}, files=VOCABULARY), 1, "fp16")
    assert "encoder.hidden_size: 24, decoder.hidden_size: 48" in str(refused.value)
    assert "share_token_embeddings: False" in str(refused.value)


def test_a_key_without_a_rule_is_named(tmp_path: Path) -> None:
    model = huggingface_t5(is_multilingual=True, feed_forward_proj="gated-gelu", num_decoder_layers=4)
    states = nemo_states(plain_from_huggingface(model), HEADS, Saving())
    states["model_weights.ckpt"]["enc_dec_model.hiddens_module.weight"] = torch.zeros(2)
    checkpoint = write_nemo(tmp_path / "t5.nemo", relative_config(Saving(), "geglu"), states, files=VOCABULARY)
    with pytest.raises(CheckpointError, match="hiddens_module.weight  \\[2\\]  has no rule"):
        inspect_source(checkpoint, 1, "fp16")
