"""These tests need megatron-core: ``make test-nemo`` runs them in a virtual environment of their own."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("megatron") else ["test_*.py"]
