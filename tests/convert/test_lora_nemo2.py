"""LoRA adapters that NeMo 2 saved as checkpoints of their own: transformers' logits with the products added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.checkpoints.core_adapters import APART, LEGACY, adapter_arrays, expert_arrays, expert_products
from support.checkpoints.llama_adapters import ALPHA, RANK, merged_logits, products
from support.checkpoints.llama_configs import nemo1, nemo2, padded_vocabulary
from support.checkpoints.llama_files import chunked, write_archive, write_nemo2_tree, write_torch_dist
from support.checkpoints.llama_state import core_state
from support.shards.llama_shards_forward import forward
from support.tiny_models.llama_models import VOCAB, input_ids, logits, saved, tensors
from support.tiny_models.peft_output import assert_holds

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.user_files import GivenFiles
from export_scripts.convert import convert
from handover.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LORA = {"_target_": "nemo.collections.llm.peft.lora.LoRA", "dim": RANK, "alpha": ALPHA, "dropout": 0.0}
BASE = "/models/base"


def write_adapter(root: Path, name: str, ranks: int, **changes: Any) -> Path:
    config = saved(name).config
    model = nemo2(config, name) | {"model_transform": {**LORA, "target_modules": ["linear_qkv"], **changes}}
    weights = write_nemo2_tree(root, model)
    write_torch_dist(weights, adapter_arrays(name, ranks, products(name, is_fused=True)))
    (weights / "adapter_metadata.json").write_text(json.dumps({"model_ckpt_path": f"{BASE}/weights"}))
    return root


def write_model(form: str, name: str, folder: Path) -> Path:
    source = saved(name)
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, 2))
    if form == "archive":
        return write_archive(folder / "model.nemo", nemo1(source.config, (2, 1)), state, (2, 1))
    weights = write_nemo2_tree(folder / "model", nemo2(source.config, name))
    write_torch_dist(weights, chunked(state, 2, form == "NeMo 2", form.endswith("apart")))
    return folder / "model"


@pytest.mark.parametrize(
    ("name", "form", "ranks"),
    [
        ("llama", "NeMo 2", 1),
        ("llama", "NeMo 2, gate and up apart", 4),
        ("mistral", "archive", 2),
        ("nemotron", "NeMo 2", 1),
        ("nemotron", "NeMo 2", 4),
    ],
)
def test_logits_are_transformers_with_the_products_added(name: str, form: str, ranks: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    wanted = merged_logits(name, products(name, is_fused=True))
    assert np.abs(wanted - saved(name).logits).max() > 0.05, "it changes something"
    model, adapter = write_model(form, name, tmp_path), write_adapter(tmp_path / "adapter", name, ranks)
    convert(ConvertArguments(model, tmp_path / "hub", 1, "fp32", adapter=adapter, format="huggingface"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", attn_implementation="eager")
    limit = 1e-4 * max(1.0, float(np.abs(wanted).max()))
    assert np.abs(logits(loaded)[..., :VOCAB] - wanted).max() < limit
    if name == "llama":  # the relatives have no shards
        convert(ConvertArguments(model, tmp_path / "2-gpu", 2, "fp32", adapter=adapter))
        assert np.abs(forward(tmp_path / "2-gpu", input_ids())[..., :VOCAB] - wanted).max() < limit


def test_one_beside_its_model_is_merged(tmp_path: Path) -> None:
    both = tmp_path / "both"
    both.mkdir()
    write_model("NeMo 2", "llama", both)
    write_adapter(both / "adapter", "llama", 1)
    said = open_source(find_archive(both)).remarks
    assert any("the LoRA adapter adapter is merged into 8 weights" in each for each in said)


@pytest.mark.parametrize("base", [BASE, "None", ""])
def test_one_without_its_model_is_refused_with_the_keys_to_give_both_by(base: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", "llama", 1)
    about = adapter / "weights/adapter_metadata.json"
    about.write_text(json.dumps({"model_ckpt_path": f"{base}/weights" if base == BASE else base}))
    if not base:
        about.unlink()
    with pytest.raises(CheckpointError, match="holds a LoRA adapter of NeMo 2, not a model") as refused:
        open_source(find_archive(adapter))
    hint = str(refused.value.hint)
    assert "as export.model.checkpoint_path and this as export.model.adapter_path" in hint
    assert (BASE in hint) == (base == BASE) and "None" not in hint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"_target_": "nemo.collections.llm.peft.canonical_lora.CanonicalLoRA"},
            "model_transform is '.*CanonicalLoRA'",
        ),
        ({"_target_": "nemo.collections.llm.peft.dora.DoRA"}, "model_transform is '.*DoRA'"),
        ({"dim": 3}, "are not matrices of dim 3"),
        ({"alpha": "much"}, "alpha is 'much'"),
    ],
)
def test_what_cannot_be_merged_exactly_is_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", "llama", 1, **changes)
    model = write_model("NeMo 2", "llama", tmp_path)
    with pytest.raises(CheckpointError, match=words):
        open_source(find_archive(model, GivenFiles(adapter=adapter)))


def test_a_model_that_was_trained_so_and_has_all_weights_is_a_model(tmp_path: Path) -> None:
    model = write_model("NeMo 2", "llama", tmp_path)
    file = model / "context/model.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"model_transform": LORA}))
    assert open_source(find_archive(model)).family.name == "llama"


@pytest.mark.parametrize("name", ["mistral", "nemotron"])
def test_one_as_pefts(name: str, tmp_path: Path) -> None:
    model, adapter = write_model("NeMo 2", name, tmp_path), write_adapter(tmp_path / "adapter", name, 2)
    convert(ConvertArguments(model, tmp_path / "peft", weight_data_type="fp32", adapter=adapter, format="peft"))
    assert_holds(tmp_path / "peft", products(name, is_fused=True))


@pytest.mark.parametrize(("kind", "ranks"), [(LEGACY, 2), (APART, 1)])
def test_adapters_of_experts(kind: str, ranks: int, tmp_path: Path) -> None:
    """Grouped experts share one, experts one after another have one each."""
    added, model = expert_products("mixtral", kind), write_model("NeMo 2", "mixtral", tmp_path)
    transform = {"model_transform": {**LORA, "target_modules": ["linear_fc1", "linear_fc2"]}}
    weights = write_nemo2_tree(tmp_path / "adapter", nemo2(saved("mixtral").config, "mixtral") | transform)
    write_torch_dist(weights, expert_arrays("mixtral", kind, ranks, added))
    given: dict[str, Any] = {"weight_data_type": "fp32", "adapter": tmp_path / "adapter"}
    convert(ConvertArguments(model, tmp_path / "hub", **given, format="huggingface"))
    made = tensors(tmp_path / "hub")
    for key, (down, up) in added.items():
        wanted = saved("mixtral").tensors[key].double() + ALPHA / RANK * up.double() @ down.double()
        assert (made[key] - wanted).abs().max() < 1e-6, key
    convert(ConvertArguments(model, tmp_path / "peft", **given, format="peft"))
    assert_holds(tmp_path / "peft", added)
