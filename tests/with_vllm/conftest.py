"""These tests need vLLM itself, its build for CPUs: ``make test-vllm`` installs it into an environment of its own."""

from __future__ import annotations

import os

# The program's path; the suite in the project's own environment has none.
collect_ignore_glob = [] if "VLLM" in os.environ else ["test_*.py"]
