"""These tests need Triton and a GPU, its interpreter, or its compiler: ``make test-kernels`` installs and runs both."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

_HAS_TRITON, _IS_INTERPRETED = find_spec("triton") is not None, os.environ.get("TRITON_INTERPRET") == "1"
_STEPS = ["test_engine_steps.py", "test_engine_mixed_steps.py"]
_COMPILED = ["test_engine_kernels_compile.py", "test_engine_kernels_variants.py"]
collect_ignore_glob = []
if not (_HAS_TRITON and (_IS_INTERPRETED or torch.cuda.is_available())):
    names = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    collect_ignore_glob += sorted(names - {*_STEPS, *_COMPILED})
if not (_HAS_TRITON and _IS_INTERPRETED):  # on a CPU that is taken for a GPU
    collect_ignore_glob += _STEPS
if not _HAS_TRITON or _IS_INTERPRETED:  # its compiler needs no GPU
    collect_ignore_glob += _COMPILED


@pytest.fixture(scope="session", autouse=_HAS_TRITON and _IS_INTERPRETED)
def language_is_replaced_once() -> None:
    """Let the interpreter replace Triton's language at the first launch, and not at every call of a function as well.

    It leaves replaced what it replaces for a function that a kernel calls; doing that again takes half of the time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    replace, unchanged = interpreter._patch_lang, interpreter._LangPatchScope
    language, done = SimpleNamespace(__globals__={"tl": tl, "core": tl.core}), list[Any]()

    def replace_once(function: object) -> Any:
        if not done:
            done.append(replace(language))
        return unchanged()

    interpreter._patch_lang = replace_once


@pytest.fixture(scope="session", autouse=_HAS_TRITON and _IS_INTERPRETED)
def types_are_made_once(pytestconfig: pytest.Config) -> None:
    """Let the interpreter make what stands for a shape or a type once, and not for every number that a kernel computes.

    It looks for overflows of 32 bits, a third of the time, where long tests run as well: those that would reach an
    output or an address show in what is compared.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    kinds, find = dict[str, Any](), interpreter._get_np_dtype

    def found(kind: Any) -> Any:
        name = kind.scalar.name
        return kinds[name] if name in kinds else kinds.setdefault(name, find(kind))

    @cache
    def of_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.core.tuple([tl.constexpr(each) for each in shape]), tl.constexpr(math.prod(shape))

    def of_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_shape(type.shape if type.is_block() else ())

    interpreter._get_np_dtype = found
    setattr(tl.core.tensor, "__init__", of_tensor)  # noqa: B010  (mypy lets no method be assigned)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=not pytestconfig.option.markexpr)


@pytest.fixture(scope="session", autouse=_HAS_TRITON and _IS_INTERPRETED)
def fp8_is_rounded_to_nearest() -> None:
    """Let the interpreter round to FP8 as GPUs do: it cuts small numbers off, and halves some that carry."""
    import triton.language as tl
    from triton.runtime import interpreter

    usual = interpreter._convert_float

    def convert(numbers: Any, kind: Any, target: Any, mode: Any) -> Any:
        if target != tl.float8e4nv or kind.primitive_bitwidth <= 8:
            return usual(numbers, kind, target, mode)
        return torch.tensor(numbers).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert
