"""What megatron-core itself was seen to save and to compute; ``make test-nemo`` compares it with the installed one."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from support.tiny_models.llama_forward import Weights

RECORD = Path(__file__).resolve().parents[2] / "data" / "megatron_core.json"


def recorded(kind: str) -> dict[str, Any]:
    """Digests of ``arrays`` by model, or ``effects``: fields that it computes with, and those that change a logit."""
    found: dict[str, Any] = json.loads(RECORD.read_text()).get(kind, {}) if RECORD.exists() else {}
    return found


def compare_or_record(kind: str, seen: dict[str, Any]) -> None:
    """Compare what was seen; MEGATRON_RECORD=1 in the environment writes it down instead."""
    if os.environ.get("MEGATRON_RECORD"):
        whole = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        whole[kind] = {**whole.get(kind, {}), **seen}
        RECORD.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
    assert {name: recorded(kind)[name] for name in seen} == seen


def digest_of(weights: Weights) -> str:
    """SHA-256 of all arrays with their names and shapes."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(f"{name} {weights[name].shape} {weights[name].dtype}".encode() + weights[name].tobytes())
    return found.hexdigest()
