"""Choose the device and the number formats of a network.

config.pbtxt's data_type is fp32, fp16 or bf16, all of which a GPU computes in natively. On a CPU that has our kernels
(ops/host) matrices stay fp16 or bf16 in memory, which is what a product of few rows waits for, and all else is fp32;
where the processor multiplies pairs of bf16, a product with bf16 matrices rounds its input to bf16. AMX's tiles are
left to torch. Without the kernels (measured on an AMD EPYC with AVX512_BF16, 2 cores, torch 2.13, F.linear 768 x 3072)
fp16 matrices are 4 times slower than fp32 ones from a batch of about 32, so weights are rounded to fp16 and computed
with in fp32; bf16 is 2 to 2.7 times faster than fp32 where the processor has bf16 instructions, and slower elsewhere.

The head gives fp32 logits everywhere, as in FasterTransformer: bf16 logits have steps of 1/16 at 10, which would make
ties and shift log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ft_format.weight_format import NONE, WeightFormat

from ..errors import EngineError
from ..ops.host.panels import can_keep

TORCH_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """Number formats of one engine.

    Attributes:
        rounded: data_type, to which every weight is rounded first.
        compute: the format in which activations and KV cache are stored and computed.
        note: one line for a log.
        weights: format of the layers' matrices and of the head's (see linear.py).
        keeps_fp8: whether matrices that the files have in FP8 stay so; else they are as all others once they are read.
        rounds_activations: whether what these are multiplied with is rounded to FP8 too.
        quantization: of models.fp8.FORMS, that other matrices become when they are read; None: they do not.
        exact: to which the few tensors are rounded first that are read in fp32 in any format.
        narrow: the format in which matrices are stored, if it is not what is computed in.
    """

    rounded: torch.dtype
    compute: torch.dtype
    note: str
    weights: WeightFormat = NONE
    keeps_fp8: bool = False
    rounds_activations: bool = False
    quantization: str | None = None
    exact: torch.dtype = torch.float32
    narrow: torch.dtype | None = None

    @property
    def kept(self) -> torch.dtype:
        """The format in which matrices are stored before they are quantized."""
        return self.narrow or self.compute


def choose_precision(data_type: str, device: torch.device, weights: WeightFormat = NONE) -> Precision:
    """Choose the formats for config.pbtxt's ``data_type`` (fp32, fp16, bf16) and the matrices' format on a device.

    Raises:
        EngineError: the data_type is something else.
    """
    if data_type not in TORCH_TYPES:
        raise EngineError(f"data_type = {data_type} is none of {', '.join(TORCH_TYPES)}")
    rounded = TORCH_TYPES[data_type]
    compute, narrow, note = rounded, None, f"{data_type} on {device}"
    if device.type == "cpu" and data_type != "fp32":
        if can_keep(rounded) and not weights:
            compute, narrow, note = torch.float32, rounded, f"{note}: weights kept as {data_type}, arithmetic in fp32"
        elif data_type == "bf16" and multiplies_bf16():
            note = "bf16 on cpu: native, fp32 logits"
        else:
            compute, note = torch.float32, f"{note}: weights rounded to {data_type}, arithmetic in fp32"
    note += f", {weights.name} weights" if weights else ""
    return Precision(rounded, compute, note, weights, narrow=narrow)


def multiplies_bf16() -> bool:
    """Return whether this processor has bf16 multiply instructions (AVX512_BF16 or AMX)."""
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "sve_bf16"))


def choose_device(instance_kind: str = "", instance_device_id: int = 0, local_rank: int = 0) -> torch.device:
    """Choose the device of one instance.

    FasterTransformer's published config.pbtxt says KIND_CPU although the backend runs on GPUs, so KIND_CPU does not
    forbid a GPU: an instance uses a GPU if there is one, and the given one if it says KIND_GPU. Hide GPUs with
    CUDA_VISIBLE_DEVICES to run on the CPU. If several processes run on a host, each uses the GPU of its local rank.

    Raises:
        EngineError: KIND_GPU on a machine without that GPU.
    """
    wants_gpu = instance_kind in ("GPU", "KIND_GPU")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wants_gpu and instance_device_id >= count:
        raise EngineError(f"instance_group asks for GPU {instance_device_id}; this machine has {count}")
    if count:
        return torch.device("cuda", instance_device_id if wants_gpu else local_rank % count)
    return torch.device("cpu")
