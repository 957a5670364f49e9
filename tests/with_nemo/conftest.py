"""These tests need NeMo's tokenizers: ``make test-nemo`` runs them in a virtual environment of their own."""

from __future__ import annotations

from export_scripts.conversion.plan.nemo_ids import is_installed

collect_ignore_glob = [] if is_installed() else ["test_*.py"]
