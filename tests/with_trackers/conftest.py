"""These tests need MLflow, Weights & Biases and NeMo Evaluator: ``make test-trackers`` installs them by themselves."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("mlflow") else ["test_*.py"]
