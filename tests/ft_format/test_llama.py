"""The Llama family's table of files and its config.ini, against the layout that void-main's loader reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.tiny_models.llama_models import saved

import models
from ft_format.config_ini import ConfigIni, ConfigIniError
from ft_format.families import find_family, llama
from ft_format.families.family import ConfigValues, render_config
from ft_format.families.llama import beyond, of_words, words
from ft_format.layout import file_sizes, whole_tensors
from models.blocks.rope_scaling import Linear
from models.blocks.rotary import Rotary
from models.decoder import Decoder

_PLAIN = {
    "head_num": 4,
    "kv_head_num": 2,
    "size_per_head": 32,
    "inter_size": 96,
    "num_layer": 2,
    "vocab_size": 100,
    "max_pos_seq_len": 64,
    "rotary_embedding": 32,
    "layernorm_eps": 1e-5,
}


def changed(**changes: Any) -> Decoder:
    """A Llama that FasterTransformer computes, but for some keys of config.ini."""
    return of_words({**_PLAIN, **changes})


PLAIN = changed()
COMPUTED = {
    "plain": PLAIN,
    "heads of their own": changed(kv_head_num=4),
    "linear": changed(rope_scaling_factor=4.0, rope_theta=5e5),
    "rotated in part": changed(rotary_embedding=16),
    "tied": changed(has_untied_head=False),
}


def parsed(text: str) -> ConfigIni:
    return ConfigIni(text.encode(), "config.ini")


@pytest.mark.parametrize("name", COMPUTED)
def test_config_ini_holds_all_of_what_is_computed(name: str) -> None:
    decoder = COMPUTED[name]
    ini = parsed(render_config(llama.FAMILY, ConfigValues(decoder, 2, "fp16", 1, 2)))
    assert find_family(ini) is llama.FAMILY
    assert llama.read(ini, lambda _: True) == decoder == of_words(words(decoder))
    assert beyond(decoder) == ()


def test_a_factor_of_positions_divides_them() -> None:
    """FasterTransformer's forks have no key for its kind."""
    assert {layer.rotary for layer in COMPUTED["linear"].layers} == {Rotary(32, 5e5, Linear(4.0))}


def test_files_and_sizes_are_those_of_void_mains_loader() -> None:
    """LlamaDecoderLayerWeight.cc: [hidden, (heads + 2 kv_heads) / T * size] and so on."""
    sizes = file_sizes(llama.schema(PLAIN), PLAIN, 2, "fp16")
    layer = {
        "input_layernorm.weight.bin": 128,
        "post_attention_layernorm.weight.bin": 128,
        "attention.query_key_value.weight.0.bin": 128 * (4 + 2 * 2) // 2 * 32,
        "attention.dense.weight.1.bin": 4 * 32 // 2 * 128,
        "mlp.gate_proj.weight.0.bin": 128 * 96 // 2,
        "mlp.up_proj.weight.1.bin": 128 * 96 // 2,
        "mlp.down_proj.weight.0.bin": 96 // 2 * 128,
    }
    wanted = {f"model.layers.1.{name}": size for name, size in layer.items()}
    wanted |= {
        "model.wte.weight.bin": 12800,
        "model.lm_head.weight.bin": 12800,
        "model.final_layernorm.weight.bin": 128,
    }
    assert {name: sizes[name] for name in wanted} == {name: 2 * numbers for name, numbers in wanted.items()}
    assert len(sizes) == 3 + 2 * (2 + 2 * 5)


def test_query_key_and_value_are_three_tensors_of_the_model_turned_around_in_one_file() -> None:
    dims = replace(PLAIN, attention=replace(PLAIN.attention, has_qkv_bias=True))  # TurboMind's have biases
    base, table = "model.layers.0.attention.", whole_tensors(llama.schema(dims))
    own, its = llama.own_tensors(dims), "model.layers.0.self_attn."
    assert table[f"{base}query.weight"].full_shape(dims) == (128, 2, 2, 32)
    assert table[f"{base}key.weight"].full_shape(dims) == table[f"{base}value.weight"].full_shape(dims) == (128, 2, 32)
    assert table[f"{base}value.bias"].full_shape(dims) == (2, 32)
    assert f"{base}query_key_value.weight" not in table
    assert [table[f"{base}{name}.weight"].origin for name in ("query", "dense")] == [
        f"{its}q_proj.weight",
        f"{its}o_proj.weight",
    ]
    assert own[f"{its}q_proj.weight"].full_shape(dims) == (2, 2, 32, 128)
    assert table[f"{base}dense.weight"].full_shape(dims) == (2, 2, 32, 128)
    assert own[f"{its}o_proj.weight"].full_shape(dims) == (128, 2, 2, 32)


OF_RELATIVES: dict[str, list[str]] = {
    "llama_mha": [],
    "llama": [],
    "llama_linear": [],
    "llama31": ["layers.rotary"],
    "mistral": ["hidden_units", "layers.window"],
    "nemotron": ["feed_forward.activation", "feed_forward.is_gated", "norms.is_zero_centred", "norms.kind"],
    "qwen2": ["attention.has_qkv_bias"],
    "qwen3": ["attention.qk_norm", "hidden_units"],
    "gemma": ["embedding_scale", "feed_forward.activation", "hidden_units", "norms.is_zero_centred"],
    "gemma2": [
        *("attention.scalar", "attention.softcap", "embedding_scale", "feed_forward.activation", "final_softcap"),
        *("hidden_units", "layers.window", "norms.is_after", "norms.is_zero_centred"),
    ],
    "mixtral": ["layers.blocks", "mixture"],
    "starcoder2": [
        *("attention.has_output_bias", "attention.has_qkv_bias", "feed_forward.activation", "feed_forward.has_bias"),
        *("feed_forward.is_gated", "layers.window", "norms.kind"),
    ],
    "olmo2": ["attention.qk_norm", "norms.is_after", "norms.is_before"],
}
"""By the name of a model of transformers', its fields that FasterTransformer does not compute."""


@pytest.mark.parametrize("name", OF_RELATIVES)
def test_what_fastertransformer_does_not_compute_is_listed_by_field_with_the_reason(name: str) -> None:
    config = saved(name).config.to_dict()
    found = beyond(models.find(config["model_type"]).read(config))
    assert [line.partition(" = ")[0] for line in found] == OF_RELATIVES[name]
    assert all(line.endswith(")") for line in found)


def test_what_changes_nothing_is_no_hindrance() -> None:
    """A window as long as the longest text; scores divided by the root of the size of a head, as they are anyway."""
    layers = tuple(replace(layer, window=64) for layer in PLAIN.layers)
    assert beyond(replace(PLAIN, layers=layers, attention=replace(PLAIN.attention, scalar=32.0))) == ()
    assert beyond(replace(PLAIN, layers=layers, max_positions=65)) == (
        "layers.window = 64  (every token sees all before it)",
    )


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("kv_head_num = 3", "kv_head_num"),
        ("rotary_embedding = 7", "rotary_embedding"),
        ("rope_theta = 0", "rope_theta"),
        ("head_num = 2147483647\nkv_head_num = 1", "head_num"),
        (
            "qk_norm = 1\nhidden_units = 48",
            r"has hidden_units, qk_norm: an earlier version .*; convert the checkpoint again",
        ),
        ("rope_type = llama3", "has rope_type: an earlier version"),
    ],
)
def test_what_no_shards_have_is_refused_by_key(lines: str, named: str) -> None:
    text = render_config(llama.FAMILY, ConfigValues(PLAIN, 1, "fp16", 1, 2))
    keys = tuple(f"{line.partition(' ')[0]} " for line in lines.splitlines())
    kept = [each for each in text.splitlines() if not each.startswith(keys)]
    with pytest.raises(ConfigIniError, match=named):
        llama.read(parsed("\n".join([*kept, lines])), lambda _: True)


def test_a_store_of_an_earlier_version_that_says_no_more_than_fastertransformer_is_read() -> None:
    text = render_config(llama.FAMILY, ConfigValues(COMPUTED["linear"], 1, "fp16", 1, 2)).rstrip()
    assert (
        llama.read(parsed(f"{text}\nmodel_variant = llama\nrope_type = linear\n"), lambda _: True) == COMPUTED["linear"]
    )
