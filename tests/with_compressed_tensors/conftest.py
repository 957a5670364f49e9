"""These tests need compressed-tensors, the library: ``make test-compressed-tensors`` installs it beside the others."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("compressed_tensors") else ["test_*.py"]
