"""What ``config.json`` says of the rotation of queries and keys, by transformers 5's own rules of precedence.

Rules: transformers, ``modeling_rope_utils.py``: ``convert_rope_params_to_dict``, ``standardize_rope_params``. Version 4
wrote ``rope_scaling`` and ``rope_theta``, version 5 writes ``rope_parameters``; whoever changes a file may leave both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.weights.architecture import Settings
from export_scripts.weights.values import number, positive
from ft_format.families.llama_dims import LINEAR_ROPE, LLAMA3_ROPE, PLAIN_ROPE
from handover.errors import CheckpointError
from models.checks import shown

ROPE_KEYS = ("rope_scaling", "rope_parameters")
"""The first that holds something counts, and of the other nothing."""
_REASON = "positions as they are, divided by one factor (linear) and Llama 3.1's (llama3) are read"
_ORIGINAL = "original_max_position_embeddings"


def rope_key(given: Settings) -> str:
    """Name the key that counts."""
    return next((key for key in ROPE_KEYS if given.get(key)), ROPE_KEYS[-1])


def rope_parameters(
    given: Settings, base_key: str = "rope_theta", part_key: str = "partial_rotary_factor"
) -> dict[str, Any]:
    """Complete what the key that counts says, as transformers does: with its type, its base and the rotated part.

    Args:
        given: ``config.json`` with the architecture's defaults.
        base_key: of the base beside the mapping; what the mapping itself says goes before.
        part_key: of the rotated part, likewise.

    Raises:
        CheckpointError: the value is no mapping.
    """
    said = given.get(rope_key(given)) or {}
    if not isinstance(said, Mapping):
        raise CheckpointError(f"config.json: {rope_key(given)} is {shown(said)}, not a mapping")
    rope = {"rope_theta": given.get(base_key, 10000.0), "rope_type": said.get("type", PLAIN_ROPE), **said}
    if given.get(part_key) is not None:
        rope.setdefault("partial_rotary_factor", given[part_key])
    if _ORIGINAL in given and rope["rope_type"] == LLAMA3_ROPE:
        rope[_ORIGINAL] = given[_ORIGINAL]
    return rope


def rotated_part(rope: Mapping[str, Any]) -> float:
    """Read how much of a head is rotated."""
    return number(rope.get("partial_rotary_factor", 1.0), "config.json: partial_rotary_factor")


def rope_problems(given: Settings) -> list[str]:
    """List what the Llama family cannot express of the rotation, one line each."""
    rope, kind = rope_parameters(given), rope_parameters(given)["rope_type"]
    if kind in (PLAIN_ROPE, LINEAR_ROPE, LLAMA3_ROPE) and not any(isinstance(value, dict) for value in rope.values()):
        return []
    return [f"{rope_key(given)}: {shown(kind if kind != PLAIN_ROPE else rope)}  ({_REASON})"]


def rope_dims(given: Settings) -> dict[str, Any]:
    """Read the Llama family's dimensions of the rotation.

    Raises:
        CheckpointError: a number is missing, or is none.
    """
    rope, where = rope_parameters(given), f"config.json: {rope_key(given)}"
    kind = rope["rope_type"]
    found: dict[str, Any] = {"rope_theta": above_zero(rope["rope_theta"], "config.json: rope_theta"), "rope_type": kind}
    if kind != PLAIN_ROPE:
        found["rope_scaling_factor"] = above_zero(rope.get("factor"), f"{where}: factor")
    if kind == LLAMA3_ROPE:
        for own in ("low_freq_factor", "high_freq_factor"):
            found[f"rope_{own}"] = above_zero(rope.get(own), f"{where}: {own}")
        length = rope.get(_ORIGINAL, given.get("max_position_embeddings"))
        found["rope_original_max_position"] = positive(length, f"{where}: {_ORIGINAL}")
    return found


def above_zero(value: Any, where: str) -> float:
    """Take a number above 0; CheckpointError: it is none."""
    result = number(value, where)
    if result <= 0:
        raise CheckpointError(f"{where} is {shown(value)}, not a number above 0")
    return result
