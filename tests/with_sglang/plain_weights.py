"""Make the quantized weights that SGLang has loaded plain, so that its own layers for those compute the model.

Its kernels for FP8, int4 and MXFP4 are for GPUs and for processors with AMX. What stands in their place is: a GPU's
compute capability, by which it takes or refuses a format; fp32 beside the formats' 16-bit types; and behind its loader,
which has put numbers and scales where its classes want them, each layer's weight as its format's publishers define it,
with SGLang's method for weights that are not quantized.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod

_HOPPER = (9, 0)
_GROUP, _BLOCK, _PAIRS = 128, 128, 32  # of int4's, FP8's and MXFP4's scales
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def allow_quantization() -> None:
    """Let SGLang make the layers of quantized weights on a CPU."""
    torch.cuda.get_device_capability = lambda device=None: _HOPPER
    for config in (CompressedTensorsConfig, Fp8Config, Mxfp4Config):
        config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32, torch.bfloat16])


def is_quantized(layer: torch.nn.Module) -> bool:
    return any("scale" in name for name, _ in layer.named_parameters(recurse=False))


@torch.no_grad()
def make_plain(model: torch.nn.Module) -> int:
    """Replace every quantized weight by the numbers that it stands for, and say how many there were."""
    count = 0
    for layer in [each for each in model.modules() if is_quantized(each)]:
        own = {name: value.data for name, value in layer.named_parameters(recurse=False)}
        names = ("w13_weight", "w2_weight") if isinstance(layer, FusedMoE) else ("weight",)
        for name in own:
            if name.startswith(("weight", "w13", "w2")) and not name.endswith("bias"):
                delattr(layer, name)
        for name in names:
            layer.register_parameter(name, torch.nn.Parameter(_plain(own, name), requires_grad=False))
            count += 1
        _compute_plainly(layer)
    return count


def _compute_plainly(layer: Any) -> None:
    if isinstance(layer, FusedMoE):
        layer.quant_method = UnquantizedFusedMoEMethod(layer.use_triton_kernels)
        layer.quant_method.create_moe_runner(layer, layer.moe_runner_config)
    else:
        layer.quant_method = UnquantizedLinearMethod()


def _plain(own: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a weight in fp32, [out, in] or [expert, out, in]."""
    if f"{name}_packed" in own:
        packed, scale = own[f"{name}_packed"], own[f"{name}_scale"].float()
        if packed.dim() == 3:  # experts are loaded transposed
            packed, scale = packed.mT, scale.mT
        numbers = torch.stack([(packed >> 4 * place) & 15 for place in range(8)], -1).flatten(-2) - 8
        return (numbers * scale.repeat_interleave(_GROUP, -1)).contiguous()
    numbers = own[name]
    if numbers.dtype == torch.uint8:
        wide = torch.stack([_E2M1[(numbers & 15).long()], _E2M1[(numbers >> 4).long()]], -1).flatten(-2)
        return wide * torch.exp2(own[f"{name}_scale"].float() - 127).repeat_interleave(_PAIRS, -1)
    if f"{name}_scale_inv" in own:
        scale = own[f"{name}_scale_inv"].repeat_interleave(_BLOCK, -2).repeat_interleave(_BLOCK, -1)
        return numbers.float() * scale[..., : numbers.shape[-2], : numbers.shape[-1]]
    return numbers.float() * own[f"{name}_scale"].float()
