"""What models/ says of each architecture is what transformers' own class has: names, shapes, and keys both ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import llama_models
from support.tiny_models.drawn_models import config_of, drawn, saved_shapes

import models
from models import ARCHITECTURES, Architecture, ModelError
from models.blocks.rotary import Rotary

DRAWS, ALL = 12, 200
_FUNCTIONS = ("hidden_act", "hidden_activation")
_SWITCHES = (
    *("use_sliding_window", "max_window_layers", "sliding_window", "no_rope_layers", "decoder_sparse_step"),
    *("mlp_only_layers", "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
    "num_nextn_predict_layers",
    *("full_attention_interval", "attention_chunk_size", "interleave_moe_layer_step"),
)


each = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.model_type)
some_and_all = pytest.mark.parametrize(
    "seeds", [range(DRAWS), pytest.param(range(DRAWS, ALL), marks=pytest.mark.long)], ids=("some", "the others")
)


@each
@some_and_all
def test_tensors_are_those_that_transformers_saves(architecture: Architecture, seeds: range) -> None:
    for seed in seeds:
        values = drawn(architecture.model_type, seed)
        made = architecture.read(values).tensors()
        wanted = saved_shapes(config_of(values), architecture.class_name)
        assert {name: tensor.shape for name, tensor in made.items()} == wanted, values


@each
def test_a_description_that_was_written_is_read_again(architecture: Architecture) -> None:
    for seed in range(ALL):
        decoder = architecture.read(drawn(architecture.model_type, seed))
        assert architecture.read(architecture.write(decoder)) == decoder
        assert models.Decoder.of(decoder.fields(), model_type=decoder.model_type, names=decoder.names) == decoder


@each
@some_and_all
def test_what_is_written_means_the_same_to_transformers(architecture: Architecture, seeds: range) -> None:
    for seed in seeds:
        values = drawn(architecture.model_type, seed)
        written = architecture.write(architecture.read(values))
        meant, made = config_of(values), config_of({**written, "model_type": architecture.model_type})
        keys = written.keys() - {*_SWITCHES, *_FUNCTIONS, "rope_scaling"} | {"layer_types"}
        assert {key: getattr(made, key, None) for key in keys} == {key: getattr(meant, key, None) for key in keys}
        assert windows(made) == windows(meant)
        assert rotating(made) == rotating(meant)
        assert not any(rotating(meant)) or rotations(made) == rotations(meant)
        assert torch.allclose(function(made), function(meant), atol=1e-6)


@pytest.mark.parametrize("name", llama_models.MODELS)
def test_what_is_written_computes_the_same_logits(name: str) -> None:
    """A model of transformers, and one of what is written of its configuration, with the same weights."""
    import transformers

    model = llama_models.build(name)
    architecture = models.find(model.config.model_type)
    written = architecture.write(architecture.read(model.config.to_dict()))
    config = config_of({**written, "model_type": architecture.model_type, "pad_token_id": None})
    config._attn_implementation = "eager"
    made = getattr(transformers, architecture.class_name)(config).eval()
    made.load_state_dict(model.state_dict())
    assert np.array_equal(llama_models.logits(made), llama_models.logits(model))


def windows(config: Any) -> list[int | None]:
    """The window or chunk of each layer that has one; transformers puts Qwen's switches into the list of types."""
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return [getattr(config, sizes[kind], None) if kind in sizes else None for kind in kinds]


def rotating(config: Any) -> list[bool]:
    """Which layers rotate: transformers, ``SmolLM3Attention``, ``Llama4TextAttention`` and ``Exaone4Attention``."""
    layers = range(config.num_hidden_layers)
    if config.model_type == "nemotron_h":
        return [False for _ in layers]
    if config.model_type in ("smollm3", "llama4_text"):
        return [bool(config.no_rope_layers[layer]) for layer in layers]
    if config.model_type in ("exaone4", "exaone_moe") and config.sliding_window is not None:
        return [config.layer_types[layer] == "sliding_attention" for layer in layers]
    return [True for _ in layers]


def rotations(config: Any) -> Any:
    """What each kind of layers that there are is rotated by, of a short text and of one beyond all lengths."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    said = config.rope_parameters
    found = []
    for kind in sorted(set(config.layer_types)) if "full_attention" in said else [None]:
        own = said[kind] if kind else said
        found.append((kind, own["rope_type"], own["rope_theta"], own.get("partial_rotary_factor", 1.0)))
        for length in (None, 1 << 20) if own["rope_type"] != "default" else ():
            frequencies, factor = ROPE_INIT_FUNCTIONS[own["rope_type"]](config, seq_len=length, layer_type=kind)
            found.append((*frequencies.tolist(), factor))
    return found


def function(config: Any) -> torch.Tensor:
    """What the feed-forward's function makes of some numbers; later Gemmas read the second key."""
    from transformers.activations import ACT2FN

    is_hybrid = config.model_type == "nemotron_h"
    key = "mlp_hidden_act" if is_hybrid else _FUNCTIONS[config.model_type in ("gemma2", "gemma3_text")]
    values: torch.Tensor = ACT2FN[getattr(config, key)](torch.linspace(-3, 3, 50))
    return values


@each
def test_a_rank_has_whole_heads_and_its_part_of_the_middle(architecture: Architecture) -> None:
    read = (architecture.read(drawn(architecture.model_type, seed)) for seed in range(DRAWS))
    decoder = next(each for each in read if {"attention", "latent"} & {*each.layers[0].blocks})
    tensors = decoder.tensors()
    roles = decoder.layer_tensors(0)
    by_head, output = ("latent.kv_up", "latent.output") if decoder.latent else ("query", "attention_output")
    assert by_head not in roles or tensors[f"{roles[by_head]}.weight"].split_axis == 0
    assert tensors[f"{roles[output]}.weight"].split_axis == 1
    down = roles.get("down") or roles.get("experts.1.down") or roles[output]  # which may be a layer by itself
    down, last = roles.get("experts_down") or f"{down}.weight", decoder.name_of("final_norm.weight")
    assert (tensors[down].split_axis, tensors[last].split_axis) == (1, None)
    assert {name for role in roles.values() for name in tensors if f"{name}.".startswith(f"{role}.")} == {
        name for name in tensors if name.startswith(f"{decoder.names['layer'].format(layer=0)}.")
    }


def test_a_head_that_is_rotated_in_part_keeps_its_width() -> None:
    """transformers multiplies the size by the part and cuts off: of 22 of 96 that is 21 for the nearest number."""
    nemotron, whole = models.find("nemotron"), {"partial_rotary_factor": 1.0, "rope_scaling": None}
    for size in range(2, 300, 2):
        decoder = nemotron.read({**drawn("nemotron", 3), "head_dim": size, **whole})
        for width in range(2, size + 1, 2):
            layers = tuple(replace(layer, rotary=Rotary(width)) for layer in decoder.layers)
            part = nemotron.write(replace(decoder, layers=layers))["partial_rotary_factor"]
            assert int(size * part) == width


def test_what_an_architecture_lacks_is_named_with_what_it_has() -> None:
    qwen3 = models.find("qwen3").read(drawn("qwen3", 0))
    llama = models.find("llama")
    with pytest.raises(ModelError, match=r"attention\.qk_norm: head  \(llama has \)"):
        llama.write(qwen3)
    with pytest.raises(ModelError, match="model_type is 'falcon'\nhint: known are llama, mistral"):
        models.find("falcon")
    with pytest.raises(ModelError, match=r"rope_scaling: proportional  \("):
        llama.read({**drawn("llama", 0), "rope_scaling": {"rope_type": "proportional", "factor": 2.0}})
    with pytest.raises(ModelError, match="hidden_size is 'x', not a positive number"):
        llama.read({**drawn("llama", 0), "hidden_size": "x"})


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_convolutions_of_linear_layers_have_one_function(model_type: str) -> None:
    """Their classes give them the feed-forward's; layers of attention alone may have any."""
    qwen, base = models.find(model_type), drawn(model_type, 0) | {"num_hidden_layers": 2}
    one = {**base, "layer_types": ["full_attention", "linear_attention"]}
    for word in ("silu", "swish"):
        assert qwen.read({**one, "hidden_act": word}).delta
    with pytest.raises(ModelError, match=r"hidden_act: gelu  \(convolutions of linear layers have silu here\)"):
        qwen.read({**one, "hidden_act": "gelu"})
    alone = qwen.read({**base, "layer_types": ["full_attention"] * 2, "hidden_act": "gelu"})
    assert qwen.read(qwen.write(alone)) == alone
    read = qwen.read({**one, "hidden_act": "silu"})
    other = replace(read, feed_forward=replace(read.feed_forward, activation="relu"))
    assert any("feed_forward.activation: relu" in each for each in qwen.lacks(other))
