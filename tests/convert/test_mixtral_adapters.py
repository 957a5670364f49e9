"""LoRA adapters of Mixtral: those of attention and PEFT's of experts are merged, NeMo's of experts refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.huggingface_models import filling
from support.llama_configs import nemo1, padded_vocabulary
from support.llama_files import write_archive
from support.llama_models import save, saved, tensors
from support.llama_state import core_state
from support.nemo_archive import write_nemo

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.user_files import GivenFiles
from export_scripts.convert import convert
from handover.errors import CheckpointError

RANK, ALPHA = 4, 6.0
ADAPTED = (".self_attn.o_proj.weight", ".experts.1.w1.weight", ".experts.1.w2.weight", ".experts.3.w3.weight")
Products = dict[str, tuple[torch.Tensor, torch.Tensor]]


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


def nemos(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    lora = {"adapter_dim": RANK, "alpha": ALPHA, "variant": "nemo", "target_modules": ["all"], "weight_tying": False}
    config = nemo1(saved("mixtral").config, peft={"peft_scheme": "lora", "lora_tuning": lora})
    return write_nemo(folder / "adapter.nemo", config, {"model_weights.ckpt": state}, files={})


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


@pytest.mark.parametrize(
    "place",
    [
        "mlp.experts.adapter_layer.lora_moe_hto4h_adapter.expert_adapters.1.",
        "mlp.experts.local_experts.1.adapter_layer.lora_hto4h_adapter.",
    ],
)
def test_nemos_adapters_of_experts_are_refused(place: str, tmp_path: Path) -> None:
    key = f"model.decoder.layers.0.{place}linear_in.weight"
    adapter = nemos(tmp_path, {key: torch.zeros(RANK, 64)})
    with pytest.raises(CheckpointError) as refused:
        open_source(find_archive(nemos_model(tmp_path), GivenFiles(adapter=adapter)))
    assert f"{key} changes an expert of a mixture, and such adapters are not merged" in refused.value.problem
    assert "merge it with NeMo" in str(refused.value.hint)
