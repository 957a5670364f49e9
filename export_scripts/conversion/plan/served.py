"""What no engine serves, refused before anything is written: shards that are exported can be served.

The numbers are those that a ``config.ini`` may hold. ``tests/torture/test_random_models.py`` compares them with what
the drop-in engine accepts; FasterTransformer's own reads the same keys.
"""

from __future__ import annotations

from typing import Any

from ft_format.families.llama import LlamaDims, unsaid
from ft_format.layout import Dims
from handover.errors import CheckpointError

_ROTARY = ("gptj", "gptneox", "llama")


def check_served(family: str, dims: Dims) -> None:
    """Refuse dimensions that an engine would refuse when it starts.

    Args:
        family: FasterTransformer's name of the model.
        dims: of the model.

    Raises:
        CheckpointError: naming every number in the way.
    """
    about = (_about_rotation(family, dims), _about_epsilon(dims), _about_experts(dims))
    found = [problem for problem in about if problem]
    if isinstance(dims, LlamaDims):
        found += [f"{problem}; export.model.format=huggingface" for problem in unsaid(dims)]
    if found:
        raise CheckpointError(
            f"FasterTransformer's {family} cannot be served with these dimensions\n  " + "\n  ".join(found),
            "they come from the checkpoint's configuration",
        )


def _about_rotation(family: str, dims: Any) -> str:
    if family not in _ROTARY:
        return ""
    width, size = dims.rotary_embedding, dims.size_per_head
    if width >= 2 and width % 2 == 0 and width <= size:
        return ""
    return f"rotary_embedding: {width}  (it rotates pairs of a head's {size} elements: an even number, from 2 on)"


def _about_experts(dims: Any) -> str:
    experts = getattr(dims, "expert_num", 0)
    return f"expert_num: {experts}  (its feed-forward is one; export.model.format=huggingface)" if experts else ""


def _about_epsilon(dims: Any) -> str:
    epsilon = dims.layernorm_eps
    return "" if 0 < epsilon < 1 else f"layernorm_eps: {epsilon:g}  (it is added to a variance: above 0 and below 1)"
