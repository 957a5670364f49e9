"""These tests need SGLang itself; ``make test-sglang`` installs it without its kernels, into an environment."""

from __future__ import annotations

import os

# The environment's interpreter; the suite in the project's own environment has none.
collect_ignore_glob = [] if "SGLANG_PYTHON" in os.environ else ["test_*.py"]
