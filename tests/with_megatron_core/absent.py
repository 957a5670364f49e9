"""Stand-ins for packages that Megatron-Bridge imports, and that its tables of weights never call.

Transformer Engine and the kernels of recurrent layers are built for GPUs; the others log and serve.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGES = (
    *("transformer_engine", "transformer_engine_torch", "mamba_ssm", "causal_conv1d", "fla", "flash_attn", "apex"),
    *("nvidia_resiliency_ext", "tensorboard", "wandb", "mlflow", "datasets", "modelopt", "nemo_run", "torchvision"),
    *("qwen_vl_utils", "timm", "open_clip", "grouped_gemm", "deep_ep", "triton", "six"),
)


class _OfClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Nothing(metaclass=_OfClass):
    """A class of which others inherit."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """Take whatever is given."""


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Nothing,), {})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made = _Module(spec.name)
        made.__dict__.update(__path__=[], __version__="2.10.0")
        return made

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def stand_in() -> None:
    """Let imports of packages that are not installed succeed; those that are go before."""
    sys.meta_path.append(_Finder())
