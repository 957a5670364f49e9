"""FP8 directories whose own format is asked for: the very numbers and scales, or one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models.quantized_models import MIXTURE, compressed, deepseeks, save_fp8, save_state

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.convert import convert
from export_scripts.quantization import QUANTIZATIONS
from export_scripts.targets.huggingface.plan import Wish, plan_huggingface
from export_scripts.targets.huggingface.quantized import rank_problems
from export_scripts.targets.huggingface.sizing import measure_huggingface
from handover.errors import CheckpointError
from handover.manifest import QUANTIZED, Manifest

QUERY = "model.layers.0.self_attn.q_proj.weight"
FILE, FP8 = "model.safetensors", torch.float8_e4m3fn
BLOCKS = deepseeks([128, 128])
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "blocks": ("fp8_block", BLOCKS, {"block": (128, 128)}),
    "blocks of experts": ("fp8_block", BLOCKS, {"block": (128, 128), "name": MIXTURE}),
    "channel": ("fp8", compressed("channel"), {"block": (1, 0), "scale": "_scale"}),
    "tensor": ("fp8", compressed("tensor"), {"block": (0, 0), "scale": "_scale"}),
}


def save_case(name: str, path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    quantization, said, ways = CASES[name]
    return quantization, save_fp8(path, said, **ways)


def converted(source: Path, output: Path, quantization: str, data_type: str = "bf16", **more: Any) -> Path:
    given: dict[str, Any] = {"weight_data_type": data_type, "format": "huggingface", "processes": 1, **more}
    convert(ConvertArguments(source, output, quantization=quantization, **given))
    return output


def quantization_config(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())["quantization_config"]
    return found


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_scales_are_the_very_ones(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantization, state = save_case(name, tmp_path / "source")
    made = converted(tmp_path / "source", tmp_path / "out", quantization)
    assert (made / FILE).samefile(tmp_path / "source" / FILE)  # nothing is written once more
    assert quantization_config(made) == quantization_config(tmp_path / "source")
    assert QUANTIZED not in Manifest.read(made).made_from
    said = capsys.readouterr().err
    assert "are kept as they are" in said
    assert "dequantized" not in said
    wide = load_file(converted(tmp_path / "source", tmp_path / "fp32", quantization, "fp32") / FILE)
    assert wide.keys() == state.keys()
    for key, value in state.items():
        is_kept = value.dtype == FP8 or key.endswith(("_scale", "_scale_inv"))
        assert wide[key].dtype == (value.dtype if is_kept else torch.float32), key
        assert torch.equal(wide[key].float(), value.float()), key


def test_scales_of_activations_are_kept_with_the_configuration_that_names_them(tmp_path: Path) -> None:
    state = save_fp8(tmp_path / "source", said := {**deepseeks(None), "activation_scheme": "static"}, (128, 128))
    scale = "model.layers.0.self_attn.q_proj.input_scale"
    state[scale] = torch.tensor(0.25)
    said = {**said, "weight_block_size": [128, 128]}
    save_state(tmp_path / "source", state, said)
    made = load_file(converted(tmp_path / "source", tmp_path / "out", "fp8_block", "fp32") / FILE)
    assert torch.equal(made[scale], state[scale])
    assert quantization_config(tmp_path / "out") == said


def test_another_format_is_quantized_again(tmp_path: Path) -> None:
    save_case("blocks", tmp_path / "source")
    made = converted(tmp_path / "source", tmp_path / "out", "fp8")
    assert quantization_config(made)["quant_method"] == "compressed-tensors"
    assert QUERY in Manifest.read(made).made_from[QUANTIZED]  # type: ignore[operator]


def test_what_an_adapter_changes_is_quantized_again(tmp_path: Path) -> None:
    save_case("blocks", tmp_path / "source")
    (folder := tmp_path / "adapter").mkdir()
    name = f"base_model.model.{QUERY.removesuffix('.weight')}"
    pair = {f"{name}.lora_A.weight": torch.ones(2, 64), f"{name}.lora_B.weight": torch.ones(128, 2)}
    save_file(pair, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    made = converted(tmp_path / "source", tmp_path / "out", "fp8_block", adapter=folder)
    assert QUERY in Manifest.read(made).made_from[QUANTIZED]  # type: ignore[operator]


def test_formats_that_are_mixed_are_refused_by_tensor(tmp_path: Path) -> None:
    said = {key: value for key, value in BLOCKS.items() if key != "weight_block_size"}
    state = save_fp8(tmp_path / "source", said, (128, 128))
    key = "model.layers.1.mlp.up_proj.weight"
    state[f"{key}_scale_inv"] = torch.ones(state[key].shape[0], 1)
    save_state(tmp_path / "source", state, said)
    with pytest.raises(CheckpointError, match=rf"1 others are not of it\n  {key}  F8_E4M3 of fp8, a scale for 1 x all"):
        converted(tmp_path / "source", tmp_path / "out", "fp8_block")
    assert not (tmp_path / "out").exists()


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    _, state = save_case("blocks", tmp_path / "source")
    state[QUERY].view(torch.uint8)[3, 5] = 0xFF
    save_state(tmp_path / "source", state, BLOCKS)
    with pytest.raises(CheckpointError, match=f"{QUERY} holds 1 or more values that are NaN or infinite"):
        converted(tmp_path / "source", tmp_path / "out", "fp8_block")


def test_sizes_and_ranks_are_those_of_the_kept_weights(tmp_path: Path) -> None:
    _, state = save_case("blocks", tmp_path)
    stored = sum(value.numel() * value.element_size() for value in state.values())
    sizing = measure_huggingface(tmp_path, "bf16", 1, quantization="fp8_block")
    assert (sizing.read_bytes, sizing.written_bytes) == (stored, 0)
    becomes = QUANTIZATIONS["fp8_block"]
    plan = plan_huggingface(open_archive(tmp_path), Wish("bf16", 1 << 30, quantization=becomes))
    tensors = [tensor for file in plan.files for tensor in file.tensors]
    config = json.loads(plan.small_files["config.json"])
    assert any(QUERY in problem for problem in rank_problems(tensors, config, 2, becomes))
