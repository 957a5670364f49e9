"""The source in the served model's number formats: every weight is rounded in the same way, quantized ones too.

The remaining difference from the served model is the rounding of arithmetic, which depends on the weights. It is
measured by rounding the output of each module of the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evaluation.parity.arguments import FP8_ACTIVATIONS
from ft_format.weight_format import FP8, WeightFormat
from models.quantization import stays

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_SCALES, _ROUNDS = "served_scales", "rounds_input"
_ROUTERS = ("gate", "router")
_E4M3, _LARGEST, _BLOCK, _ROUNDED_TO_EVEN = torch.float8_e4m3fn, 448.0, 128, 16


@dataclass(frozen=True)
class Formats:
    """Number formats of a served model, as its settings say.

    Attributes:
        weight_data_type: of the shards.
        data_type: of the computation.
        weights: of the layers' matrices in the engine.
        scales: type of the scales of FP8, those of rows; empty: that of the computation.
        others: of PRECISIONS, what else is rounded: FP8_CACHE, FP8_ACTIVATIONS.
        input_scales: by which the inputs of matrices are rounded, where the files have them, by module.
    """

    weight_data_type: str
    data_type: str
    weights: WeightFormat
    scales: str = ""
    others: tuple[str, ...] = ()
    input_scales: Mapping[str, float] = field(default_factory=dict)

    @property
    def are_known(self) -> bool:
        """Whether a source can be rounded to these formats."""
        return {self.weight_data_type, self.data_type} <= set(TYPES)

    def lacking(self, model: nn.Module) -> str:
        """Return why a model cannot be rounded to them; empty: it can."""
        modules = dict(model.named_modules())
        apart = [name for name in self.input_scales if not isinstance(modules.get(name), nn.Linear)]
        if not self.are_known:
            return f"the number formats are not known: {self}"
        return f"transformers has no input of {apart[0]} by itself, and {len(apart)} such" if apart else ""


@torch.no_grad()
def round_weights(model: nn.Module, formats: Formats) -> None:
    """Round every weight in place to the data type on disk, then to that of the computation."""
    for parameter in model.parameters():
        on_disk = parameter.to(TYPES[formats.weight_data_type])
        parameter.copy_(on_disk.to(TYPES[formats.data_type]).float())


def round_inputs(model: nn.Module, formats: Formats) -> None:
    """Have matrices round their inputs by the scales of files; a gradient is as if they did not."""

    def hook(scale: float, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = given[0]
        return (x + (_e4m3(x, torch.tensor(scale)) - x).detach(), *given[1:])

    for name, scale in formats.input_scales.items():
        model.get_submodule(name).register_forward_pre_hook(partial(hook, scale))


@torch.no_grad()
def quantise_layers(model: Any) -> None:
    """Quantize the layers' matrices in place to 255 steps for each output channel; the head is unchanged.

    Those of experts too, which transformers has in arrays, and not their routers.
    """
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _ROUTERS:
            continue
        for array, inputs in _arrays(module):
            array.copy_(_in_steps(array, inputs))
        if module is not head and (axis := _output_axis(module)) is not None:
            _quantise(module, module.weight, axis)


@torch.no_grad()
def round_to_fp8(model: Any, formats: Formats) -> None:
    """Make the layers' matrices FP8 in place, those of experts too: embedding, head, routers and the like stay."""
    dtype = TYPES[formats.scales or formats.data_type]
    for name, parameter in model.named_parameters():
        if parameter.dim() not in (2, 3) or stays(name) or not name.endswith(("weight", "_proj")):
            continue
        # transformers has experts in one tensor, and their gates and what these are multiplied with behind each other
        parts = 2 if parameter.dim() == 3 and "gate_up" in name else 1
        for matrix in parameter if parameter.dim() == 3 else (parameter,):
            for part in matrix.chunk(parts):
                _as_fp8(part, formats.weights == FP8, dtype)
    for module in model.modules():
        if isinstance(module, nn.Linear) and FP8_ACTIVATIONS in formats.others:
            setattr(module, _ROUNDS, formats.weights)


def _as_fp8(matrix: Tensor, is_by_rows: bool, dtype: torch.dtype) -> None:
    if is_by_rows:
        scales = (matrix.abs().amax(1, keepdim=True) / _LARGEST).to(dtype).float()
        matrix.copy_(_e4m3(matrix, torch.where(scales == 0, torch.finfo(dtype).eps, scales)))
        return
    for rows in torch.split(matrix, _BLOCK):
        for block in torch.split(rows, _BLOCK, 1):
            block.copy_(_e4m3(block, (block.abs().amax() / _LARGEST).clamp(min=1e-30)))


def _e4m3(numbers: Tensor, scales: Tensor) -> Tensor:
    return (numbers / scales).clamp(-_LARGEST, _LARGEST).to(_E4M3).float() * scales


@torch.no_grad()
def quantise_head(model: Any) -> None:
    """Quantize the head too, as on a GPU; an embedding with the same weights is unchanged."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    _quantise(head, head.weight, 0)


def _quantise(module: nn.Module, weight: Tensor, axis: int) -> None:
    setattr(module, _SCALES, _steps(weight, 1 - axis).flatten())
    weight.copy_(_in_steps(weight, 1 - axis))


def _arrays(module: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """List the arrays of a layer's experts, each with the axis of their inputs."""
    into, out = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    into = getattr(module, "up_proj", None) if into is None else into
    if isinstance(into, nn.Parameter) and isinstance(out, nn.Parameter) and into.dim() == out.dim() == 3:
        axis = 2 if into.shape[2] == out.shape[1] else 1
        yield from ((into, axis), (out, axis))


def _in_steps(numbers: Tensor, axis: int) -> Tensor:
    scales = _steps(numbers, axis)
    return (numbers / scales).round_() * scales


def _steps(numbers: Tensor, axis: int) -> Tensor:
    return numbers.abs().amax(axis, keepdim=True).clamp_(min=1e-12) / 127


def _output_axis(module: nn.Module) -> int | None:
    """Return the axis of a matrix' output channels; None if the module has no matrix."""
    if isinstance(module, nn.Linear):
        return 0
    return 1 if type(module).__name__ == "Conv1D" else None


@contextmanager
def rounded_arithmetic(model: Any, data_type: str) -> Iterator[None]:
    """Round the output of every module; the logits are unchanged, as in an engine."""
    dtype, head = TYPES[data_type], model.get_output_embeddings()

    def round_output(module: nn.Module, given: Any, found: Any) -> Any:
        if isinstance(found, Tensor):
            return _rounded(module, found, dtype)
        if isinstance(found, tuple) and found and isinstance(found[0], Tensor):
            return (_rounded(module, found[0], dtype), *found[1:])
        return found

    inner = [module for module in model.modules() if module is not model and module is not head]
    hooks = [module.register_forward_hook(round_output) for module in inner]
    hooks += [module.register_forward_pre_hook(_round_input) for module in inner if hasattr(module, _ROUNDS)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _round_input(module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Round what a matrix of FP8 is multiplied with, of each token, or of its every 128 numbers."""
    x, width = given[0], given[0].shape[-1] if getattr(module, _ROUNDS) == FP8 else _BLOCK
    if x.shape[-1] % width or x.shape[-1] % _ROUNDED_TO_EVEN or len(module.weight) % _ROUNDED_TO_EVEN:
        return given
    rows = x.reshape(-1, width)
    scales = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / _LARGEST
    return (_e4m3(rows, scales).view(x.shape), *given[1:])


def _rounded(module: nn.Module, found: Tensor, dtype: torch.dtype) -> Tensor:
    if not found.is_floating_point():
        return found
    if (scales := getattr(module, _SCALES, None)) is not None:  # an engine may also round the scales of int8
        bias = getattr(module, "bias", None)
        plain = found if bias is None else found - bias
        found = plain * (scales.to(dtype).float() / scales) + (0 if bias is None else bias)
    return found.to(dtype).float()
