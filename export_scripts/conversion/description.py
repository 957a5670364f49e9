"""The description of a checkpoint that is elsewhere or does not exist yet: its ``model_config.yaml`` alone.

It needs ``vocab_size`` (rows of the embedding, padding included), which NeMo's configurations do not hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.files.yaml_file import parse_yaml
from export_scripts.checkpoints.nemo.gpt_config import check_expressible, read_dims
from export_scripts.weights.schema import ModelDims
from handover.errors import CheckpointError
from handover.regular_file import SETTINGS_BYTES, read_bytes

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Description:
    """A GPT that is described.

    Attributes:
        config: NeMo's keys.
        dims: what they come to.
    """

    config: Mapping[str, Any]
    dims: ModelDims


def is_description(path: Path) -> bool:
    """Whether a path is the description of a checkpoint instead of one."""
    return path.suffix in _SUFFIXES and path.is_file()


def read_description(path: Path) -> Description:
    """Read a description.

    Raises:
        CheckpointError: it is damaged, lacks a size, or FasterTransformer's GPT cannot express the model.
    """
    config = parse_yaml(read_bytes(path, SETTINGS_BYTES), str(path))
    check_expressible(config)
    vocab_size = config.get("vocab_size") or config.get("override_vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise CheckpointError(
            f"{path} does not say vocab_size", "a description needs it: rows of the embedding, padding included"
        )
    return Description(config, read_dims(config, vocab_size))
