"""What models/ says of each architecture is what transformers' own class has: names, shapes, and keys both ways."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import models
from models import ARCHITECTURES, Architecture, ModelError
from models.blocks.rotary import Rotary

DRAWS = 25
_FUNCTIONS = ("hidden_act", "hidden_activation")
_SWITCHES = ("use_sliding_window", "max_window_layers", "sliding_window")
_ROPES: list[dict[str, Any]] = [
    {"rope_theta": 500.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "type": "linear"}, "rope_theta": 1e6},
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
]


def drawn(model_type: str, seed: int) -> dict[str, Any]:
    """A random configuration of an architecture, in the words of its class."""
    rng = random.Random(f"{model_type} {seed}")
    layers, groups, size = rng.randint(1, 4), rng.choice([1, 2, 3]), rng.choice([4, 8, 12])
    heads = groups * rng.choice([1, 2, 4])
    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": rng.randint(20, 90),
        "hidden_size": heads * size,
        "intermediate_size": rng.randint(5, 60),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "max_position_embeddings": rng.randint(30, 90),
        **dict.fromkeys(("rms_norm_eps", "norm_eps", "norm_epsilon"), rng.choice([1e-5, 1e-6, 3e-4])),
        "tie_word_embeddings": rng.choice([True, False]),
        **copy.deepcopy(rng.choice(_ROPES)),
    }
    if model_type != "starcoder2":
        config["hidden_size"] = rng.choice([config["hidden_size"], 2 * heads * rng.randint(1, 6)])
    names = rng.choice(["silu", "relu", "gelu", "gelu_pytorch_tanh", "relu2"])
    config |= {"hidden_act": names, "hidden_activation": names}
    config |= {key: rng.choice([True, False]) for key in ("attention_bias", "mlp_bias", "use_bias")}
    own = _OWN.get(model_type)
    return config | (own(rng, layers) if own else {})


def _kinds(rng: random.Random, layers: int) -> list[str]:
    return [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]


def _qwen(rng: random.Random, layers: int) -> dict[str, Any]:
    is_on = rng.choice([True, False])
    said = {"layer_types": _kinds(rng, layers)} if is_on and rng.random() < 0.5 else {}
    return {**said, "use_sliding_window": is_on, "sliding_window": 5, "max_window_layers": rng.randint(0, layers)}


def _gemma2(rng: random.Random, layers: int) -> dict[str, Any]:
    said = {"layer_types": _kinds(rng, layers)} if rng.random() < 0.5 else {}
    caps = {key: rng.choice([None, 2.0, 30.0]) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {**said, "sliding_window": 7, "query_pre_attn_scalar": rng.choice([4, 8, 12, 24]), **caps}


_OWN: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    **dict.fromkeys(("qwen2", "qwen3"), _qwen),
    **dict.fromkeys(("mistral", "starcoder2"), lambda rng, layers: {"sliding_window": rng.choice([None, 6])}),
    "mixtral": lambda rng, layers: {
        "sliding_window": rng.choice([None, 6]),
        "num_local_experts": rng.randint(2, 5),
        "num_experts_per_tok": 2,
    },
    "nemotron": lambda rng, layers: {"partial_rotary_factor": rng.choice([0.5, 1.0])},
    "gemma2": _gemma2,
}


def config_of(values: dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values))


def saved_shapes(config: Any, class_name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes that transformers saves, from the class itself; no number is computed."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = getattr(transformers, class_name)(config)
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    saved = revert_weight_conversion(model, state)
    return {name: tuple(value.shape) for name, value in saved.items()}


each = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.model_type)


@each
def test_tensors_are_those_that_transformers_saves(architecture: Architecture) -> None:
    for seed in range(DRAWS):
        values = drawn(architecture.model_type, seed)
        made = architecture.read(values).tensors()
        wanted = saved_shapes(config_of(values), architecture.class_name)
        assert {name: tensor.shape for name, tensor in made.items()} == wanted, values


@each
def test_a_description_that_was_written_is_read_again(architecture: Architecture) -> None:
    for seed in range(4 * DRAWS):
        decoder = architecture.read(drawn(architecture.model_type, seed))
        assert architecture.read(architecture.write(decoder)) == decoder
        assert models.Decoder.of(decoder.fields(), model_type=decoder.model_type, names=decoder.names) == decoder


@each
def test_what_is_written_means_the_same_to_transformers(architecture: Architecture) -> None:
    for seed in range(DRAWS):
        values = drawn(architecture.model_type, seed)
        written = architecture.write(architecture.read(values))
        meant, made = config_of(values), config_of({**written, "model_type": architecture.model_type})
        keys = written.keys() - {*_SWITCHES, *_FUNCTIONS} | {"rope_parameters", "layer_types"}
        assert {key: getattr(made, key, None) for key in keys} == {key: getattr(meant, key, None) for key in keys}
        assert windows(made) == windows(meant)
        assert torch.allclose(function(made), function(meant), atol=1e-6)


def windows(config: Any) -> list[int | None]:
    """The window of each layer that has one; transformers puts Qwen's switches into the list of layers' types."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return [window if kind == "sliding_attention" else None for kind in kinds]


def function(config: Any) -> torch.Tensor:
    """What the feed-forward's function makes of some numbers; Gemma 2's class alone reads the second key."""
    from transformers.activations import ACT2FN

    values: torch.Tensor = ACT2FN[getattr(config, _FUNCTIONS[config.model_type == "gemma2"])](torch.linspace(-3, 3, 50))
    return values


@each
def test_a_rank_has_whole_heads_and_its_part_of_the_middle(architecture: Architecture) -> None:
    decoder = architecture.read(drawn(architecture.model_type, 1))
    tensors = decoder.tensors()
    roles = decoder.layer_tensors(0)
    assert tensors[f"{roles['query']}.weight"].split_axis == 0
    assert tensors[f"{roles['attention_output']}.weight"].split_axis == 1
    down = roles.get("down") or roles["experts.1.down"]
    assert (tensors[f"{down}.weight"].split_axis, tensors[f"{roles['input_norm']}.weight"].split_axis) == (1, None)
    assert {name for role in roles.values() for name in tensors if name.startswith(f"{role}.")} == {
        name for name in tensors if name.startswith("model.layers.0.")
    }


def test_a_head_that_is_rotated_in_part_keeps_its_width() -> None:
    """transformers multiplies the size by the part and cuts off: of 22 of 96 that is 21 for the nearest number."""
    nemotron = models.find("nemotron")
    for size in range(2, 300, 2):
        decoder = nemotron.read({**drawn("nemotron", 3), "head_dim": size, "partial_rotary_factor": 1.0})
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
    with pytest.raises(ModelError, match=r"rope_scaling: yarn  \("):
        llama.read({**drawn("llama", 0), "rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    with pytest.raises(ModelError, match="hidden_size is 'x', not a positive number"):
        llama.read({**drawn("llama", 0), "hidden_size": "x"})
