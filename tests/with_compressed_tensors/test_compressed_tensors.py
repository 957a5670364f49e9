"""Quantized directories beside the library whose formats they are, and in transformers, which reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from support.tiny_models.dequantized import dequantized, tensors
from support.tiny_models.llama_hub_models import MIXTRAL, build_llama

from backends.fastertransformer.engine.ops.fp8 import quantized
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from export_scripts.quantization import QUANTIZATIONS

FORMATS = {"fp8": ("FP8_DYNAMIC", "float-quantized"), "int4": ("W4A16", "pack-quantized")}
STORED = {"bf16": (torch.bfloat16, np.uint16), "fp16": (torch.float16, np.float16), "fp32": (torch.float32, np.float32)}


def drawn(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights whose rows differ in size; some have an outlier, one is zeros."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.exp2(torch.randint(-9, 1, (rows, 1), generator=generator))
    weight[3, 5], weight[7] = 40.0, 0.0
    return weight.to(dtype)


def stored(weight: torch.Tensor, data_type: str) -> Any:
    bits = weight.view({4: torch.int32, 2: torch.int16}[weight.element_size()])
    return bits.numpy().view(STORED[data_type][1])


def compressed(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the library makes of a weight with the scale of its type and all else in fp32; and what that means."""
    preset, form = FORMATS[name]
    scheme = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[preset])
    grouped = weight if name == "fp8" else weight.reshape(len(weight), -1, 128)
    least, largest = (f(-1, keepdim=name == "fp8") for f in (grouped.amin, grouped.amax))
    scale, _ = calculate_qparams(least, largest, scheme.weights)
    compressor, wide = BaseCompressor.load_from_registry(form), {"weight_scale": scale.float()}
    made = compressor.compress({"weight": weight.float(), **wide}, scheme)
    return {**made, "weight_scale": scale}, compressor.decompress({**made, **wide}, scheme)["weight"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("data_type", STORED)
def test_rows_become_the_librarys_bytes(name: str, data_type: str) -> None:
    weight = drawn(320, 512, STORED[data_type][0])
    wanted, means = compressed(name, weight)
    encoded = QUANTIZATIONS[name].encode(stored(weight, data_type), data_type)
    outputs = QUANTIZATIONS[name].outputs("weight", (320, 512), data_type)
    contents = [*(np.ascontiguousarray(each).tobytes() for each in encoded.contents), *(o.content for o in outputs[2:])]
    assert wanted.keys() == {output.name for output in outputs}
    for output, content in zip(outputs, contents, strict=True):
        theirs = wanted[output.name].contiguous()
        assert tuple(theirs.shape) == output.shape and content == theirs.view(torch.uint8).numpy().tobytes()
    if name == "fp8":  # a weight that becomes so when it is loaded
        numbers, scales = quantized(weight, weight.dtype, (1, 512))
        assert torch.equal(numbers.view(torch.uint8), wanted["weight"].view(torch.uint8))
        assert torch.equal(scales, wanted["weight_scale"].float())
    lost = (means.double() - weight.double()).square().sum(1).numpy()
    assert np.allclose(encoded.squared_errors, lost, rtol=1e-4)


def test_mxfp4_has_the_librarys_numbers_and_powers_of_two() -> None:
    weight = drawn(96, 160, torch.bfloat16)
    weight[7] = weight[8]  # of zeros the library has no power of two
    scheme = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES["MXFP4A16"])
    grouped = weight.float().reshape(len(weight), -1, 32)
    scale, _ = calculate_qparams(grouped.amin(2), grouped.amax(2), scheme.weights)
    wanted = BaseCompressor.load_from_registry("mxfp4-pack-quantized").compress(
        {"weight": weight.float(), "weight_scale": scale}, scheme
    )
    encoded = QUANTIZATIONS["mxfp4"].encode(stored(weight.T.contiguous()[None], "bf16"), "bf16")
    assert encoded.contents[0].tobytes() == wanted["weight_packed"].numpy().tobytes()
    assert encoded.contents[1].tobytes() == wanted["weight_scale"].numpy().tobytes()


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "int4"])
@pytest.mark.parametrize("prefix", ["Llama", "Mixtral"])
def test_transformers_loads_the_directory(name: str, prefix: str, tmp_path: Path) -> None:
    """Its logits are those of the weights that the numbers mean, by their publishers' formulas."""
    own = MIXTRAL[1] if prefix == "Mixtral" else {}
    model = build_llama(prefix, hidden_size=256, intermediate_size=384, num_hidden_layers=2, head_dim=32, **own)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "source")
    given = {"weight_data_type": "bf16", "format": "huggingface", "quantization": name}
    convert(ConvertArguments(tmp_path / "source", tmp_path / "hf", **given))  # type: ignore[arg-type]
    said = json.loads((tmp_path / "hf/config.json").read_text())["quantization_config"]
    if name in FORMATS:
        config = QuantizationConfig.model_validate(said)
        scheme, preset = config.config_groups["group_0"], PRESET_SCHEMES[FORMATS[name][0]]
        assert isinstance(scheme, QuantizationScheme) and config.format == FORMATS[name][1]
        for part in ("weights", "input_activations"):
            ours, theirs = getattr(scheme, part), preset.get(part)
            assert (ours is None) == (theirs is None)
            for key in ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic") if ours else ():
                assert getattr(ours, key) == getattr(theirs, key), key
    found, ids = tensors(tmp_path / "hf"), torch.arange(16)[None]
    means = {
        key: tensor if key in found and found[key].dtype == tensor.dtype else dequantized(found, key).to(tensor.dtype)
        for key, tensor in tensors(tmp_path / "source").items()
    }
    (tmp_path / "meant").mkdir()
    save_file(means, tmp_path / "meant/model.safetensors", {"format": "pt"})
    (tmp_path / "meant/config.json").write_text((tmp_path / "source/config.json").read_text())
    loaded, meant = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / path, dtype=torch.bfloat16).eval()
        for path in ("hf", "meant")
    )
    assert any(not torch.equal(each, tensors(tmp_path / "source")[key]) for key, each in means.items())
    for module in loaded.modules():  # the library rounds activations of fp8, and of nothing else here
        module.quantization_enabled = False
    with torch.no_grad():
        assert torch.equal(meant(ids).logits, loaded(ids).logits)
