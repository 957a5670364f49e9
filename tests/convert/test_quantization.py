"""Quantized Hugging Face directories: the bytes by the publishers' formulas, what stays, errors, resumption."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.tiny_models.dequantized import E2M1, dequantized, quantized, tensors
from support.tiny_models.huggingface_models import save, write_tokenizer
from support.tiny_models.llama_hub_models import MIXTRAL, build_llama
from support.tiny_models.llama_models import save as save_model

from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.conversion.write import safetensors_files, safetensors_layout
from export_scripts.convert import convert
from export_scripts.quantization import QUANTIZATIONS, groups
from export_scripts.quantization.float_rounding import E4M3
from export_scripts.repository.model_repository import build_repository
from export_scripts.targets.huggingface import convert as target
from export_scripts.targets.huggingface.sizing import measure_huggingface
from handover.errors import ArtefactError, CheckpointError, ConfigError
from handover.manifest import Manifest
from launcher.config.choices import Quantization

NAMES = ("fp8", "fp8_block", "int4")
SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
STORED = {"bf16": (torch.bfloat16, np.uint16), "fp16": (torch.float16, np.float16), "fp32": (torch.float32, np.float32)}


def saved(path: Path, prefix: str = "Llama", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Save a model of drawn weights, whose rows differ in size."""
    model = build_llama(prefix, **{**SIZES, "num_hidden_layers": 2, "intermediate_size": 384, **changes})
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            rows = torch.rand(parameter.shape[:1], generator=generator).reshape(-1, *[1] * (parameter.ndim - 1))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.01 + 0.05 * rows))
    model.to(dtype).save_pretrained(path)
    write_tokenizer(path)
    return path


def to_huggingface(source: Path, output: Path, quantization: str | None, **more: Any) -> Manifest:
    given = {"weight_data_type": "bf16", "format": "huggingface", **more}
    return convert(ConvertArguments(source, output, quantization=quantization, **given))


def in_layers(name: str, tensor: torch.Tensor) -> bool:
    return ".layers." in name and tensor.ndim == 2 and not name.endswith("gate.weight")


@pytest.fixture(params=["C", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What quantizes: both have to give the same bytes, with a compiler and without."""
    assert groups.library(), "tests have a compiler"
    if request.param == "numpy":
        monkeypatch.setattr(groups, "library", lambda: None)
    return str(request.param)


def test_every_number_of_bf16_becomes_the_fp8_that_torch_makes_of_it(way: str) -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    numbers = numbers[numbers.abs() <= 448]
    tie = torch.tensor([448.0, 450.0, 2.0**-10, 3 * 2.0**-10, 2.0**-6 - 2.0**-10, 17.0, 19.0])
    powers = torch.exp2(torch.arange(-9, 9, dtype=torch.float32)).view(torch.int32)
    beside = torch.cat([powers + step for step in range(-40, 41)]).view(torch.float32)
    given = torch.cat([numbers, -beside, tie, tie * (1 + 2**-23), tie * (1 - 2**-23)])
    found = groups.encode(given.numpy()[None], "fp32", E4M3, np.ones((1, 1), np.float32))
    assert np.array_equal(found.codes[0], given.to(torch.float8_e4m3fn).view(torch.uint8).numpy())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data_type", STORED)
def test_rows_become_what_torch_makes_of_them(name: str, data_type: str, way: str) -> None:
    dtype, storage = STORED[data_type]
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(192, 384, generator=generator) * torch.exp2(
        torch.randint(-9, 1, (192, 1), generator=generator)
    )
    weight[3, 5] = 40.0  # beside it the row's other numbers are small
    weight[:, 256:] *= 0.01
    weight = weight.to(dtype)
    stored = weight.view(torch.int16).numpy().view(storage) if data_type != "fp32" else weight.numpy()
    encoded = QUANTIZATIONS[name].encode(stored, data_type)
    wanted = quantized(weight, "w", name)
    for made, each in zip(encoded.contents, wanted.values(), strict=False):
        assert np.ascontiguousarray(made).tobytes() == each.contiguous().view(torch.uint8).numpy().tobytes()
    lost = (dequantized(wanted, "w").double() - weight.double()).square().sum(1).numpy()
    assert np.allclose(encoded.squared_errors, lost, rtol=1e-4)
    assert np.allclose(encoded.squares, weight.double().square().sum(1).numpy(), rtol=1e-5)


@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("data_type", STORED)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_not_finite_spoils_the_squares_of_its_row(name: str, data_type: str, value: str, way: str) -> None:
    dtype, storage = STORED[data_type]
    weight = torch.full((1, 256, 256), 0.5, dtype=dtype)
    weight[0, 130, 129] = float(value)
    stored = weight.view(torch.int16).numpy().view(storage) if data_type != "fp32" else weight.numpy()
    with np.errstate(all="ignore"):
        encoded = QUANTIZATIONS[name].encode(stored if name == "mxfp4" else stored[0], data_type)
    assert not np.isfinite(encoded.squares).all()


@pytest.mark.parametrize("name", NAMES)
def test_numbers_without_a_scale_become_zeros(name: str, way: str) -> None:
    encoded = QUANTIZATIONS[name].encode(np.zeros((128, 256), np.uint16), "bf16")
    found = [torch.from_numpy(np.ascontiguousarray(each)) for each in encoded.contents]
    if name == "int4":
        assert (found[0] == 0x88).all()
    else:
        assert not found[0].any()
    assert encoded.contents[1].all(), "nothing is divided by zero, now or when it is read"
    assert not encoded.squared_errors.any()


@pytest.mark.parametrize("shape", [(1, 1), (130, 257), (3, 1100)])
def test_rows_of_any_length_become_the_same_in_both_ways(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are no multiple of what C takes at a time, and blocks that are smaller at the ends."""
    values = np.random.default_rng(2).standard_normal(shape).astype(np.float16)
    found = [QUANTIZATIONS[name].encode(values, "fp16") for name in ("fp8", "fp8_block")]
    monkeypatch.setattr(groups, "library", lambda: None)
    for made, name in zip(found, ("fp8", "fp8_block"), strict=True):
        wanted = QUANTIZATIONS[name].encode(values, "fp16")
        assert all(map(np.array_equal, made.contents, wanted.contents))
        assert np.allclose(made.squared_errors, wanted.squared_errors, rtol=1e-5)


def test_without_a_compiler_numpy_quantizes_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "source")
    to_huggingface(source, tmp_path / "by_c", "fp8")
    assert "numpy quantizes" not in capsys.readouterr().err
    groups.library.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    to_huggingface(source, tmp_path / "by_numpy", "fp8")
    groups.library.cache_clear()
    assert "numpy quantizes, which takes four times as long as C: there is no C compiler" in capsys.readouterr().err
    made, wanted = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("by_numpy", "by_c"))
    assert made == wanted


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_holds_the_quantized_matrices_and_all_else_unchanged(name: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", intermediate_size=384 if name == "int4" else 320)
    manifest = to_huggingface(source, tmp_path / "hf", name)
    given, found = tensors(source), tensors(tmp_path / "hf")
    wanted: dict[str, torch.Tensor] = {}
    for key, tensor in given.items():
        wanted |= quantized(tensor, key, name) if in_layers(key, tensor) else {key: tensor}
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape, key
        assert torch.equal(found[key].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), key
    report = manifest.made_from["quantized"]
    assert manifest.made_from["quantization"] == name
    assert report.keys() == {key for key, tensor in given.items() if in_layers(key, tensor)}
    for key, errors in report.items():
        lost, weight = dequantized(found, key).double() - given[key].double(), given[key].double()
        rows = lost.norm(dim=1) / weight.norm(dim=1)
        assert errors["error"] == pytest.approx(float(lost.norm() / weight.norm()), rel=1e-3)
        assert errors["worst_error"] == pytest.approx(float(rows.max()), rel=1e-3)
        assert rows[errors["worst_row"]] == pytest.approx(float(rows.max()), rel=1e-3)
    assert manifest.problems(tmp_path / "hf") == []
    sizing = measure_huggingface(source, "bf16", 1, quantization=name)
    assert sizing.written_bytes == sum(tensor.nbytes for tensor in found.values())
    assert sizing.parameter_count == sum(tensor.numel() for tensor in given.values())


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_from_shards_is_what_comes_from_the_hub(name: str, tmp_path: Path) -> None:
    """Of shards, matrices are transposed, their heads are axes, and gate and up lie in two files."""
    source = saved(tmp_path / "source")
    convert(ConvertArguments(source, tmp_path / "2-gpu", 2, "bf16"))
    to_huggingface(tmp_path / "2-gpu", tmp_path / "shards", name)
    to_huggingface(source, tmp_path / "hub", name)
    made, wanted = tensors(tmp_path / "shards"), tensors(tmp_path / "hub")
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[key].view(torch.uint8), wanted[key].view(torch.uint8)) for key in wanted)
    said = [json.loads((tmp_path / path / "config.json").read_text()) for path in ("shards", "hub")]
    assert said[0]["quantization_config"] == said[1]["quantization_config"]


_SPARSE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_LATENT = {"kv_lora_rank": 96, "q_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
_LATENT |= {"moe_intermediate_size": 128, "n_group": 2, "topk_group": 1, "num_key_value_heads": 8}
_SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("name", "prefix", "own", "routers", "expert"),
    [
        *((name, *MIXTRAL, {"block_sparse_moe.gate": 2}, "block_sparse_moe.experts.3.w2") for name in NAMES),
        ("fp8", "Qwen3Moe", _SPARSE, {"mlp.gate": 2}, "mlp.experts.3.down_proj"),
        ("fp8_block", "DeepseekV3", {**_SHARED, **_LATENT}, {"mlp.gate": 1}, "mlp.experts.3.down_proj"),
        ("int4", "Glm4Moe", {**_SPARSE, **_SHARED}, {"mlp.gate": 1}, "mlp.shared_experts.down_proj"),
    ],
)
def test_the_router_of_a_mixture_stays_and_its_experts_do_not(
    name: str, prefix: str, own: dict[str, Any], routers: dict[str, int], expert: str, tmp_path: Path
) -> None:
    source = saved(tmp_path / "source", prefix, **own)
    to_huggingface(source, tmp_path / "hf", name)
    given, found = tensors(source), tensors(tmp_path / "hf")
    (router, count), *_ = routers.items()
    stays = [key.removesuffix(".weight") for key in given if key.endswith(f"{router}.weight")]
    assert len(stays) == count and all(torch.equal(found[f"{key}.weight"], given[f"{key}.weight"]) for key in stays)
    config = json.loads((tmp_path / "hf/config.json").read_text())["quantization_config"]
    said = config["modules_to_not_convert"] if name == "fp8_block" else config["ignore"]
    assert sorted(said) == sorted(["lm_head", *stays])
    weight = f"model.layers.1.{expert}.weight"
    assert (dequantized(found, weight) - given[weight].float()).norm() < 0.2 * given[weight].norm()
    matrices = {key for key, tensor in given.items() if in_layers(key, tensor)}
    assert Manifest.read(tmp_path / "hf").made_from["quantized"].keys() == matrices


@pytest.mark.parametrize("name", ["fp8", "fp8_block"])
def test_a_quantized_directory_is_a_source_of_what_its_numbers_mean(name: str, tmp_path: Path) -> None:
    to_huggingface(saved(tmp_path / "source", intermediate_size=320), tmp_path / "hf", name)
    to_huggingface(tmp_path / "hf", tmp_path / "back", None, weight_data_type="fp32")
    found, back = tensors(tmp_path / "hf"), tensors(tmp_path / "back")
    assert back.keys() == tensors(tmp_path / "source").keys()
    for key, tensor in back.items():
        assert torch.equal(tensor, dequantized(found, key) if in_layers(key, tensor) else found[key].float()), key
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_conversion_continues_within_its_tensors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are cut into parts, numbers and scales at two places of the file; errors survive the stop."""
    source = saved(tmp_path / "source")
    whole = to_huggingface(source, tmp_path / "whole", name)
    for name_of_bound in ("LEAST_PART_BYTES", "MOST_PART_BYTES"):
        monkeypatch.setattr(safetensors_layout, name_of_bound, 20_000)
    write, count = safetensors_files.write_part, 0

    def stopped(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count == 10:
            raise KeyboardInterrupt
        return write(*given)

    monkeypatch.setattr(target, "write_part", stopped)
    with pytest.raises(KeyboardInterrupt):
        to_huggingface(source, tmp_path / "hf", name, largest_file_bytes=200_000)
    assert list((tmp_path / "hf").glob("*.partial"))
    again: list[int] = []

    def counted(part: Any, *given: Any) -> Any:
        written = write(part, *given)
        again.append(len(written[1]))
        return written

    monkeypatch.setattr(target, "write_part", counted)
    manifest = to_huggingface(source, tmp_path / "hf", name, largest_file_bytes=200_000)
    assert again.count(0) and sum(again), "some parts were there already"
    assert manifest.made_from["quantized"] == whole.made_from["quantized"]
    made, wanted = tensors(tmp_path / "hf"), tensors(tmp_path / "whole")
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[key].view(torch.uint8), wanted[key].view(torch.uint8)) for key in wanted)
    assert manifest.problems(tmp_path / "hf") == []
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys() and len(set(index["weight_map"].values())) > 2


def _narrow(path: Path) -> Path:
    return saved(path, intermediate_size=320)


@pytest.mark.parametrize(
    ("name", "make", "more", "message"),
    [
        ("fp8", lambda path: save("gpt2", path), {}, "quantization=fp8: which tensors of gpt2 are linear layers"),
        ("int4", _narrow, {}, r"has no form for 2 tensors\n  model.layers.0.mlp.down_proj.weight  \[256, 320\]"),
        ("fp8", saved, {"allow_nonfinite": True}, "allow_nonfinite with quantization=fp8"),
        ("mxfp4", saved, {}, "quantization=mxfp4 is for gpt_oss, this model is llama"),
        ("fp5", saved, {}, "quantization 'fp5' is unknown"),
    ],
)
def test_what_cannot_be_quantized_is_refused_before_anything_is_written(
    name: str, make: Callable[[Path], Any], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(tmp_path / "source")
    with pytest.raises(CheckpointError, match=message):
        to_huggingface(tmp_path / "source", tmp_path / "hf", name, **more)
    assert not (tmp_path / "hf").exists()


def test_shards_are_not_quantized(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization=fp8 without --format=huggingface"):
        ConvertArguments(tmp_path, tmp_path / "1-gpu", quantization="fp8")


@pytest.mark.parametrize("name", ["fp8", "fp8_block"])
def test_the_drop_in_engine_is_given_a_directory_of_fp8(name: str, tmp_path: Path) -> None:
    to_huggingface(saved(tmp_path / "source"), tmp_path / "hf", name)
    arguments = ExportArguments(tmp_path / "hf", tmp_path / "repository", "mine", 1, 1, "bf16", 0, 0, 8)
    with pytest.raises(ArtefactError, match="int8_mode with weights of FP8, which are served as they are stored"):
        build_repository(replace(arguments, int8_mode=1))
    with pytest.raises(ArtefactError, match="quantization with weights of FP8, which are served as they are stored"):
        build_repository(replace(arguments, quantization="fp8"))
    build_repository(replace(arguments, fp8_activations=True, kv_cache_dtype="fp8"))
    written = (tmp_path / "repository/fastertransformer/config.pbtxt").read_text()
    assert {"fp8_activations", "kv_cache_dtype"} <= set(re.findall(r'key: "(\w+)"', written))
    served = next((tmp_path / "repository").rglob("model.safetensors"))
    assert served.read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()
    convert(ConvertArguments(tmp_path / "source", tmp_path / "plain", 1, "bf16", format="huggingface"))
    arguments = replace(arguments, ft_checkpoint=tmp_path / "plain", output=tmp_path / "at_load")
    build_repository(replace(arguments, fp8_activations=True, quantization=name))
    written = (tmp_path / "at_load/fastertransformer/config.pbtxt").read_text()
    assert re.search(rf'key: "quantization"\s+value {{\s*string_value: "{name}"', written)


def test_fp8_of_what_cannot_be_is_refused_at_export(tmp_path: Path) -> None:
    save_model("deepseek_v3", tmp_path / "source")
    convert(ConvertArguments(tmp_path / "source", tmp_path / "hf", 1, "fp32", format="huggingface"))
    arguments = ExportArguments(tmp_path / "hf", tmp_path / "repository", "mine", 1, 1, "bf16", 0, 0, 8)
    with pytest.raises(ArtefactError, match="kv_cache_dtype fp8 with latent attention, whose vectors stay"):
        build_repository(replace(arguments, kv_cache_dtype="fp8"))
    with pytest.raises(ArtefactError, match="fp8_activations with weights of which none is FP8"):
        build_repository(replace(arguments, fp8_activations=True))
    assert not (tmp_path / "repository").exists()


def test_the_drop_in_engine_refuses_whole_numbers_at_export(tmp_path: Path) -> None:
    to_huggingface(saved(tmp_path / "source"), tmp_path / "hf", "int4")
    arguments = ExportArguments(tmp_path / "hf", tmp_path / "repository", "mine", 1, 1, "bf16", 0, 0, 8)
    with pytest.raises(ArtefactError, match="format: pack-quantized  .only float-quantized is read"):
        build_repository(arguments)
    assert not (tmp_path / "repository").exists()


def test_a_number_that_is_not_finite_is_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    model.save_pretrained(source)
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight holds 1 values .* at \[3, 4\]"):
        to_huggingface(source, tmp_path / "hf", "int4", processes=1)


def test_mxfp4_experts_are_packed_as_gpt_oss_reads_them(way: str) -> None:
    """Of [expert, in, out] they become [expert, out, in]: transformers' own reader gives the nearest numbers back."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(2, 96, 160, generator=generator) * torch.exp2(
        torch.randint(-20, 3, (2, 96, 160), generator=generator)
    )
    weight[1, 32:64, 5] = 0.0
    weight = weight.to(torch.bfloat16)
    mxfp4 = QUANTIZATIONS["mxfp4"]
    outputs = mxfp4.outputs("gate_up_proj", (2, 96, 160), "bf16")
    encoded = mxfp4.encode(weight.view(torch.int16).numpy().view(np.uint16), "bf16")
    blocks, scales = (
        torch.from_numpy(each.reshape(output.shape)) for each, output in zip(encoded.contents, outputs, strict=True)
    )
    assert blocks.shape == (2, 160, 3, 16) and scales.shape == (2, 160, 3)
    made = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).float()
    assert made.shape == weight.shape
    grouped = weight.float().transpose(1, 2).unflatten(2, (3, 32))
    peak = grouped.abs().amax(3)
    exponent = torch.where(peak > 0, peak.log2().floor() + (peak / peak.log2().floor().exp2() >= 1.75) - 2, -127.0)
    assert torch.equal(scales.float(), exponent + 127)
    steps = E2M1[:8] * exponent.exp2()[..., None, None]
    nearest = (grouped.abs()[..., None] - steps).abs().amin(4)
    lost = (made.transpose(1, 2).unflatten(2, (3, 32)) - grouped).abs()
    assert torch.equal(lost, nearest), "each is one of the nearest numbers"
    again = mxfp4.encode(made.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16), "bf16")
    assert not again.squared_errors.any(), "what was of this form once loses nothing"
    assert np.allclose(encoded.squared_errors, lost.double().square().sum((2, 3)).numpy().reshape(-1), rtol=1e-4)


def test_configuration_and_conversion_know_the_same_quantizations() -> None:
    assert [each.name for each in Quantization] == list(QUANTIZATIONS)
