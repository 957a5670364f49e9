"""These tests need lm-evaluation-harness: ``make test-lm-eval`` runs them in a virtual environment of their own."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

# The hub must not be asked for anything.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
sys.path.append(str(Path(__file__).resolve().parents[1]))
collect_ignore_glob = [] if find_spec("lm_eval") else ["test_*.py"]
