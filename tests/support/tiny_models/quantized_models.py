"""Directories of the hub in FP8, written by torch and safetensors: the way of each method's own files."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.tiny_models.huggingface_models import write_tokenizer
from support.tiny_models.llama_hub_models import build_llama, save_llama
from support.tiny_models.llama_models import build, tensors

MIXTURE = "qwen3_moe"
LARGEST = 448.0
"""Of float8_e4m3fn."""
_DENSE = "model.layers.3.mlp.down_proj"
LEFT_OUT = ["lm_head", _DENSE]
"""Layers that stay as they are: their weights have no scale."""


def to_fp8(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix to FP8 in blocks, as DeepSeek's files have it; the last blocks of an axis may be smaller."""
    counts = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    numbers, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(counts)
    for r in range(counts[0]):
        for c in range(counts[1]):
            place = slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns)
            scales[r, c] = weight[place].abs().max().clamp(min=1e-6) / LARGEST
            numbers[place] = (weight[place] / scales[r, c]).to(torch.float8_e4m3fn)
    return numbers, scales


@cache
def _dense(name: str) -> dict[str, bytes]:
    """Return the files of a tiny model in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        if name == MIXTURE:
            model = build_llama("Qwen3Moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32)
            model.to(torch.bfloat16).save_pretrained(folder)
            write_tokenizer(Path(folder))
        else:
            save_llama(name, Path(folder), dtype=torch.bfloat16)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def save_fp8(
    path: Path,
    said: dict[str, Any] | None,
    block: tuple[int, int] = (16, 32),
    scale: str = "_scale_inv",
    name: str = "qwen3",
) -> dict[str, torch.Tensor]:
    """Save a tiny model whose layers' matrices are FP8.

    Args:
        path: to write to.
        said: ``quantization_config``.
        block: of a scale; 0: all of the axis.
        scale: what follows the weight's name in its scale's.
        name: of the model, among ``MODELS``, or ``MIXTURE``.

    Returns:
        Every tensor that the file has.
    """
    path.mkdir(exist_ok=True)
    for file, content in _dense(name).items():
        (path / file).write_bytes(content)
    state = load_file(path / "model.safetensors")
    for key, weight in list(state.items()):
        if "_proj.weight" in key and _DENSE not in key:
            rows, columns = block[0] or weight.shape[0], block[1] or weight.shape[1]
            state[key], state[f"{key}{scale}"] = to_fp8(weight.float(), rows, columns)
    save_state(path, state, said)
    return state


def save_state(path: Path, state: dict[str, torch.Tensor], said: dict[str, Any] | None) -> None:
    """Write a directory's tensors and what its configuration says of them."""
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)
    if said is not None:
        config["quantization_config"] = said
    (path / "config.json").write_text(json.dumps(config))


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """What compressed-tensors writes into ``config.json`` of a model in FP8 with dynamic activations."""
    args = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy, **weights}
    rounded = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": rounded}},
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": LEFT_OUT,
    }


def deepseeks(block: list[int] | None) -> dict[str, Any]:
    """What ``quant_method`` fp8 says, as DeepSeek V3 and Qwen3-FP8 have it."""
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block}
    return {**said, "modules_to_not_convert": LEFT_OUT}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8, blocks": (deepseeks([16, 32]), {}),
    "fp8, tensor": (deepseeks(None), {"block": (0, 0)}),
    "fp8, experts": (deepseeks([16, 32]), {"name": MIXTURE}),
    "compressed-tensors, channel": (compressed("channel"), {"block": (1, 0), "scale": "_scale"}),
    "compressed-tensors, tensor": (compressed("tensor"), {"block": (0, 0), "scale": "_scale"}),
    "compressed-tensors, block": (compressed("block", block_structure=[16, 32]), {"scale": "_scale"}),
}


def static(method: str) -> dict[str, Any]:
    """What directories say whose activations are rounded by scales in the files."""
    rounded = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
    if method == "compressed-tensors":
        said = compressed("tensor", observer="minmax")
        said["config_groups"]["group_0"]["input_activations"] = {**rounded, "observer": "minmax"}
        return {**said, "kv_cache_scheme": rounded}
    if method == "modelopt":
        part = {"dynamic": False, "num_bits": 8, "type": "float"}
        groups = {"group_0": {"input_activations": part, "weights": part, "targets": ["Linear"]}}
        made = {"config_groups": groups, "quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.33.0"}}
        return {**made, "quant_method": method, "ignore": LEFT_OUT, "kv_cache_scheme": part}
    own = {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": LEFT_OUT}
    return {**own, "weight_block_size": None, "dequantize": False} if method == "fp8" else own


STATIC: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "compressed-tensors": ("_scale", "input_scale", ("k_scale", "v_scale")),
    "modelopt": ("_scale", "input_scale", ("k_proj.k_scale", "v_proj.v_scale")),
    "fp8": ("_scale_inv", "activation_scale", ()),  # transformers', and Mistral's directories
    "AutoFP8": ("_scale", "input_scale", ()),
}
"""Ends of a weight's and an input's scale, by who writes them, and names of the scales of a cache."""


def save_static(path: Path, method: str, name: str = "qwen3") -> dict[str, torch.Tensor]:
    """Save a tiny model of FP8 whose inputs have scales; of query, key and value, those of layer 1 alone differ.

    Some activations are beyond the largest number of the scale.
    """
    scale, end, of_cache = STATIC[method]
    state = save_fp8(path, None, (0, 0), scale, name)
    for number, key in enumerate([key for key, each in state.items() if each.dtype == torch.float8_e4m3fn]):
        size = 1 + number / 64 if "experts" in key or "layers.1." in key else 1
        state[key.removesuffix("weight") + end] = torch.tensor(0.004 * size).to(torch.bfloat16).float()
    state |= {f"model.layers.{layer}.self_attn.{each}": torch.tensor(0.5) for layer in range(4) for each in of_cache}
    for key in [key for key in state if "scale" in key]:
        state[key] = state[key].view((1,) if method == "compressed-tensors" else ())
    save_state(path, state, static(method))
    return state


def save_case(name: str, path: Path) -> dict[str, torch.Tensor]:
    """Save one of ``CASES``; returns every tensor of its file."""
    said, ways = CASES[name]
    return save_fp8(path, said, **ways)


def save_mxfp4(folder: Path) -> Path:
    """Save a GPT-OSS whose experts have any bytes of MXFP4, as OpenAI's files have them."""
    draw = torch.Generator().manual_seed(5)
    build("gpt_oss").to(torch.bfloat16).save_pretrained(folder)
    state = tensors(folder)
    for name in [key for key in state if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, inward, outward = state.pop(name).shape
        groups = (experts, outward, inward // 32)
        state[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, generator=draw)
        state[f"{name}_scales"] = torch.randint(120, 126, groups, dtype=torch.uint8, generator=draw)
    stays = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    save_state(folder, state, {"quant_method": "mxfp4", "modules_to_not_convert": stays})
    return folder
