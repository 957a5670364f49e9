"""Directories of FP8 that no conversion writes, and what FP8 means to transformers: for benchmarks.gpu.truth."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_FP8_ENDS = {"_scale": (1, 0), "_scale_inv": (128, 128)}
"""Ends of the names of scales, and rows and columns that share one; 0: all."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LARGEST = 448.0
_CLIPPED = 0.9  # of the largest input that is measured, what the largest number of its scale is
_MEASURED = 256  # tokens, by which inputs are measured


def meant_by_fp8(directory: Path, beside: Path) -> Any:
    """Load what a directory of FP8 means: each number times its scale, in fp32."""
    import transformers

    shutil.copytree(directory, beside)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (beside / "config.json").write_text(json.dumps(config))
    for path in beside.glob("*.safetensors"):
        tensors = load_file(path)
        found = {name: each.float() for name, each in tensors.items() if not name.endswith(tuple(_FP8_ENDS))}
        for name, end in ((name, end) for name in found for end in _FP8_ENDS if name + end in tensors):
            rows, columns = ((each or size) for each, size in zip(_FP8_ENDS[end], found[name].shape, strict=True))
            scales = tensors[name + end].float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            found[name] *= scales[: found[name].shape[0], : found[name].shape[1]]
        save_file(found, path, {"format": "pt"})
    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(beside, **given).eval()


def put_experts_into_arrays(directory: Path) -> None:
    """Put the experts of each layer, and their scales, into arrays [experts, out, in], as transformers 5 holds them."""
    (path,) = directory.glob("*.safetensors")
    found, arrays = load_file(path), dict[str, list[Tensor]]()
    for name in sorted((each for each in found if _EXPERT.search(each)), key=_number_of):
        if ".up_proj." in name:  # behind the gate's rows
            continue
        several = [found.pop(name)]
        if ".gate_proj." in name:
            several.append(found.pop(name.replace(".gate_proj.", ".up_proj.")))
        array = _EXPERT.sub(".experts.", name).replace(".gate_proj.", ".gate_up_proj.").replace(".weight", "")
        arrays.setdefault(array, []).append(_together(torch.cat, several))
    save_file(found | {name: _together(torch.stack, each) for name, each in arrays.items()}, path, {"format": "pt"})


def _number_of(name: str) -> int:
    found = _EXPERT.search(name)
    return int(found[1]) if found else 0


def _together(join: Callable[[list[Tensor]], Tensor], several: list[Tensor]) -> Tensor:
    numbers = [each.view(torch.uint8) for each in several]  # of one byte each, or of several
    return join(numbers).view(several[0].dtype)


@torch.no_grad()
def add_input_scales(directory: Path, model: Any, vocab: int) -> dict[str, Tensor]:
    """Measure what a directory's matrices are multiplied with, and write a scale for each, beyond which some of it is.

    Args:
        directory: of FP8, by compressed-tensors.
        model: what its weights mean.
        vocab: tokens that the model has.

    Returns:
        Scales, fp32 [1], by the names of modules within the layers; those of query, key and value differ.
    """
    (path,) = directory.glob("*.safetensors")
    found = load_file(path)
    names = [name.removesuffix(".weight") for name in found if found[name].dtype == torch.float8_e4m3fn]
    largest, modules = dict[str, Tensor](), _in_layers(model)

    def note(name: str, _: Any, inputs: tuple[Tensor, ...]) -> None:
        largest[name] = inputs[0].abs().amax()

    hooks = [modules[_within(name)].register_forward_pre_hook(partial(note, name)) for name in names]
    model(torch.randint(3, vocab, (1, _MEASURED), generator=torch.Generator().manual_seed(5)))
    for hook in hooks:
        hook.remove()
    shares = {name: _CLIPPED - 0.1 * (place % 3) for place, name in enumerate(names)}
    scales = {name: (shares[name] * largest[name] / _LARGEST).reshape(1) for name in names}
    save_file(found | {f"{name}.input_scale": each for name, each in scales.items()}, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
    (directory / "config.json").write_text(json.dumps(config))
    return {_within(name): each for name, each in scales.items()}


def rounding_inputs(model: Any, scales: dict[str, Tensor]) -> Any:
    """Let modules of a model round what they multiply to FP8, by the scales that add_input_scales returns."""

    def rounded(scale: Tensor, _: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scale = scale.to(inputs[0].device)
        codes = (inputs[0].float() / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        return ((codes.float() * scale).to(inputs[0].dtype), *inputs[1:])

    modules = _in_layers(model)
    for name, scale in scales.items():
        modules[name].register_forward_pre_hook(partial(rounded, scale))
    return model


def _in_layers(model: Any) -> dict[str, Any]:
    return {_within(name): module for name, module in model.named_modules()}


def _within(name: str) -> str:
    """Drop what stands before the layers in a name, of which a class and its files have different ones."""
    return name.partition("layers.")[2]
