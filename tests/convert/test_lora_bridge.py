"""LoRA adapters of Megatron-Bridge: transformers' logits with the products added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.checkpoints.core_adapters import BASE, CANONICAL, LORA, write_bridge, write_bridge_adapter
from support.checkpoints.llama_adapters import ALPHA, RANK, merged_logits, products
from support.checkpoints.llama_files import ChunkedArray
from support.tiny_models.llama_models import VOCAB, logits, saved, tensors
from support.tiny_models.peft_output import assert_holds

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.user_files import GivenFiles
from export_scripts.convert import convert
from handover.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def made_logits(model: Path, adapter: Path, output: Path) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    convert(ConvertArguments(model, output, 1, "fp32", adapter=adapter, format="huggingface"))
    return logits(AutoModelForCausalLM.from_pretrained(output, attn_implementation="eager"))


@pytest.mark.parametrize(
    ("name", "target", "ranks"),
    [
        ("llama", LORA, 1),
        ("qwen3", LORA, 2),
        ("nemotron", LORA, 2),
        ("llama", CANONICAL, 1),
        ("qwen3", CANONICAL, 2),
        ("llama", CANONICAL, 4),
    ],
)
def test_logits_are_transformers_with_the_products_added(name: str, target: str, ranks: int, tmp_path: Path) -> None:
    added = products(name, is_fused=target == LORA)
    wanted = merged_logits(name, added)
    assert np.abs(wanted - saved(name).logits).max() > 0.05, "it changes something"
    model = write_bridge(tmp_path / "model", name, 2, None)
    adapter = write_bridge_adapter(tmp_path / "adapter", name, ranks, added, target)
    made = made_logits(model, adapter, tmp_path / "hub")[..., :VOCAB]
    assert np.abs(made - wanted).max() < 1e-5 * max(1.0, float(np.abs(wanted).max()))


def test_canonical_adapters_of_some_projections(tmp_path: Path) -> None:
    some = {key: pair for key, pair in products("llama", is_fused=False).items() if "k_proj" not in key}
    some = {key: pair for key, pair in some.items() if "gate_proj" not in key}
    model = write_bridge(tmp_path / "model", "llama", 1, None)
    adapter = write_bridge_adapter(tmp_path / "adapter", "llama", 2, some, CANONICAL)
    made = made_logits(model, adapter, tmp_path / "hub")[..., :VOCAB]
    assert np.abs(made - merged_logits("llama", some)).max() < 1e-5


def test_one_beside_its_model_is_merged(tmp_path: Path) -> None:
    write_bridge(tmp_path / "both/model", "llama", 1, None)
    write_bridge_adapter(tmp_path / "both/adapter", "llama", 1, products("llama", is_fused=True))
    said = open_source(find_archive(tmp_path / "both")).remarks
    assert any("the LoRA adapter adapter is merged into 8 weights" in each for each in said)


def test_one_without_its_model_is_refused_with_the_keys_to_give_both_by(tmp_path: Path) -> None:
    adapter = write_bridge_adapter(tmp_path / "adapter", "llama", 1, products("llama", is_fused=True))
    with pytest.raises(CheckpointError, match="holds a LoRA adapter of Megatron-Bridge, not a model") as refused:
        open_source(find_archive(adapter))
    assert f"give its model, {BASE}, as export.model.checkpoint_path and this as" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"_target_": "megatron.bridge.peft.dora.DoRA"}, "peft is 'megatron.bridge.peft.dora.DoRA'"),
        ({"dim": 3}, "are not matrices of dim 3"),
        ({"alpha": "much"}, "alpha is 'much'"),
        ({"use_rslora": True}, "keys that are not known here\n  use_rslora: True"),
        ({"_target_": CANONICAL}, "is no part of the kind of adapter that the configuration names"),
    ],
)
def test_what_cannot_be_merged_exactly_is_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    adapter = write_bridge_adapter(tmp_path / "adapter", "llama", 1, products("llama", is_fused=True))
    file = adapter / "iter_0000007/run_config.yaml"
    run = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**run, "peft": {**run["peft"], **changes}}))
    model = write_bridge(tmp_path / "model", "llama", 1, None)
    with pytest.raises(CheckpointError, match=words):
        open_source(find_archive(model, GivenFiles(adapter=adapter)))


def test_an_order_of_rows_that_the_files_do_not_say_is_refused(tmp_path: Path) -> None:
    added = products("llama", is_fused=False)
    adapter = write_bridge_adapter(tmp_path / "adapter", "llama", 2, added, CANONICAL)
    file = adapter / "iter_0000007/run_config.yaml"
    run = yaml.safe_load(file.read_text())
    run["model"]["tensor_model_parallel_size"] = 4
    file.write_text(yaml.safe_dump(run))
    model = write_bridge(tmp_path / "model", "llama", 1, None)
    with pytest.raises(CheckpointError, match="do not say in which order its rows are"):
        made_logits(model, adapter, tmp_path / "hub")


def test_a_model_that_was_trained_so_and_has_all_weights_is_a_model(tmp_path: Path) -> None:
    model = write_bridge(tmp_path / "model", "llama", 1, None, peft={"_target_": LORA, "dim": 8})
    assert open_source(find_archive(model)).family.name == "llama"


def test_one_of_megatron_fsdp_is_refused(tmp_path: Path) -> None:
    model = write_bridge(tmp_path / "model", "llama", 1, None)
    adapter = write_bridge_adapter(tmp_path / "adapter", "llama", 1, products("llama", is_fused=True))
    for name in ("metadata.json", "common.pt"):  # torch's own kind has neither
        (adapter / "iter_0000007" / name).unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="adapter that was saved with ckpt_format fsdp_dtensor"):
        open_source(find_archive(model, GivenFiles(adapter=adapter)))


def test_latent_attention(tmp_path: Path) -> None:
    """Megatron-core's names of DeepSeek's layers: ``multi_latent_attention.py``; each is one of transformers'."""
    names = {"q_a_proj": "linear_q_down_proj", "q_b_proj": "linear_q_up_proj", "o_proj": "linear_proj"}
    names |= {"kv_a_proj_with_mqa": "linear_kv_down_proj", "kv_b_proj": "linear_kv_up_proj"}
    generator = torch.Generator().manual_seed(1)
    added, arrays = {}, {}
    for key, weight in saved("deepseek_v3").tensors.items():
        if (word := key.split(".")[-2]) not in names:
            continue
        sizes = {"in": (RANK, weight.shape[1]), "out": (weight.shape[0], RANK)}
        pair = {side: torch.randn(size, generator=generator) / 8 for side, size in sizes.items()}
        added[key] = (pair["in"], pair["out"])
        place = f"decoder.layers.{key.split('.')[2]}.self_attention.{names[word]}.adapter.linear_"
        for side, value in pair.items():
            arrays[f"{place}{side}.weight"] = ChunkedArray(tuple(value.shape), [((0, 0), value)])
    assert len(added) == 15
    model = write_bridge(tmp_path / "model", "deepseek_v3", 1, None)
    lora = {"_target_": LORA, "dim": RANK, "alpha": ALPHA}
    wish: dict[str, Any] = {"adapter": write_bridge(tmp_path / "adapter", "deepseek_v3", 1, arrays, peft=lora)}
    wish["weight_data_type"] = "fp32"
    convert(ConvertArguments(model, tmp_path / "out", **wish, format="huggingface"))
    made = tensors(tmp_path / "out")
    for key, (down, up) in added.items():
        wanted = saved("deepseek_v3").tensors[key].double() + ALPHA / RANK * up.double() @ down.double()
        assert (made[key] - wanted).abs().max() < 1e-6, key
    convert(ConvertArguments(model, tmp_path / "peft", **wish, format="peft"))
    assert_holds(tmp_path / "peft", added)
