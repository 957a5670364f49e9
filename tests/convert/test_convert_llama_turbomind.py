"""TurboMind's early directories, written by the rules of lmdeploy's deploy.py, give the bytes of the original model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models.llama_hub_models import save_llama

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from handover.errors import CheckpointError

HEADS, KV, SIZE, HIDDEN, INTER = 8, 4, 8, 64, 96
INI = {
    "model_name": "llama",
    "head_num": HEADS,
    "kv_head_num": KV,
    "size_per_head": SIZE,
    "vocab_size": 96,
    "num_layer": 4,
    "rotary_embedding": SIZE,
    "rope_theta": 10000.0,
    "inter_size": INTER,
    "norm_eps": 1e-6,
    "attn_bias": 0,
    "start_id": 5,
    "end_id": 7,
    "weight_type": "fp16",
    "max_position_embeddings": 64,
    "use_dynamic_ntk": 0,
    "use_logn_attn": 0,
}


def in_pairs(weight: torch.Tensor) -> torch.Tensor:
    """``permute`` of deploy.py, of a transposed weight [in, heads * size] or a bias."""
    shape = weight.shape
    halves = weight.reshape(*shape[:-1], -1, 2, SIZE // 2)
    return halves.transpose(-1, -2).reshape(shape)


def write(model: Path, root: Path, ranks: int, **changes: object) -> Path:
    """Write a model that transformers saved as deploy.py does: weights turned around, a file a rank."""
    state = load_file(model / "model.safetensors")
    weights = root / "triton_models/weights"
    weights.mkdir(parents=True)
    has_bias = "model.layers.0.self_attn.q_proj.bias" in state
    ini = {**INI, "attn_bias": int(has_bias), "tensor_para_size": ranks, **changes}
    (weights / "config.ini").write_text("\n".join(["[llama]", *(f"{key} = {value}" for key, value in ini.items()), ""]))

    def save(name: str, value: torch.Tensor) -> None:
        (weights / name).write_bytes(value.contiguous().numpy().tobytes())

    for name, key in (("tok_embeddings", "model.embed_tokens"), ("norm", "model.norm"), ("output", "lm_head")):
        save(f"{name}.weight", state[f"{key}.weight"])
    for layer in range(4):
        own, base = f"layers.{layer}.", f"model.layers.{layer}."
        save(f"{own}attention_norm.weight", state[f"{base}input_layernorm.weight"])
        save(f"{own}ffn_norm.weight", state[f"{base}post_attention_layernorm.weight"])
        for kind in ("weight", "bias") if has_bias else ("weight",):
            stored = (state[f"{base}self_attn.{letter}_proj.{kind}"] for letter in "qkv")
            q, k, v = (each.T if kind == "weight" else each for each in stored)
            parts = [each.chunk(ranks, -1) for each in (in_pairs(q), in_pairs(k), v)]
            for rank in range(ranks):
                save(f"{own}attention.w_qkv.{rank}.{kind}", torch.cat([part[rank] for part in parts], -1))
        for rank, part in enumerate(state[f"{base}self_attn.o_proj.weight"].T.chunk(ranks, 0)):
            save(f"{own}attention.wo.{rank}.weight", part)
            if has_bias:
                save(f"{own}attention.wo.{rank}.bias", state[f"{base}self_attn.o_proj.bias"])
        for name, key, axis in (("w1", "gate_proj", 1), ("w3", "up_proj", 1), ("w2", "down_proj", 0)):
            for rank, part in enumerate(state[f"{base}mlp.{key}.weight"].T.chunk(ranks, axis)):
                save(f"{own}feed_forward.{name}.{rank}.weight", part)
    return root


def shards(source: Path, output: Path, ranks: int) -> dict[str, bytes]:
    convert(ConvertArguments(source, output, ranks, "fp16", processes=1))
    return {path.name: path.read_bytes() for path in output.glob("*.bin")}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("written_for", [1, 2, 4])
def test_the_directory_of_hugging_face_is_the_original_model(written_for: int, has_bias: bool, tmp_path: Path) -> None:
    save_llama("llama 2 70B", tmp_path / "hub", dtype=torch.float16, attention_bias=has_bias)
    workspace, made = write(tmp_path / "hub", tmp_path / "workspace", written_for), tmp_path / "made"
    convert(ConvertArguments(workspace, made, 1, "fp16", processes=1, format="huggingface"))
    found, wanted = (load_file(folder / "model.safetensors") for folder in (made, tmp_path / "hub"))
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize(("written_for", "ranks"), [(1, 2), (4, 1)])
def test_shards_are_those_of_the_original_model(written_for: int, ranks: int, tmp_path: Path) -> None:
    save_llama("llama 2 70B", tmp_path / "hub", dtype=torch.float16)
    workspace = write(tmp_path / "hub", tmp_path / "workspace", written_for)
    wanted = shards(tmp_path / "hub", tmp_path / f"a/{ranks}-gpu", ranks)
    made = shards(workspace, tmp_path / f"b/{ranks}-gpu", ranks)
    assert made.keys() == wanted.keys()
    assert [name for name in wanted if made[name] != wanted[name]] == []


def test_its_ids_and_sizes_are_those_of_its_configuration(tmp_path: Path) -> None:
    save_llama("llama 2 70B", tmp_path / "hub", dtype=torch.float16)
    weights = write(tmp_path / "hub", tmp_path / "workspace", 2) / "triton_models/weights"
    source = open_source(find_archive(weights))
    assert (source.ids.start_id, source.ids.end_id, source.dims.axis_size("kv_head_num")) == (5, 7, KV)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_type": "int4"}, "weight_type = int4"),
        ({"use_dynamic_ntk": 1}, "use_dynamic_ntk = 1"),
        ({"use_logn_attn": 1}, "use_logn_attn = 1"),
        ({"inter_size": 100}, "feed_forward.w1.0.weight  has"),
        ({"num_layer": 3}, "layers.3.attention.w_qkv.0.weight  belongs to no tensor"),
    ],
)
def test_what_it_cannot_be_is_refused_by_key(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    save_llama("llama 2 70B", tmp_path / "hub", dtype=torch.float16)
    with pytest.raises(CheckpointError) as refused:
        inspect_source(write(tmp_path / "hub", tmp_path / "workspace", 2, **changes), 1, "fp16")
    assert words in str(refused.value)


def test_packed_and_unknown_files_are_refused(tmp_path: Path) -> None:
    save_llama("llama 2 70B", tmp_path / "hub", dtype=torch.float16)
    workspace = write(tmp_path / "hub", tmp_path / "workspace", 2)
    (workspace / "triton_models/weights/layers.0.attention.wo.0.qweight").write_bytes(b"12")
    with pytest.raises(CheckpointError, match="attention.wo.0.qweight\n.*4-bit weights are packed"):
        inspect_source(workspace, 1, "fp16")


def test_the_shards_of_a_converter_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    save_llama("llama", tmp_path / "hub", dtype=torch.float16)
    shards(tmp_path / "hub", tmp_path / "2-gpu", 2)
    (tmp_path / "2-gpu/manifest.json").unlink()
    for path in (tmp_path / "2-gpu").glob("*attention.dense*"):
        path.rename(path.with_name(path.name.replace("attention.dense", "self_attn.o_proj")))
    with pytest.raises(CheckpointError, match=r"self_attn.o_proj: they were written by cameronfr's converter"):
        inspect_source(tmp_path / "2-gpu", 1, "fp16")
