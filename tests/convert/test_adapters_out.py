"""LoRA adapters of NeMo and Megatron-Bridge as directories of PEFT: its logits, and those of the merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.llama_adapters import merged_logits
from support.tiny_models.huggingface_models import save as save_gpt2
from support.tiny_models.llama_models import VOCAB, logits, save
from support.tiny_models.peft_adapters import DATA
from support.tiny_models.peft_output import CASES, added, assert_holds, write

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.errors import CheckpointError, ConfigError
from handover.manifest import Manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def to_peft(model: Path, adapter: Path | None, output: Path, **more: Any) -> Path:
    given = {"weight_data_type": "fp32", "format": "peft", **more}
    convert(ConvertArguments(model, output, adapter=adapter, **given))
    return output


# What a base is called is alike for every model.
@pytest.mark.in_ci(when=lambda at: at.base == "Bridge" or at.case == "llama")
@pytest.mark.parametrize("base", ["Bridge", "hub"])
@pytest.mark.parametrize("case", CASES)
def test_pefts_logits_are_those_of_the_merged_model(case: str, base: str, tmp_path: Path) -> None:
    """PEFT's logits are recorded with its configuration; the tensors are the independent writer's, bit by bit.

    The model is Megatron-Bridge's, or a directory of the hub on which training began.
    """
    from transformers import AutoModelForCausalLM

    model, adapter = write(case, tmp_path)
    if base == "hub":
        save(CASES[case][0], model := tmp_path / "base")
    made = to_peft(model, adapter, tmp_path / "peft", base_model="base")
    assert json.loads((made / "adapter_config.json").read_text()) == json.loads((DATA / f"out_{case}.json").read_text())
    assert_holds(made, added(case))
    convert(ConvertArguments(model, tmp_path / "hub", 1, "fp32", adapter=adapter, format="huggingface"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hub", attn_implementation="eager"))
    of_peft = np.load(DATA / f"out_{case}.logits.npy")
    limit = 1e-5 * max(1.0, float(np.abs(of_peft).max()))
    assert np.abs(merged[..., :VOCAB] - of_peft).max() < limit
    if case != "experts":  # transformers' own model has them in one parameter
        assert np.abs(of_peft - merged_logits(CASES[case][0], added(case))).max() < limit


def test_the_manifest_names_adapter_and_model_and_nothing_of_the_model_is_written(tmp_path: Path) -> None:
    model, adapter = write("llama", tmp_path)
    made = to_peft(model, adapter, tmp_path / "peft", weight_data_type="bf16", base_model="org/base")
    manifest = Manifest.read(made)
    assert {each.path for each in manifest.files} == {"adapter_config.json", "adapter_model.safetensors"}
    assert manifest.made_from["checkpoint"] == str(adapter) and manifest.made_from["model"] == str(model)
    assert json.loads((made / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"
    assert {each.dtype for each in load_file(made / "adapter_model.safetensors").values()} == {torch.bfloat16}


def test_what_peft_does_not_need_or_say_is_refused(tmp_path: Path) -> None:
    model, adapter = write("llama", tmp_path)
    with pytest.raises(CheckpointError, match="comes with no LoRA adapter"):
        to_peft(model, None, tmp_path / "out")
    with pytest.raises(CheckpointError, match="export.model.end_id is of the model"):
        to_peft(model, adapter, tmp_path / "out", end_id=2)
    save("llama", tmp_path / "hub")
    with pytest.raises(CheckpointError, match="is a directory of PEFT already"):
        to_peft(tmp_path / "hub", DATA / "llama", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="--base-model=b without --format=peft"):
        to_peft(model, adapter, tmp_path / "out", base_model="b", format="huggingface")


def test_an_adapter_of_a_training_that_a_directory_has_no_single_weights_for_is_refused(tmp_path: Path) -> None:
    adapter = write("experts", tmp_path)[1]
    save("gpt_oss", tmp_path / "arrays")
    with pytest.raises(CheckpointError, match=r"linear_fc1.* the model has it in one array with others"):
        to_peft(tmp_path / "arrays", adapter, tmp_path / "out")
    save_gpt2("gpt2", tmp_path / "gpt2")
    with pytest.raises(CheckpointError, match="of another model than Llama's relatives"):
        to_peft(tmp_path / "gpt2", adapter, tmp_path / "out")


def test_a_killed_one_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapter = write("llama", tmp_path)
    with monkeypatch.context() as patch:

        def killed(path: Path, *_: object) -> None:
            raise KeyboardInterrupt(path.name)

        patch.setattr("export_scripts.targets.huggingface.convert.write_bytes", killed)
        with pytest.raises(KeyboardInterrupt, match="adapter_config.json"):
            to_peft(model, adapter, tmp_path / "peft")
    weights = tmp_path / "peft/adapter_model.safetensors"
    before = weights.stat().st_ino
    assert not (tmp_path / "peft/manifest.json").exists()
    assert (to_peft(model, adapter, tmp_path / "peft") / "manifest.json").is_file() and weights.stat().st_ino == before
