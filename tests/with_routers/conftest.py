"""These tests need sglang-router and vllm-router: ``make test-routers`` installs both, in an environment of its own."""

from __future__ import annotations

import os

# The directory of their programs; the suite in the project's own environment has none.
collect_ignore_glob = [] if "ROUTERS" in os.environ else ["test_*.py"]
