"""NeMo's GPTs without a table of positions, and NeMo's rotation by its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from support.checkpoints.megatron_core import core_state
from support.checkpoints.nemo_archive import HEADS, POSITIONS, VOCAB, gpt_config, write_nemo

IDS = np.random.default_rng(1).integers(0, VOCAB, (2, POSITIONS))


def without_positions(groups: int = HEADS) -> dict[str, Any]:
    return {key: value for key, value in core_state(groups).items() if "position_embeddings" not in key}


def turned(width: int) -> Any:
    """NeMo's ``apply_rotary_pos_emb`` by its source: the first ``width`` elements, half against half."""

    def turn(x: np.ndarray) -> np.ndarray:
        frequencies = 1 / 10000 ** (np.arange(0, width, 2) / width)
        angles = np.outer(np.arange(x.shape[1]), frequencies)
        angles = np.concatenate([angles, angles], -1)
        first, rest = x[..., :width], x[..., width:]
        half = np.concatenate([-first[..., width // 2 :], first[..., : width // 2]], -1)
        return np.concatenate([first * np.cos(angles) + half * np.sin(angles), rest], -1)

    return turn


def write(path: Path, state: dict[str, Any], **config: Any) -> Path:
    return write_nemo(path, gpt_config(mcore_gpt=True, **config), {"model_weights.ckpt": state})
