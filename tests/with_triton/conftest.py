"""These tests need Triton and a GPU, its interpreter, or its compiler: ``make test-kernels`` installs and runs both."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

_HAS_TRITON, _IS_INTERPRETED = find_spec("triton") is not None, os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = []
if not (_HAS_TRITON and (_IS_INTERPRETED or torch.cuda.is_available())):
    collect_ignore_glob += ["test_engine_kernels.py", "test_engine_decode_kernels.py", "test_engine_peer_sum.py"]
    collect_ignore_glob += [
        "test_engine_context_kernels.py",
        "test_engine_packed_inputs.py",
        "test_engine_grouped_kernels.py",
    ]
if not (_HAS_TRITON and _IS_INTERPRETED):  # on a CPU that is taken for a GPU
    collect_ignore_glob += ["test_engine_steps.py"]
if not _HAS_TRITON or _IS_INTERPRETED:  # its compiler needs no GPU
    collect_ignore_glob += ["test_engine_kernels_compile.py", "test_engine_kernels_variants.py"]
