"""Tensors in which several sections lie one after another: of each section every rank has a slice."""

from __future__ import annotations

from collections.abc import Iterator

from models.decoder import Decoder


def sections_of(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Return the widths of the sections of such tensors, along the axis that ranks share, by name."""
    by_role, found = dict(_by_role(decoder)), dict[str, tuple[int, ...]]()
    for layer in range(decoder.num_layer):
        for role, name in decoder.layer_tensors(layer).items():
            if role in by_role:
                found |= {f"{name}{end}": by_role[role] for end in ("", ".weight", ".bias")}
    return found


def _by_role(decoder: Decoder) -> Iterator[tuple[str, tuple[int, ...]]]:
    if decoder.mixture and decoder.mixture.is_in_halves:
        yield "experts_gate_up", (decoder.mixture.inter_size,) * 2
    if mamba := decoder.mamba:
        yield "mamba_in", tuple(mamba.widths[name] for name in mamba.in_sections)
        yield "mamba_conv", tuple(mamba.widths[name] for name in mamba.conv_sections)
    if delta := decoder.delta:
        mixed = tuple(delta.widths[name] for name in delta.conv_sections)
        yield from (("delta_qkv", mixed), ("delta_conv", mixed))
