"""LoRA adapters of Mixtral: those of attention and of experts, PEFT's and NeMo's, are merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints.core_adapters import APART, Products, expert_products
from support.checkpoints.llama_adapters import ALPHA, RANK
from support.checkpoints.llama_configs import nemo1, padded_vocabulary
from support.checkpoints.llama_files import write_archive
from support.checkpoints.llama_state import core_state
from support.checkpoints.nemo_archive import write_nemo
from support.tiny_models.huggingface_models import filling
from support.tiny_models.llama_models import save, saved, tensors
from support.tiny_models.peft_output import assert_holds

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.user_files import GivenFiles
from export_scripts.convert import convert
from handover.errors import CheckpointError

ADAPTED = (".self_attn.o_proj.weight", ".experts.1.w1.weight", ".experts.1.w2.weight", ".experts.3.w3.weight")


def products(*suffixes: str) -> Products:
    """Two thin matrices for each weight whose name ends so, by transformers' name."""
    weights = {key: value for key, value in saved("mixtral").tensors.items() if key.endswith(suffixes)}
    assert len(weights) == 2 * len(suffixes)
    return {
        key: tuple(torch.from_numpy(filling(f"{key} {n}", shape)) for n, shape in enumerate(shapes))  # type: ignore[misc]
        for key, value in weights.items()
        for shapes in [((RANK, value.shape[1]), (value.shape[0], RANK))]
    }


def assert_merged(model: Path, adapter: Path, added: Products, output: Path) -> None:
    convert(ConvertArguments(model, output, weight_data_type="fp32", adapter=adapter, format="huggingface"))
    made = tensors(output)
    for key, weight in saved("mixtral").tensors.items():
        wanted = weight.double()
        if key in added:
            down, up = added[key]
            wanted = wanted + ALPHA / RANK * up.double() @ down.double()
        assert (made[key] - wanted).abs().max() < 1e-6, key


def test_pefts_adapter_of_attention_and_experts(tmp_path: Path) -> None:
    save("mixtral", tmp_path / "model")
    added, adapter = products(*ADAPTED), tmp_path / "adapter"
    adapter.mkdir()
    named = {
        f"base_model.model.{key.removesuffix('weight')}lora_{letter}.weight": value
        for key, pair in added.items()
        for letter, value in zip("AB", pair, strict=True)
    }
    save_file(named, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["o_proj", "w1", "w2", "w3"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert_merged(tmp_path / "model", adapter, added, tmp_path / "out")


def nemos(folder: Path, *states: dict[str, torch.Tensor]) -> Path:
    lora = {"adapter_dim": RANK, "alpha": ALPHA, "variant": "nemo", "target_modules": ["all"], "weight_tying": False}
    peft, ranks = {"peft_scheme": "lora", "lora_tuning": lora}, len(states)
    files = {
        f"mp_rank_{rank:02d}/model_weights.ckpt" if ranks > 1 else "model_weights.ckpt": state
        for rank, state in enumerate(states)
    }
    return write_nemo(folder / "adapter.nemo", nemo1(saved("mixtral").config, (ranks, 1), peft=peft), files, files={})


def nemos_model(folder: Path) -> Path:
    source = saved("mixtral")
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, 1))
    return write_archive(folder / "model.nemo", nemo1(source.config), state, prefix="model.module.")


def test_nemos_adapter_of_attention(tmp_path: Path) -> None:
    added = products(".self_attn.o_proj.weight")
    state = {}
    for key, (down, up) in added.items():
        place = f"model.decoder.{key.split('.self_attn')[0].removeprefix('model.')}.self_attention.adapter_layer."
        place += "lora_dense_attention_adapter.linear_"
        state |= {f"{place}in.weight": down, f"{place}out.weight": up}
    assert_merged(nemos_model(tmp_path), nemos(tmp_path, state), added, tmp_path / "out")


def of_experts(ranks: int) -> tuple[Products, list[dict[str, torch.Tensor]]]:
    """Every expert's adapters, and each rank's keys: an expert has adapters for all experts and uses its own."""
    added = expert_products("mixtral", APART)
    states: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
    for key, (down, up) in added.items():
        layer, expert, role = (key.split(".")[n] for n in (2, 5, 6))
        if role == "w3":
            continue
        kind = "moe_4htoh" if role == "w2" else "moe_hto4h"
        other = added[key.replace(".w1.", ".w3.")][1]
        for rank, state in enumerate(states):
            out = torch.cat([each.chunk(ranks)[rank] for each in ((up, other) if role == "w1" else (up,))])
            into = down.chunk(ranks, int(role == "w2"))[rank]
            for number in range(4):
                place = f"model.decoder.layers.{layer}.mlp.experts.local_experts.{expert}.adapter_layer."
                place += f"lora_{kind}_adapter.expert_adapters.{number}.linear_"
                pair = (into, out) if number == int(expert) else (torch.ones_like(into), torch.ones_like(out))
                state |= {f"{place}{side}.weight": one for side, one in zip(("in", "out"), pair, strict=True)}
    return added, states


@pytest.mark.parametrize(("ranks", "base"), [(1, "NeMo"), (2, "NeMo"), (2, "hub")])
def test_nemos_adapters_of_experts(ranks: int, base: str, tmp_path: Path) -> None:
    added, states = of_experts(ranks)
    adapter = nemos(tmp_path, *states)
    save("mixtral", tmp_path / "base")
    model = tmp_path / "base" if base == "hub" else nemos_model(tmp_path)
    assert_merged(model, adapter, added, tmp_path / "out")
    convert(ConvertArguments(model, tmp_path / "peft", weight_data_type="fp32", adapter=adapter, format="peft"))
    assert_holds(tmp_path / "peft", added)


@pytest.mark.parametrize(
    "place",
    [
        "mlp.experts.adapter_layer.lora_moe_hto4h_adapter.",
        "mlp.experts.local_experts.1.adapter_layer.lora_hto4h_adapter.",
        "mlp.adapter_layer.lora_hto4h_adapter.expert_adapters.1.",
    ],
)
def test_other_keys_of_experts_are_refused(place: str, tmp_path: Path) -> None:
    key = f"model.decoder.layers.0.{place}linear_in.weight"
    adapter = nemos(tmp_path, {key: torch.zeros(RANK, 64)})
    with pytest.raises(CheckpointError, match="is no part of a LoRA adapter that is read"):
        open_source(find_archive(nemos_model(tmp_path), GivenFiles(adapter=adapter)))
