"""Each spelling of a training has an inverse, and shows the heads and halves that Megatron's own code puts there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import Any

import numpy as np
import pytest
from support.tiny_models.drawn_models import drawn

import models
from models import ARCHITECTURES, Architecture, Decoder
from models.blocks.attention import BY_HEAD, WHOLE
from models.spelling import Spelling
from models.tensor import Tensor

RNG = np.random.default_rng(0)


def decoders(architecture: Architecture) -> Iterator[Decoder]:
    """Random models of an architecture, with every norm and bias that a block may have."""
    for seed in range(12):
        plain = architecture.read(drawn(architecture.model_type, seed))
        attention = replace(
            plain.attention, has_qkv_bias=True, has_output_bias=True, qk_norm=(BY_HEAD, WHOLE)[seed % 2]
        )
        feed_forward = replace(plain.feed_forward, has_bias=True)
        norms = replace(plain.norms, is_before=True, is_after=True)
        yield replace(plain, attention=attention, feed_forward=feed_forward, norms=norms)


def ranks_of(decoder: Decoder) -> list[int]:
    common = gcd(decoder.kv_head_num, decoder.inter_size, decoder.delta.key_head_num if decoder.delta else 0)
    return [ranks for ranks in range(1, common + 1) if common % ranks == 0]


def part_of_rank(spelling: Spelling, kind: str, tensors: dict[str, Tensor], decoder: Decoder, ranks: int) -> Any:
    """Random numbers in the shape that a training's rank has of a tensor: what it holds, one after another."""
    shapes = []
    for role in spelling.roles:
        tensor = tensors[f"{role}.{kind}"].sized(decoder.axis_size)
        cut = None if spelling.is_stacked else tensor.split_axis
        shapes.append([size // (ranks if axis == cut else 1) for axis, size in enumerate(tensor.shape)])
    experts = decoder.expert_num if spelling.is_stacked else 1
    rows = sum(shape[0] for shape in shapes) // experts
    return RNG.standard_normal((*([experts] if spelling.is_stacked else []), rows, *shapes[0][1:]))


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.model_type)
def test_what_is_read_and_written_again_is_the_same(architecture: Architecture, is_apart: bool) -> None:
    compared = 0
    for decoder in decoders(architecture):
        layer = decoder.roles
        for spelling in decoder.spellings(is_apart):
            for kind in filter(None, spelling.kinds):
                if f"{spelling.roles[0]}.{kind}" not in layer:
                    continue
                tensors = {role: layer[f"{role}.{kind}"] for role in spelling.roles}
                for ranks in ranks_of(decoder) if spelling.section_axis == 0 else [1]:  # which are read whole
                    values = part_of_rank(spelling, kind, layer, decoder, ranks)
                    parts = {role: spelling.read(values, role, tensors[role], decoder.axis_size) for role in tensors}
                    assert all(np.shares_memory(part, values) for part in parts.values()), "views"
                    assert sum(part.size for part in parts.values()) == values.size
                    made = np.full_like(values, np.nan)
                    spelling.write(parts, made, tensors, decoder.axis_size)
                    assert np.array_equal(made, values)
                    compared += 1
    assert compared > 100


def test_every_tensor_of_a_layer_has_a_spelling_and_no_two_have_one_name() -> None:
    for architecture in ARCHITECTURES:
        for decoder in decoders(architecture):
            for is_apart in (False, True)[: 1 + decoder.feed_forward.is_gated]:
                spellings = decoder.spellings(is_apart)
                roles = {role for index in range(decoder.num_layer) for role in decoder.layer_tensors(index)}
                of_transformers_alone = {"query_key_value", "gate_up"} if decoder.attention.is_fused else set()
                assert roles - of_transformers_alone <= {role for each in spellings for role in each.roles}
                names = [(name, spelling.sections) for spelling in spellings for name in spelling.names]
                assert len(names) == len(set(names))


def test_heads_of_a_group_lie_before_its_key_and_value() -> None:
    """megatron-core, attention.py, get_query_key_value_tensors: [groups, heads of the group + 2, size]."""
    decoder = models.find("llama").read({**drawn("llama", 5), "num_attention_heads": 6, "num_key_value_heads": 3})
    size, width = decoder.size_per_head, decoder.hidden_units
    fused = RNG.standard_normal((3 * 4 * size, width))
    spelling = next(each for each in decoder.spellings() if each.roles[0] == "query")
    layer = decoder.layer()
    query, key, value = (
        spelling.read(fused, role, layer[f"{role}.weight"], decoder.axis_size).reshape(-1, size, width)
        for role in spelling.roles
    )
    for group in range(3):
        rows = fused[group * 4 * size : (group + 1) * 4 * size].reshape(4, size, width)
        assert np.array_equal(query[2 * group : 2 * group + 2], rows[:2])
        assert np.array_equal(key[group], rows[2])
        assert np.array_equal(value[group], rows[3])


def test_the_gate_is_the_first_half_of_each_ranks_part() -> None:
    decoder = models.find("mixtral").read(drawn("mixtral", 2))
    spelling = next(each for each in decoder.spellings() if each.is_stacked and len(each.roles) > decoder.expert_num)
    middle, width = decoder.inter_size, decoder.hidden_units
    values = RNG.standard_normal((decoder.expert_num, 2 * middle, width))
    tensor = decoder.layer()["experts.1.up.weight"]
    assert np.array_equal(spelling.read(values, "experts.1.gate", tensor, decoder.axis_size), values[1, :middle])
    assert np.array_equal(spelling.read(values, "experts.1.up", tensor, decoder.axis_size), values[1, middle:])
