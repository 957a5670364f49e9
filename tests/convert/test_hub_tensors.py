"""The tables of FasterTransformer's own families, both ways: what transformers saved is read and written again.

Oracles are transformers' state dicts: a table names each of their tensors, in their shapes, and no other. That what is
read is the right tensor of the family is shown by logits, in test_convert_huggingface.py; here, that what is written is
its inverse, at any size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export_scripts.checkpoints.huggingface import t5 as t5_source
from export_scripts.conversion.move.assembly import Assembly, Piece
from export_scripts.conversion.move.transposition import Transposer
from export_scripts.targets.huggingface import TARGETS
from export_scripts.targets.huggingface.table import taken, unfinished
from export_scripts.weights.architecture import Architecture
from export_scripts.weights.hub_keys import Facts
from export_scripts.weights.hub_tensor import HubTensor, rules_of
from export_scripts.weights.huggingface_t5 import T5
from export_scripts.weights.schema import as_tuple
from export_scripts.weights.settings import Settings
from ft_format.families import FAMILIES
from ft_format.families.family import Family

FEW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
WRITTEN = {target.model_type: target for name, each in TARGETS.items() if name != "llama" for target in each}
sizes = st.fixed_dictionaries(
    {
        "heads": st.integers(1, 5),
        "size": st.sampled_from([2, 4, 6]),
        "inner": st.integers(1, 23),
        "layers": st.integers(1, 3),
        "vocabulary": st.integers(9, 20),
        "positions": st.integers(1, 9),
        "is_either": st.booleans(),
        "is_untied": st.booleans(),
    }
)


def config_of(model_type: str, given: dict[str, Any]) -> Any:
    """Configure a model by transformers' class, of the drawn sizes and of one of its two forms."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    width, is_either = given["heads"] * given["size"], given["is_either"]
    alike = {"vocab_size": given["vocabulary"], "tie_word_embeddings": not given["is_untied"]}
    gpt2 = {"n_embd": width, "n_head": given["heads"], "n_layer": given["layers"], "n_positions": given["positions"]}
    bert = {"hidden_size": width, "num_attention_heads": given["heads"], "num_hidden_layers": given["layers"]}
    bert["max_position_embeddings"] = given["positions"]
    of: dict[str, dict[str, Any]] = {
        "gpt2": {**gpt2, "n_inner": given["inner"] if is_either else None},
        "gptj": {**gpt2, "rotary_dim": 2, "n_inner": given["inner"] if is_either else None},
        "gpt_neox": {**bert, "intermediate_size": given["inner"], "use_parallel_residual": is_either},
        "opt": {**bert, "ffn_dim": given["inner"], "do_layer_norm_before": is_either, "word_embed_proj_dim": width},
        "bloom": {"hidden_size": width, "n_head": given["heads"], "n_layer": given["layers"]},
        "t5": {
            **{"d_model": given["positions"] + 1, "d_kv": given["size"], "num_heads": given["heads"]},
            **{"d_ff": given["inner"], "num_layers": given["layers"], "num_decoder_layers": 3 - given["layers"] or 1},
            "feed_forward_proj": "gated-gelu" if is_either else "relu",
        },
    }
    return CONFIG_MAPPING[model_type](**alike, **of[model_type])


def state_of(model_type: str, config: Any, is_untied: bool) -> dict[str, np.ndarray]:
    """List what transformers saves of a model, without the copies that are tied."""
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, WRITTEN[model_type].class_name)(config)
    head = next(name for name in model.state_dict() if name in ("lm_head.weight", "embed_out.weight"))
    copies = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"} | (set() if is_untied else {head})
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in copies}
    if model_type == "gpt_neox" and is_untied:  # the name in its files
        shapes["embed_out.weight"] = shapes.pop(head)
    start, state = 1, {}
    for name, shape in shapes.items():
        state[name] = np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)
        start += state[name].size
    return state


def family_of(model_type: str) -> Family:
    name = next(name for name, targets in TARGETS.items() if WRITTEN[model_type] in targets)
    return next(family for family in FAMILIES if family.name == name)


def opened(model_type: str, config: Any, is_untied: bool) -> tuple[Any, Any, dict[str, HubTensor], Facts]:
    """Read the dimensions and the table of a configuration, and how the model is written."""
    said, facts = {**config.to_dict(), "tie_word_embeddings": not is_untied}, Facts(is_head_tied=not is_untied)
    target = WRITTEN[model_type]
    if not isinstance(target, Architecture):
        dims: Any = t5_source.read_dims(t5_source.settled(said))
        return dims, T5.table(dims, not facts.is_head_tied), target.written(dims, facts), facts
    settings_of = target.settled(Settings(said))
    assert target.problems(settings_of) == []
    dims = replace(target.dims(settings_of), has_untied_head=is_untied)
    return dims, target.table(settings_of, dims), target.written(dims, facts), facts


def as_written(tensor: HubTensor, pivot: np.ndarray) -> np.ndarray:
    """Write a tensor out of its family's, by the conversion's own way to bytes."""
    whole = Assembly(pivot.shape, ((Piece(pivot, "fp32", (0,) * pivot.ndim),),))
    values = taken(tensor, whole).values("fp32", np.empty(1 << 16, np.uint8), Transposer())
    return values.reshape(tensor.shape(pivot.shape))


@pytest.mark.parametrize("model_type", WRITTEN)
@FEW
@given(given=sizes)
def test_what_transformers_saved_is_read_and_written_again(model_type: str, given: dict[str, Any]) -> None:
    config = config_of(model_type, given)
    state = state_of(model_type, config, given["is_untied"])
    dims, table, tensors, facts = opened(model_type, config, given["is_untied"])
    assert tensors.keys() == state.keys()
    family, target = family_of(model_type), WRITTEN[model_type]
    specs = family.schema(dims)
    shapes = {name: spec.full_shape(dims) for name, spec in specs.items()}
    assert unfinished(tensors, target.dropped(dims, facts), shapes) == []
    prefix = getattr(target, "prefix", "")
    held = {name.removeprefix(prefix): values for name, values in state.items()}
    pivots: dict[str, np.ndarray] = {}
    for key in held:
        sources, layer = table.sources(key) or pytest.fail(f"{key} has no rule")
        for rule in as_tuple(table.rules[sources]):
            names = [each.format(layer=layer) for each in as_tuple(sources)]
            parts = [rule.layout(held[name], dims) for name in names]
            axis = rule.concat_axis
            pivots[rule.target.format(layer=layer)] = sum(parts) if axis is None else np.concatenate(parts, axis)
    assert {name: values.shape for name, values in pivots.items()} == shapes
    for name, tensor in tensors.items():
        made, wanted = as_written(tensor, pivots[tensor.pivot]), state[name].copy()
        wanted[: tensor.rows_before] = 0  # rows that no position uses
        if tensor.is_zeros:
            wanted[:] = 0
        elif tensor.pivot.endswith("attention.bias.sum"):
            wanted += state[name.replace("mlp.dense_4h_to_h", "attention.dense")]
        assert np.array_equal(made, wanted), name


ranks = st.integers(1, 4).flatmap(lambda rank: st.tuples(st.permutations(range(rank)), st.integers(0, 2**rank)))


@FEW
@given(order=ranks, drawn=st.lists(st.integers(1, 5), min_size=4, max_size=4), rows=st.integers(0, 2))
def test_any_order_and_division_of_axes_has_its_inverse(
    order: tuple[list[int], int], drawn: list[int], rows: int
) -> None:
    axes, cuts = tuple(order[0]), order[1]
    merged = [1]
    for axis in range(1, len(axes)):
        if cuts >> axis & 1:
            merged.append(1)
        else:
            merged[-1] += 1
    pivot = np.random.default_rng(cuts).random(drawn[: len(axes)], np.float32)
    rows_before = rows if merged[0] == 1 else 0
    tensor = HubTensor("weight", order=axes, merged=tuple(merged), rows_before=rows_before)
    written = as_written(tensor, pivot)
    assert written.shape == tensor.shape(pivot.shape)
    assert np.array_equal(tensor.laid_out(pivot.shape)(written, None), pivot)


def test_thirds_of_a_tensor_follow_one_another() -> None:
    from export_scripts.weights.hub_tensor import thirds
    from ft_format.families import gpt

    dims = gpt.GptDims(2, 3, 5, 1, 1, 7)
    ((sources, rule),) = rules_of(thirds(("q", "k", "v"), "attention.query_key_value"), gpt.LAYER, dims).items()
    assert sources == ("q.weight", "k.weight", "v.weight")
    weight = np.arange(36.0).reshape(6, 6)
    assert rule.concat_axis == 1
    assert np.array_equal(rule.layout(weight, dims).reshape(6, 6), weight.T)
