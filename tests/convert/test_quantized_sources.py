"""Sources in FP8 and MXFP4: the numbers that transformers and compressed-tensors make of them, or one clear error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models.quantized_models import CASES, compressed, deepseeks, save_case, save_fp8, save_state
from support.tiny_models.quantized_record import RECORD, TYPES, digest_of, loaded

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.huggingface.files import open_model_weights, read_config
from export_scripts.conversion.move.placement import assemble
from export_scripts.conversion.write import copied_bytes, shards
from export_scripts.conversion.write.copied_bytes import contents
from export_scripts.conversion.write.shards import ShardSettings, Workspace
from export_scripts.convert import convert
from export_scripts.inspect import describe
from export_scripts.targets.huggingface.sizing import measure_huggingface
from export_scripts.tensors.mapped import Reader
from export_scripts.tensors.scaled import Scaled
from export_scripts.tensors.small_floats import decode
from export_scripts.weights.layouts import unchanged
from export_scripts.weights.schema import Assignment, Rule
from ft_format.layout import FtDims, TensorSpec
from handover.errors import CheckpointError
from models.quantization import read_quantization

QUERY = "model.layers.0.self_attn.q_proj.weight"


def converted(source: Path, output: Path, data_type: str = "bf16", **changes: Any) -> dict[str, torch.Tensor]:
    ways: dict[str, Any] = {"weight_data_type": data_type, "format": "huggingface", "processes": 1, **changes}
    convert(ConvertArguments(source, output, **ways))
    return load_file(output / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2), ("F8_E8M0", torch.float8_e8m0fnu)],
)
def test_every_byte_means_what_torch_reads(kind: str, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(decode(every.numpy(), kind), every.view(dtype).float().numpy(), equal_nan=True)


@pytest.mark.parametrize("data_type", TYPES)
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_transformers_loads(
    name: str, data_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_case(name, tmp_path / "source")
    converted(tmp_path / "source", tmp_path / "out", data_type)
    assert digest_of(loaded(tmp_path / "out", TYPES[data_type])) == json.loads(RECORD.read_text())[name][data_type]
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    count = 16 + 4 * 3 * 3 if "experts" in name else 27
    assert f"{count} weights of FP8 are dequantized: numbers times scales, in fp32" in capsys.readouterr().err


def test_each_weight_is_what_transformers_dequantizes(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    state = save_fp8(tmp_path / "source", {**deepseeks([16, 32]), "scale_fmt": "ue8m0"})
    for key in [key for key in state if key.endswith("_scale_inv")]:  # powers of two, one byte each, as DeepSeek V4's
        state[key] = torch.exp2(state[key].log2().ceil()).to(torch.float8_e8m0fnu)
    save_state(tmp_path / "source", state, deepseeks([16, 32]))
    made = converted(tmp_path / "source", tmp_path / "out")
    for key in [key for key in state if f"{key}_scale_inv" in state]:
        wanted = Fp8Dequantize(None)._dequantize_one(state[key], state[f"{key}_scale_inv"], torch.bfloat16)
        assert torch.equal(made[key], wanted), key


@pytest.mark.parametrize("data_type", ["fp32", "fp16"])
def test_scales_of_half_precision_are_multiplied_in_fp32(data_type: str, tmp_path: Path) -> None:
    """As transformers does: the product is rounded once, to the type that is asked for."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    state = save_fp8(tmp_path / "source", deepseeks([16, 32]))
    for key in [key for key in state if key.endswith("_scale_inv")]:
        state[key] = state[key].to(torch.bfloat16)
    save_state(tmp_path / "source", state, deepseeks([16, 32]))
    made = converted(tmp_path / "source", tmp_path / "out", data_type)
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[data_type]
    for key in [key for key in state if f"{key}_scale_inv" in state]:
        wanted = Fp8Dequantize(None)._dequantize_one(state[key], state[f"{key}_scale_inv"], dtype)
        assert torch.equal(made[key], wanted), key


@pytest.mark.parametrize("block", [(24, 40), (128, 128), (1, 7), (100, 1)])
def test_the_last_block_of_an_axis_may_be_smaller(block: tuple[int, int], tmp_path: Path) -> None:
    """DeepSeek's 576 rows in blocks of 128; transformers would take blocks of another size, or none."""
    state = save_fp8(tmp_path / "source", deepseeks(list(block)), block)
    made = converted(tmp_path / "source", tmp_path / "out", "fp32")
    for key in [key for key in state if f"{key}_scale_inv" in state]:
        rows, columns = state[key].shape
        scales = state[f"{key}_scale_inv"].repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        assert torch.equal(made[key], state[key].float() * scales[:rows, :columns]), key


def test_scales_of_half_precision_and_of_activations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ModelOpt's, whose description may lie in a file of its own; a scale may have an axis or none."""
    state = save_fp8(tmp_path / "source", None, (0, 0), "_scale")
    for number, key in enumerate([key for key in state if key.endswith("_scale")]):
        state[key] = state[key].to(torch.bfloat16).reshape([] if number % 2 else [1])
        state[key.replace("weight_scale", "input_scale")] = torch.tensor(0.5)
    state["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    save_state(tmp_path / "source", state, None)
    about = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "source/hf_quant_config.json").write_text(json.dumps(about))
    made = converted(tmp_path / "source", tmp_path / "out")
    for key in [key for key in state if f"{key}_scale" in state]:
        assert torch.equal(made[key], state[key].to(torch.bfloat16) * state[f"{key}_scale"]), key
    assert "28 scales of activations are left out" in capsys.readouterr().err


def test_shards_of_fastertransformer_are_those_of_the_dequantized_model(tmp_path: Path) -> None:
    save_fp8(tmp_path / "source", deepseeks([16, 32]), name="llama 2 70B")
    converted(tmp_path / "source", tmp_path / "dense", "fp32")
    ways: dict[str, Any] = {"tensor_para_size": 2, "weight_data_type": "fp16", "processes": 1}
    for name in ("source", "dense"):
        convert(ConvertArguments(tmp_path / name, tmp_path / f"{name}-2", format="fastertransformer", **ways))
    files = sorted(path.name for path in (tmp_path / "dense-2").glob("*.bin"))
    assert len(files) > 50
    for name in files:
        assert (tmp_path / "source-2" / name).read_bytes() == (tmp_path / "dense-2" / name).read_bytes(), name


def test_the_size_of_a_conversion_counts_the_bytes_that_are_read(tmp_path: Path) -> None:
    state = save_case("fp8, blocks", tmp_path)
    wanted = sum(value.numel() * value.element_size() for value in state.values())
    assert measure_huggingface(tmp_path, "bf16", 1).read_bytes == wanted


def test_a_described_model_has_the_bytes_of_its_files(tmp_path: Path) -> None:
    """All its matrices are taken for quantized; one is not, here."""
    state = save_case("fp8, blocks", tmp_path)
    stored = sum(value.numel() * value.element_size() for value in state.values())
    more = measure_huggingface(tmp_path / "config.json", "bf16", 1).read_bytes - stored
    dense = state["model.layers.3.mlp.down_proj.weight"].numel()
    assert more == 64 // 16 * 96 // 32 * 4 - dense


def test_what_is_stored_is_shown(tmp_path: Path) -> None:
    save_case("fp8, blocks", tmp_path)
    shown = "\n".join(describe(open_source(find_archive(tmp_path))))
    assert "27 tensors of F8_E4M3, 165,888 numbers" in shown
    assert re.search(r"layers.\{layer\}.self_attn.q_proj.weight +x4 +F8_E4M3 \[128, 64\]", shown)


def test_an_adapter_is_merged_into_what_is_dequantized(tmp_path: Path) -> None:
    save_case("fp8, blocks", tmp_path / "source")
    dense = converted(tmp_path / "source", tmp_path / "dense", "fp32")
    (folder := tmp_path / "adapter").mkdir()
    draw = torch.Generator().manual_seed(1)
    down, up = torch.randn(2, 64, generator=draw), torch.randn(128, 2, generator=draw)
    name = f"base_model.model.{QUERY.removesuffix('.weight')}"
    save_file(
        {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, tmp_path / "adapter/adapter_model.safetensors"
    )
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    made = converted(tmp_path / "source", tmp_path / "out", "fp32", adapter=folder)
    assert torch.allclose(made[QUERY], dense[QUERY] + 2 * up @ down, atol=1e-5)
    assert not torch.equal(made[QUERY], dense[QUERY])


def test_a_number_that_is_none_is_named(tmp_path: Path) -> None:
    state = save_case("fp8, blocks", tmp_path / "source")
    state[QUERY].view(torch.uint8)[3, 5] = 0x7F
    save_state(tmp_path / "source", state, deepseeks([16, 32]))
    with pytest.raises(CheckpointError, match=rf"{QUERY} holds 1 values that are NaN or infinite, the first at \[3, 5"):
        converted(tmp_path / "source", tmp_path / "out")


def gpt_oss(path: Path, shape: tuple[int, int, int, int] = (3, 10, 2, 16)) -> tuple[torch.Tensor, torch.Tensor]:
    """Save one weight as GPT-OSS has it: [experts, out, groups, 16] bytes, with all exponents that stay finite."""
    draw = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
    scales = torch.randint(0, 250, shape[:3], dtype=torch.uint8, generator=draw)
    save_file({"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}, path / "model.safetensors")
    (path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    return blocks, scales


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    wanted = convert_moe_packed_tensors(*gpt_oss(tmp_path)).view(torch.int16).numpy().view(np.uint16)
    archive = open_archive(tmp_path)
    assert read_config(archive) == {}
    tensor = open_model_weights(archive, {}).tensors["e.down_proj"]
    assert (tensor.shape, tensor.data_type) == ((3, 64, 10), "bf16")
    (view,), reader = tensor.parts(), Reader(1 << 16, set())
    for place in (np.s_[:], np.s_[1:], np.s_[2:3, 31:50], np.s_[:, 1:2, 3:8], np.s_[:, ::2], np.s_[0]):
        reader.forget()
        assert np.array_equal(reader.read(view[place]), wanted[place])


def test_little_is_computed_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert may be larger than what a process may hold beside its buffer."""
    gpt_oss(tmp_path, (2, 600, 90, 16))
    sizes, values = [], Scaled.values

    def watched(self: Scaled, *given: Any) -> Any:
        sizes.append(self.nbytes)
        return values(self, *given)

    monkeypatch.setattr(Scaled, "values", watched)
    (view,) = open_model_weights(open_archive(tmp_path), {}).tensors["e.down_proj"].parts()
    assert Reader(0, set()).read(view[1:2]).nbytes == sum(sizes) == 600 * 90 * 32 * 2
    assert max(sizes) <= 1 << 20


def test_a_large_expert_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = gpt_oss(tmp_path)
    for module in (shards, copied_bytes):
        monkeypatch.setattr(module, "READ_BYTES", 1024)  # of an expert's 1280
    monkeypatch.setattr(shards, "_BLOCK_BYTES", 256)

    def parts() -> list[bytes]:
        tensor = open_model_weights(open_archive(tmp_path), {}).tensors["e.down_proj"]
        spec = Assignment("e", TensorSpec(tensor.shape), ("e",), Rule("e", unchanged))
        box, workspace = assemble(spec, (tensor,), FtDims()), Workspace(set())
        return [bytes(part) for part in contents(box, "e", ShardSettings(1, "bf16", FtDims()), workspace)]

    assert max(map(len, parts())) <= 256
    assert b"".join(parts()) == convert_moe_packed_tensors(blocks, scales).view(torch.uint8).numpy().tobytes()
    scales[2, 4, 1] = 255  # NaN, of 32 numbers of one output
    save_file({"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"e holds 32 values that are NaN or infinite, the first at \[2, 32, 4\]"):
        parts()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{QUERY}_scale_inv": None}, rf"{QUERY}: F8_E4M3 \[128, 64\] with one scale is read  \(neither"),
        ({f"{QUERY}_scale": torch.ones(8, 2)}, rf"with one scale is read  \({QUERY}_scale_inv, {QUERY}_scale\)"),
        ({QUERY: torch.ones(128, 64)}, rf"{QUERY}_scale_inv: a scale of no FP8 weight"),
        ({QUERY: None}, rf"{QUERY}_scale_inv: a scale of no FP8 weight"),
        ({f"{QUERY}_scale_inv": torch.ones(2, 8)}, rf"_scale_inv: \[2, 8\] for {QUERY} \[128, 64\], expected \[8, 2\]"),
        ({f"{QUERY}_scale_inv": torch.ones(8, 2).int()}, f"{QUERY}: its scales are I32"),
    ],
)
def test_numbers_and_scales_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    state: dict[str, Any] = {**save_case("fp8, blocks", tmp_path / "source"), **change}
    save_state(tmp_path / "source", {key: each for key, each in state.items() if each is not None}, deepseeks([16, 32]))
    with pytest.raises(CheckpointError, match=message):
        converted(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"e.down_proj_scales": None}, "e.down_proj_blocks: e.down_proj_scales is not there"),
        ({"e.down_proj_blocks": None}, "e.down_proj_scales: a scale of no MXFP4 weight"),
        ({"e.down_proj": torch.ones(3, 64, 10)}, "e.down_proj: it is there beside e.down_proj_blocks"),
        ({"e.down_proj_blocks": torch.ones(3, 10, 2, 8).byte()}, r"\[3, 10, 2, 8\] with .* \[3, 10, 2\]  \(expected"),
        ({"e.down_proj_scales": torch.ones(3, 10, 2)}, "e.down_proj: its scales are fp32"),
    ],
)
def test_blocks_of_mxfp4_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    blocks, scales = gpt_oss(tmp_path)
    state: dict[str, Any] = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales, **change}
    save_file({key: each for key, each in state.items() if each is not None}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_model_weights(open_archive(tmp_path), {})


def in_group(**changes: Any) -> dict[str, Any]:
    said = compressed("tensor")
    said["config_groups"]["group_0"] |= changes
    return said


@pytest.mark.parametrize("left_out", ["dynamic", "strategy"])
def test_inputs_have_scales_unless_a_group_says_that_they_are_dynamic(left_out: str) -> None:
    """The defaults are the library's: ``tests/with_compressed_tensors``."""
    inputs = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
    del inputs[left_out]
    found = read_quantization(in_group(input_activations=inputs), "here", CheckpointError)
    assert found.activations == {"static"}
    fbgemm = {"quant_method": "fbgemm_fp8", "activation_scheme": "static"}  # which its class passes over
    assert read_quantization(fbgemm, "here", CheckpointError).activations == {"dynamic"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, r"is quantised \(awq\)"),
        ({**deepseeks([16, 32]), "expert_dtype": "fp4"}, "expert_dtype: fp4  "),
        (
            {**deepseeks([16, 32]), "rotated": True},
            r"quantization_config.rotated: True  \(what it changes is not known\)",
        ),
        (deepseeks([16]), r"weight_block_size: \[16\]  \(rows and columns"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo: NVFP4  "),
        ({**compressed("tensor"), "format": "pack-quantized"}, "format: pack-quantized  "),
        ({**compressed("tensor"), "transform_config": {"config_groups": {"R3": {}}}}, "activations are rotated"),
        ({**compressed("tensor"), "quantization_status": "frozen"}, "quantization_status: frozen  "),
        (compressed("tensor", type="int"), "config_groups.group_0.weights.type: int  "),
        (compressed("group", num_bits=4, group_size=128), "weights.num_bits: 4  "),
        (compressed("tensor", symmetric=False), "weights.symmetric: False  "),
        (compressed("tensor_group", group_size=16), "weights.strategy: tensor_group  "),
        (compressed("tensor", dynamic=True), "weights.dynamic: True  "),
        (compressed("tensor", actorder="group"), "weights.actorder: group  "),
        (in_group(output_activations={"num_bits": 8, "type": "float"}), "output_activations: .*outputs of layers are"),
        (in_group(input_activations="static"), r"input_activations: static  \(it is an object"),
        (in_group(input_activations={"num_bits": 8, "type": "int"}), "input_activations.type: int  "),
        (None, "27 tensors are FP8, and config.json has no quantization_config"),
    ],
)
def test_what_is_quantized_otherwise_is_refused_by_key_and_value(
    change: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    save_fp8(tmp_path / "source", change)
    with pytest.raises(CheckpointError, match=message):
        converted(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()
