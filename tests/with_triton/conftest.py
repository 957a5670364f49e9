"""These tests need Triton and a GPU, or Triton's interpreter: ``make test-kernels`` installs it and runs them so."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

_CAN_RUN = find_spec("triton") is not None and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")
collect_ignore_glob = [] if _CAN_RUN else ["test_*.py"]
