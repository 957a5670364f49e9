"""What quantized files mean, by their publishers' formulas and in torch alone; and what the nearest numbers are."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory."""
    return {name: each for path in sorted(directory.glob("*.safetensors")) for name, each in load_file(path).items()}


def dequantized(found: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A weight in fp32, from what a directory has of it."""
    if f"{name}_packed" in found:
        packed, scale = found[f"{name}_packed"], found[f"{name}_scale"].float()
        shape = found[f"{name}_shape"].tolist()
        numbers = torch.stack([(packed >> 4 * place) & 15 for place in range(8)], -1).reshape(shape) - 8
        return numbers * scale.repeat_interleave(128, 1)
    numbers = found[name].float()
    if f"{name}_scale_inv" in found:  # DeepSeek-V3, inference/kernel.py: weight_dequant
        scale = found[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return numbers * scale[: numbers.shape[0], : numbers.shape[1]]
    return numbers * found[f"{name}_scale"].float()


def quantized(weight: torch.Tensor, name: str, quantization: str) -> dict[str, torch.Tensor]:
    """What a directory has of a weight: the largest number of what shares a scale becomes the type's largest."""
    wide, kind = weight.float(), weight.dtype
    if quantization == "fp8":
        scale = (wide.abs().amax(1, keepdim=True) / 448).to(kind)
        return {name: (wide / scale.float()).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    if quantization == "fp8_block":
        numbers = torch.empty(wide.shape, dtype=torch.float8_e4m3fn)
        scale = torch.empty([-(-size // 128) for size in wide.shape])
        for row in range(scale.shape[0]):
            for column in range(scale.shape[1]):
                block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
                scale[row, column] = wide[block].abs().max() / 448
                numbers[block] = (wide[block] / scale[row, column]).to(torch.float8_e4m3fn)
        return {name: numbers, f"{name}_scale_inv": scale}
    grouped = wide.unflatten(1, (-1, 128))
    scale = (grouped.abs().amax(2) / 7.5).to(kind)
    codes = (grouped / scale.float()[..., None]).round().clamp(-8, 7).flatten(1).to(torch.int64) + 8
    words = sum(codes.unflatten(1, (-1, 8))[..., place] << 4 * place for place in range(8))
    assert isinstance(words, torch.Tensor)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": torch.tensor(wide.shape)}
