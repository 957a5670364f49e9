"""Tensors that hold several of a model's, one after another: taken apart where they lie, without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from models.decoder import Decoder
from models.fp8 import Place

PARTS: Mapping[str, tuple[str, ...]] = {"query_key_value": ("query", "key", "value"), "gate_up": ("gate", "up")}
"""The roles of what such a tensor holds, in their order along its first axis."""


def taken_apart(decoder: Decoder) -> Decoder:
    """Describe the same model with a tensor for each role."""
    attention, feed_forward = decoder.attention, decoder.feed_forward
    return replace(
        decoder, attention=replace(attention, is_fused=False), feed_forward=replace(feed_forward, is_fused=False)
    )


def places_of_parts(decoder: Decoder, located: Mapping[str, Place]) -> dict[str, Place]:
    """Find the tensors of ``taken_apart(decoder)`` in the files of ``decoder``."""
    apart, found = taken_apart(decoder), dict(located)
    shapes = {name: tensor.shape for name, tensor in apart.tensors().items()}
    for index in range(decoder.num_layer):
        for role in decoder.layer(index):
            whole, _, kind = role.rpartition(".")
            if whole not in PARTS:
                continue
            place, first = found.pop(decoder.name_of(role, index)), 0
            row_bytes = place.stored.size_bytes // place.stored.shape[0]
            for part in PARTS[whole]:
                name = apart.name_of(f"{part}.{kind}", index)
                found[name] = _rows(place, first, shapes[name], row_bytes)
                first += shapes[name][0]
    return found


def with_experts_apart(decoder: Decoder, located: Mapping[str, Place]) -> dict[str, Place]:
    """Find each expert's matrices in arrays of all, ``experts.gate_up_proj`` [experts, 2 middle, hidden] and ``down``.

    Files of Qwen3.6 have them where others have tensors of each expert.
    """
    mixture, found = decoder.mixture, dict(located)
    if not mixture or mixture.is_in_arrays or not mixture.is_gated:
        return found
    inside = decoder.names["expert.up"].partition("{expert}")[0]
    for name, place in located.items():
        before, is_there, kind = name.removesuffix(".weight").rpartition(inside)
        roles = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(kind, ())
        shape = place.stored.shape
        if not (is_there and roles) or len(shape) != 3 or place.scales or shape[1] % len(roles):
            continue
        count, rows, columns = shape[0], shape[1] // len(roles), shape[2]
        row_bytes = place.stored.size_bytes // (count * shape[1])
        for part in range(count * len(roles)):
            expert, role = divmod(part, len(roles))
            own = decoder.names[f"expert.{roles[role]}"].format(expert=expert)
            found[f"{before}{own}.weight"] = _rows(place, part * rows, (rows, columns), row_bytes)
        del found[name]
    return found


def _rows(place: Place, first: int, shape: tuple[int, ...], row_bytes: int) -> Place:
    offset = place.stored.offset + first * row_bytes
    stored = place.stored._replace(shape=shape, offset=offset, size_bytes=row_bytes * shape[0])
    return place._replace(stored=stored, scales=place.scales and place.scales._replace(first_row=first))
