"""Hugging Face's T5 family against what others computed: FasterTransformer's bytes and transformers' logits."""

from __future__ import annotations

import configparser
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file as save_safetensors
from support.checkpoints.nemo_archive import DATA, NEMO, load_file
from support.shards.t5_forward import T5
from support.tiny_models.t5_models import DECODER_IDS, ENCODER_IDS, huggingface_t5, logits_of

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from handover.errors import CheckpointError

FT = json.loads((DATA / "ft_huggingface_t5_digests.json").read_text())
MODELS: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5_v1_1": {"is_untied": True, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": {"is_multilingual": True, "is_untied": True, "feed_forward_proj": "gated-gelu"},
    "ul2": {"is_untied": True, "feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
}


def run(checkpoint: Path, output: Path, ranks: int = 1, data_type: str = "fp32") -> Path:
    convert(ConvertArguments(checkpoint, output, ranks, data_type))
    return output


def saved(path: Path, **changes: Any) -> tuple[Path, Any]:
    model = huggingface_t5(**changes)
    model.save_pretrained(path)
    return path, model


def error(root: Path, model: Any) -> float:
    return float(np.abs(T5(root).forward(ENCODER_IDS, DECODER_IDS) - logits_of(model)).max())


def sections(root: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser()
    parser.read(root / "config.ini")
    return {name: dict(parser[name]) for name in parser.sections()}


def edit(path: Path, **changes: Any) -> None:
    """Change keys of config.json; None drops one."""
    config = {**json.loads((path / "config.json").read_text()), **changes}
    kept = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize(("name", "ranks"), [key.removesuffix("-gpu").split("/") for key in FT if "/" in key[:9]])
def test_every_byte_is_that_of_fastertransformers_converter(name: str, ranks: str, tmp_path: Path) -> None:
    out, oracle = (
        run(saved(tmp_path / "hf", **MODELS[name])[0], tmp_path / "out", int(ranks)),
        FT[f"{name}/{ranks}-gpu"],
    )
    made = {p.name: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in out.iterdir()}
    expected = oracle["files"]
    del expected["shared.weight.bin"]  # the embedding turned around, which no loader of FasterTransformer reads
    assert made.keys() - expected.keys() == {"config.ini", "manifest.json"}
    assert {file: made[file] for file in expected} == expected


READ_BY_FT = {
    "encoder": ("num_heads", "d_kv", "d_model", "d_ff", "num_layers", "vocab_size", "feed_forward_proj"),
    "decoder": ("num_heads", "d_kv", "d_model", "d_ff", "num_layers", "vocab_size", "eos_token_id", "weight_data_type"),
}


@pytest.mark.parametrize("name", ["t5", "t5_v1_1", "mt5", "ul2"])
def test_what_fastertransformer_reads_of_config_ini_is_what_its_converter_writes(name: str, tmp_path: Path) -> None:
    written, oracle = sections(run(saved(tmp_path / "hf", **MODELS[name])[0], tmp_path / "out", 2)), FT[f"{name}/2-gpu"]
    for section, keys in READ_BY_FT.items():
        keys = (*keys, "relative_attention_num_buckets_or_max_pos_seq_len")
        assert {key: written[section][key] for key in keys} == {key: oracle["config"][section][key] for key in keys}
    assert written["decoder"]["decoder_start_token_id"] == "0"
    expected = {"t5_with_bias": "False", "position_embedding_type": "relative"}
    assert written["structure"] == {**expected, "use_gated_activation": str(name != "t5")}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_shards_compute_transformers_logits(name: str, ranks: int, tmp_path: Path) -> None:
    checkpoint, model = saved(tmp_path / "hf", **MODELS[name])
    assert error(run(checkpoint, tmp_path / "out", ranks), model) < 1e-4


@pytest.mark.parametrize("name", ["gelu_pytorch_tanh", "gelu_fast", "gated-gelu_pytorch_tanh", "gated-gelu_new"])
def test_each_name_of_the_tanh_gelu_is_known(name: str, tmp_path: Path) -> None:
    checkpoint, model = saved(tmp_path / "hf", feed_forward_proj=name)
    out = run(checkpoint, tmp_path / "out")
    assert error(out, model) < 1e-4
    assert sections(out)["encoder"]["feed_forward_proj"] == ("gated-gelu" if name.startswith("gated-") else "gelu")


def test_tied_embeddings_that_are_not_scaled(tmp_path: Path) -> None:
    """flan-T5's way saved by transformers 5, when the two are no longer one setting."""
    checkpoint, model = saved(tmp_path / "hf", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    out = run(checkpoint, tmp_path / "out", 2)
    assert error(out, model) < 1e-4
    assert sections(out)["decoder"]["tie_word_embeddings"] == "False"


@pytest.mark.parametrize(
    ("family", "changes", "is_scaled"),
    [
        (
            "t5",
            {"scale_decoder_outputs": None, "tie_word_embeddings": False, "transformers_version": "4.41.0"},
            "False",
        ),
        ("t5", {"scale_decoder_outputs": None, "tie_word_embeddings": None, "transformers_version": "4.7.0"}, "True"),
        ("mt5", {"tie_word_embeddings": False, "transformers_version": "4.10.0.dev0"}, "False"),
        ("mt5", {"tie_word_embeddings": True, "transformers_version": "4.30.0"}, "True"),
        ("mt5", {"tie_word_embeddings": True, "transformers_version": "5.1.0"}, "False"),
    ],
)
def test_scaling_of_logits_is_what_that_transformers_did(
    family: str, changes: dict[str, Any], is_scaled: str, tmp_path: Path
) -> None:
    """transformers 4: ``if self.config.tie_word_embeddings: sequence_output *= d_model**-0.5``, in both families."""
    has_head = changes["tie_word_embeddings"] is False
    checkpoint, _ = saved(tmp_path / "hf", **{**MODELS[family], "is_untied": has_head})
    edit(checkpoint, **changes)
    assert sections(run(checkpoint, tmp_path / "out"))["decoder"]["tie_word_embeddings"] == is_scaled


def test_pytorch_files_with_copies_and_an_unused_bias(tmp_path: Path) -> None:
    """The first T5 files: every copy of the embedding is there, and positions of the cross attention."""
    checkpoint, model = saved(tmp_path / "hf")
    (checkpoint / "model.safetensors").unlink()
    state = dict(model.state_dict())
    assert {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"} < state.keys()
    state["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(8, 4)
    names = sorted(state)
    shards = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
    for file, keys in shards.items():
        torch.save({key: state[key] for key in keys}, checkpoint / file)
    weight_map = {key: file for file, keys in shards.items() for key in keys}
    (checkpoint / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert error(run(checkpoint, tmp_path / "out", 2), model) < 1e-4


@pytest.mark.parametrize("kept", ["encoder", "decoder"])
def test_the_embedding_may_be_there_under_the_name_of_a_copy(kept: str, tmp_path: Path) -> None:
    """A safetensors file holds one of the tied names, and which one has changed with its writer."""
    checkpoint, model = saved(tmp_path / "hf")
    state = load_safetensors(checkpoint / "model.safetensors")
    state[f"{kept}.embed_tokens.weight"] = state.pop("shared.weight")
    save_safetensors(state, checkpoint / "model.safetensors")
    assert error(run(checkpoint, tmp_path / "out", 2), model) < 1e-4


@pytest.mark.parametrize("data_type", ["fp16", "bf16"])
def test_half_precision_is_transformers_cast(data_type: str, tmp_path: Path) -> None:
    checkpoint, model = saved(tmp_path / "hf")
    out = run(checkpoint, tmp_path / "out", 1, data_type)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[data_type]
    expected = model.shared.weight.detach().to(dtype).view(torch.uint8).numpy().tobytes()
    assert (out / "shared.weight_T.bin").read_bytes() == expected
    assert (out / "lm_head.weight.bin").read_bytes() == expected


def test_tokenizer_files_and_ids(tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path / "hf", pad_token_id=3, eos_token_id=[4, 9], decoder_start_token_id=None)
    model = load_file(NEMO / "gpt_spm.nemo", ".model")
    (checkpoint / "spiece.model").write_bytes(model)
    described = '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
    (checkpoint / "tokenizer.json").write_text(described)
    out = run(checkpoint, tmp_path / "out")
    assert (out / "tokenizer.model").read_bytes() == model
    assert (out / "tokenizer.json").read_text() == described
    decoder = sections(out)["decoder"]
    assert (decoder["decoder_start_token_id"], decoder["eos_token_id"], decoder["pad_id"]) == ("3", "4", "3")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"feed_forward_proj": "gated-tanh", "dense_act_fn": None, "is_gated_act": None},
            "feed_forward_proj: gated-tanh  (it has relu",
        ),
        ({"relative_attention_max_distance": 64}, "relative_attention_max_distance: 64  (it computes with 128)"),
        ({"model_type": "umt5"}, "model_type: umt5  (it has relative positions in the first layer alone"),
        ({"num_heads": 2}, "gives encoder.block.0.layer.0.SelfAttention"),
        ({"d_model": "wide"}, "d_model is 'wide', not a positive number"),
    ],
)
def test_what_cannot_be_expressed_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path / "hf")
    edit(checkpoint, **changes)
    with pytest.raises(CheckpointError) as refused:
        inspect_source(checkpoint, 1, "fp32")
    assert words in str(refused.value)


def test_an_encoder_alone_is_refused(tmp_path: Path) -> None:
    model = huggingface_t5()
    import transformers

    encoder = transformers.T5EncoderModel(model.config)
    encoder.save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="has no decoder"):
        inspect_source(tmp_path / "hf", 1, "fp32")


def test_ranks_must_divide_heads_and_feed_forward(tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="tensor_para_size 3 does not divide the model's 4 heads"):
        inspect_source(checkpoint, 3, "fp32")
