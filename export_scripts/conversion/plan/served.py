"""What FasterTransformer does not serve, refused before anything is written: shards that are exported can be served.

The numbers are those that a ``config.ini`` may hold. ``tests/torture/test_random_models.py`` compares them with what
the drop-in engine accepts; FasterTransformer's own reads the same keys.
"""

from __future__ import annotations

from typing import Any

from ft_format.families.family import Family
from ft_format.layout import Dims
from handover.errors import CheckpointError
from models.decoder import Decoder

_ROTARY = ("gptj", "gptneox")


def check_served(family: Family, dims: Dims) -> None:
    """Refuse dimensions that an engine would refuse when it starts, and what FasterTransformer computes otherwise.

    Raises:
        CheckpointError: naming everything in the way.
    """
    if beyond := family.beyond(dims):
        raise CheckpointError(
            f"FasterTransformer's {family.name} does not compute this model\n  " + "\n  ".join(beyond),
            "take export.model.format=huggingface: vLLM, SGLang and, of many models, the drop-in engine serve that",
        )
    found = [problem for problem in (_about_rotation(family.name, dims), _about_epsilon(dims)) if problem]
    if found:
        raise CheckpointError(
            f"FasterTransformer's {family.name} cannot be served with these dimensions\n  " + "\n  ".join(found),
            "they come from the checkpoint's configuration",
        )


def _about_rotation(family: str, dims: Any) -> str:
    if family not in _ROTARY:
        return ""
    width, size = dims.rotary_embedding, dims.size_per_head
    if width >= 2 and width % 2 == 0 and width <= size:
        return ""
    return f"rotary_embedding: {width}  (it rotates pairs of a head's {size} elements: an even number, from 2 on)"


def _about_epsilon(dims: Any) -> str:
    epsilon = dims.norms.eps if isinstance(dims, Decoder) else dims.layernorm_eps
    return "" if 0 < epsilon < 1 else f"layernorm_eps: {epsilon:g}  (it is added to a variance: above 0 and below 1)"
