"""What classes that see images as well call the tensors and modules of their text model: those of text alone, and more.

Names: transformers, ``models/{gemma3,llama4,qwen2_vl,qwen2_5_vl,qwen3_vl,qwen3_5}`` of versions 4 and 5.
"""

from __future__ import annotations

_RENAMED = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.lm_", "lm_"))


def text_name(name: str) -> str:
    """Return what the class of text alone calls a tensor or module; one that has no such words keeps its name."""
    return next((new + name.removeprefix(old) for old, new in _RENAMED if name.startswith(old)), name)
