"""Hugging Face's decoder-only models against transformers' logits and the bytes of FasterTransformer's converters."""

from __future__ import annotations

import configparser
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.shards.decoder_forward import forward
from support.tiny_models.huggingface_models import HIDDEN, LAYERS, build, filling, logits, save, write_tokenizer

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

FT: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/ft_huggingface_digests.json").read_text())["models"]
INPUT_IDS = np.array([[11, 3, 95, 0, 42, 17, 17, 8], [1, 2, 3, 90, 60, 30, 20, 5]])
SERIAL = {"use_parallel_residual": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
    "bloom": ("bloom", {}),
    "xglm": ("xglm", {}),
    "gptj": ("gptj", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox_serial": ("gpt_neox", SERIAL),
}


def run(source: Path, folder: Path, ranks: int = 1, data_type: str = "fp32") -> Path:
    output = folder / f"{ranks}-gpu"
    convert(ConvertArguments(source, output, ranks, data_type, processes=1))
    return output


def largest_difference(source: Path, model: Any, folder: Path, ranks: int = 1) -> float:
    output = run(source, folder, ranks)
    return float(np.abs(forward(output, INPUT_IDS) - logits(model, INPUT_IDS)).max())


@pytest.mark.parametrize("name", MODELS)
def test_shards_compute_transformers_logits(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    model = save(family, tmp_path / "source", **changes)
    assert logits(model, INPUT_IDS).std() > 0.5, "the model says something"
    for ranks in (1, 2, 4):
        assert largest_difference(tmp_path / "source", model, tmp_path / "out", ranks) < 1e-4


@pytest.mark.parametrize("name", FT)
def test_every_byte_is_that_of_fastertransformers_converter(name: str, tmp_path: Path) -> None:
    """All but what FasterTransformer's loader does not read, or reads and gets wrong; each is named here."""
    family, changes = MODELS[name]
    save(family, tmp_path / "source", **changes)
    for case, expected in FT[name].items():
        if case == "config":
            continue
        data_type, _, gpus = case.partition("/")
        root = run(tmp_path / "source", tmp_path / data_type, int(gpus.removesuffix("-gpu")), data_type)
        made = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in root.glob("*.bin")}
        not_written = set(expected) - set(made)
        if name == "opt":
            # A second copy of the embedding: without it FasterTransformer takes the embedding.
            assert not_written == {"model.lm_head.weight.bin"}
            assert expected["model.lm_head.weight.bin"] == expected["model.wte.bin"]
        elif name == "gpt_neox":
            # GptNeoXDecoderLayerWeight.cc reads only their sum.
            assert all(file.endswith(("attention.dense.bias.bin", "dense_4h_to_h.bias.bin")) for file in not_written)
            assert len(not_written) == 2 * LAYERS
        else:
            assert not not_written
        assert {file: digest for file, digest in made.items() if expected.get(file) != digest}.keys() == {
            f"model.layers.{layer}.{file}" for layer in range(LAYERS) for file in better(name, case)
        }


def better(name: str, case: str) -> tuple[str, ...]:
    """Files that FasterTransformer's converter gets wrong, or rounds twice."""
    if name == "gpt_neox_serial" and case != "fp32/1-gpu":
        # It divides them by the ranks, although nothing sums them over the ranks in this variant.
        return ("attention.dense.bias.bin", "mlp.dense_4h_to_h.bias.bin")
    if name == "gpt_neox" and case.startswith("fp16"):
        return ("mlp.attention.bias.sum.bin",)
    return ()


def test_sum_of_biases_is_rounded_once_and_divided_by_the_ranks(tmp_path: Path) -> None:
    save("gpt_neox", tmp_path / "source")
    names = ["gpt_neox.layers.1.attention.dense.bias", "gpt_neox.layers.1.mlp.dense_4h_to_h.bias"]
    total = sum(filling(name, (HIDDEN,)).astype(np.float64) for name in names)
    for ranks in (1, 2, 4):
        root = run(tmp_path / "source", tmp_path / "out", ranks, "fp16")
        made = np.fromfile(root / "model.layers.1.mlp.attention.bias.sum.bin", "<f2")
        assert made.tolist() == (total / ranks).astype(np.float32).astype(np.float16).tolist()


@pytest.mark.parametrize("name", FT)
def test_config_ini_says_what_fastertransformers_converter_says(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    save(family, tmp_path / "source", **changes)
    made = configparser.ConfigParser()
    made.read(run(tmp_path / "source", tmp_path) / "config.ini")
    for section, expected in FT[name]["config"].items():
        ours = {key: same(made[section][key]) for key in expected}
        assert ours == {key: same(value) for key, value in expected.items()}


def same(value: str) -> str | float:
    """Numbers by value; FasterTransformer reads True as 1."""
    try:
        return float({"True": "1", "False": "0"}.get(value, value))
    except ValueError:
        return value


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied head": ("gpt2", {"tie_word_embeddings": False}),
    "narrow feed-forward": ("gpt2", {"n_inner": 48}),
    "relu": ("gpt2", {"activation_function": "relu"}),
    "other epsilon": ("gpt2", {"layer_norm_epsilon": 1e-2}),
    "norm behind each block": ("opt", {"do_layer_norm_before": False}),
    "no biases": ("opt", {"enable_bias": False}),
    "untied OPT": ("opt", {"tie_word_embeddings": False}),
    "OPT-350m": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "OPT-350m, untied": ("opt", {"word_embed_proj_dim": 16, "tie_word_embeddings": False}),
    "heads that are no power of two": ("bloom", {"n_head": 12, "hidden_size": 48}),
    "untied BLOOM": ("bloom", {"tie_word_embeddings": False}),
    "embeddings as they are": ("xglm", {"scale_embedding": False}),
    "untied XGLM": ("xglm", {"tie_word_embeddings": False}),
    "keys for each head": ("gpt_bigcode", {"multi_query": False}),
    "whole heads turn": ("gptj", {"rotary_dim": 8}),
    "tied GPT-J": ("gptj", {"tie_word_embeddings": True}),
    "tied GPT-NeoX": ("gpt_neox", {"tie_word_embeddings": True}),
    "no biases in attention": ("gpt_neox", {"attention_bias": False}),
    "no biases in attention, serial": ("gpt_neox", {"attention_bias": False, **SERIAL}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_compute_transformers_logits(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    model = save(family, tmp_path / "source", **changes)
    assert largest_difference(tmp_path / "source", model, tmp_path / "out", 2) < 1e-4


@pytest.mark.parametrize("family", ["gpt2", "bloom", "opt", "gptj", "gpt_neox"])
@pytest.mark.parametrize("form", ["torch", "sharded", "sharded torch", "without prefix"])
def test_other_forms_of_the_files_give_the_same_bytes(family: str, form: str, tmp_path: Path) -> None:
    model = save(family, tmp_path / "plain")
    source = tmp_path / "source"
    source.mkdir()
    for file in ("config.json", "vocab.json", "merges.txt"):
        (source / file).write_bytes((tmp_path / "plain" / file).read_bytes())
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    state = {("embed_out.weight" if family == "gpt_neox" and "lm_head" in k else k): v for k, v in state.items()}
    if form == "without prefix":
        prefix = {"opt": "model.", "gpt_neox": "gpt_neox."}.get(family, "transformer.")
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    if form == "sharded":
        save(family, source, max_shard_size="40KB")
        assert len(list(source.glob("*.safetensors"))) > 1
    elif form == "sharded torch":
        halves = {
            "pytorch_model-1.bin": dict(list(state.items())[::2]),
            "pytorch_model-2.bin": dict(list(state.items())[1::2]),
        }
        for name, half in halves.items():
            torch.save(half, source / name)
        index = {"weight_map": {key: name for name, half in halves.items() for key in half}}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(state, source / "pytorch_model.bin")
    plain, other = run(tmp_path / "plain", tmp_path / "a", 2, "fp16"), run(source, tmp_path / "b", 2, "fp16")
    assert {p.name: p.read_bytes() for p in plain.glob("*.bin")} == {
        p.name: p.read_bytes() for p in other.glob("*.bin")
    }


@pytest.mark.parametrize("family", ["opt", "xglm"])
@pytest.mark.parametrize("data_type", ["fp32", "bf16"])
def test_bf16_weights_keep_their_values(family: str, data_type: str, tmp_path: Path) -> None:
    save(family, tmp_path / "source", dtype=torch.bfloat16)
    root = run(tmp_path / "source", tmp_path / "out", 1, data_type)
    name = "decoder.layers.0" if family == "opt" else "layers.0"
    weight = torch.from_numpy(filling(f"model.{name}.fc1.weight", (128, HIDDEN))).to(torch.bfloat16).T.contiguous()
    wanted = weight.view(torch.int16) if data_type == "bf16" else weight.float()
    assert (root / "model.layers.0.mlp.dense_h_to_4h.weight.0.bin").read_bytes() == wanted.numpy().tobytes()


def test_exact_gelu_is_near_and_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save("gpt_neox", tmp_path / "source", hidden_act="gelu")
    difference = largest_difference(tmp_path / "source", model, tmp_path / "out")
    assert 1e-5 < difference < 2e-2
    assert "exact GELU" in capsys.readouterr().err


def test_configuration_of_older_versions_is_read(tmp_path: Path) -> None:
    """Keys of the hub's files from before transformers 5."""
    model = save("gpt_neox", tmp_path / "source")
    path = tmp_path / "source/config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps({**config, "rotary_pct": 0.5, "rotary_emb_base": 10000, "rope_scaling": None}))
    assert largest_difference(tmp_path / "source", model, tmp_path / "out") < 1e-4
    model = save("bloom", tmp_path / "bloom")
    path = tmp_path / "bloom/config.json"
    config = json.loads(path.read_text())
    renamed = {"hidden_size": "n_embed", "n_head": "num_attention_heads"}
    path.write_text(json.dumps({renamed.get(key, key): value for key, value in config.items()}))
    assert largest_difference(tmp_path / "bloom", model, tmp_path / "bloom_out") < 1e-4


def test_buffers_and_tied_copies_are_ignored(tmp_path: Path) -> None:
    save("gpt2", tmp_path / "plain")
    model = build("gpt2")
    state = {**model.state_dict(), "lm_head.weight": model.transformer.wte.weight}
    for layer in range(LAYERS):
        state[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.bool)
        state[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((tmp_path / "plain/config.json").read_bytes())
    write_tokenizer(source)
    torch.save(state, source / "pytorch_model.bin")
    plain, other = run(tmp_path / "plain", tmp_path / "a"), run(source, tmp_path / "b")
    assert {p.name: p.read_bytes() for p in plain.glob("*.bin")} == {
        p.name: p.read_bytes() for p in other.glob("*.bin")
    }
    assert not (other / "model.lm_head.weight.bin").exists()
