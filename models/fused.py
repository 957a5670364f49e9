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
            for part in PARTS[whole]:
                name = apart.name_of(f"{part}.{kind}", index)
                found[name] = place.rows(first, shapes[name])
                first += shapes[name][0]
    return found
