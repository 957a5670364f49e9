"""Tables of p-tuned prompts as NeMo saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.checkpoints.nemo_archive import HIDDEN, write_nemo


def write_tables(
    path: Path, tasks: dict[str, int], folder: str = "", encoder: str = "mlp", hidden: int = HIDDEN, **changes: Any
) -> Path:
    """Write what NeMo saves for tasks trained together, with the encoder's weights in its three forms."""
    linear = {"0.weight": torch.ones(4, hidden), "0.bias": torch.ones(4)}
    encoders: dict[str, dict[str, Any]] = {
        "mlp": {"mlp_head": linear},
        "lstm": {"mlp_head": linear, "lstm_head": {"weight_ih_l0": torch.ones(4, hidden)}},
        "embedding": {},
    }
    tables = {
        f"prompt_table.{name}.prompt_embeddings.weight": torch.arange(rows * hidden, dtype=torch.float32).reshape(
            rows, -1
        )
        for name, rows in tasks.items()
    }
    state = {"prompt_table": tables, "embeddings": {"weight": torch.ones(3, hidden)}, **encoders[encoder]}
    templates = [{"taskname": name, "total_virtual_tokens": rows} for name, rows in tasks.items()]
    config = {"virtual_prompt_style": "p-tuning", "task_templates": templates, **changes}
    return write_nemo(path, config, {f"{folder}model_weights.ckpt": state}, files={})
