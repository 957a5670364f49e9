"""Checkpoints that few tests need: a T5 of Hugging Face, and a NeMo GPT with rotary positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.checkpoints.nemo_archive import gpt_state, write_gpt
from support.tiny_models.t5_models import huggingface_t5


def nemo_rotary(root: Path) -> Path:
    state = {key: value for key, value in gpt_state().items() if "position_embeddings" not in key}
    return write_gpt(root, state, position_embedding_type="rope")


def huggingface_t5_files(root: Path, **changes: Any) -> Path:
    huggingface_t5(**changes).save_pretrained(root)
    return root
