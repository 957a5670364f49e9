"""NeMo's ``model_config.yaml``: what it is called, and the sizes that it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.weights.values import bounded
from ft_format.layout import LARGEST

CONFIG_FILE = "model_config.yaml"


def size_of(config: Mapping[str, Any], key: str, default: Any = None, hint: str = "") -> int:
    """Read a size or a count; null is the default.

    Raises:
        CheckpointError: it is none, or there is neither it nor a default.
    """
    value = config.get(key)
    return bounded(default if value is None else value, f"{CONFIG_FILE}: {key}", LARGEST, hint)
