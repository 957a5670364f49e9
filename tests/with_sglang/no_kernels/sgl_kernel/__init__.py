"""SGLang's kernels for CPUs, which no registry has: names that can be imported, and nothing that can be called.

SGLang's modules import them at once, and take torch's own operators where the processor has no AMX.
"""

from __future__ import annotations

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*arguments: object, **named: object) -> object:
        raise NotImplementedError(f"sgl_kernel.{name} is a kernel, which is not installed")

    return absent
