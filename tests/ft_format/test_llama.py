"""The Llama family's table of files and its config.ini, against the layout that void-main's loader reads."""

from __future__ import annotations

from typing import Any

import pytest

from ft_format.config_ini import ConfigIni, ConfigIniError
from ft_format.families import find_family, llama
from ft_format.families.family import ConfigValues, render_config
from ft_format.families.llama import LlamaDims, beyond_fastertransformer, of_words, words
from ft_format.layout import file_sizes, whole_tensors

_PLAIN = {
    "head_num": 4,
    "kv_head_num": 2,
    "size_per_head": 32,
    "hidden_units": 128,
    "inter_size": 96,
    "num_layer": 2,
    "vocab_size": 100,
    "max_pos_seq_len": 64,
    "rotary_embedding": 32,
    "layernorm_eps": 1e-5,
}


def changed(**changes: Any) -> LlamaDims:
    """A plain Llama, but for some keys of config.ini."""
    return of_words({**_PLAIN, **changes})


PLAIN = changed()
GEMMA2 = changed(
    kv_head_num=1,
    hidden_units=48,
    has_untied_head=False,
    has_zero_centred_norms=True,
    activation_type="gelu",
    has_output_norms=True,
    embedding_scale=48**0.5,
    attention_scalar=24.0,
    attn_logit_softcap=50.0,
    final_logit_softcap=30.0,
    attention_window=16,
    attention_window_layers="10",
)
OTHERS = {
    "plain": PLAIN,
    "gemma2": GEMMA2,
    "nemotron": changed(layernorm_type="layernorm", activation_type="squared_relu", is_gated=False),
    "llama3": changed(rope_type="llama3", rope_scaling_factor=8.0, rope_original_max_position=8192),
    "linear": changed(rope_type="linear", rope_scaling_factor=4.0),
    "biases": changed(has_qkv_bias=True, has_dense_bias=True, has_mlp_bias=True, qk_norm=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_config_ini_holds_all_of_the_dimensions(name: str) -> None:
    text = render_config(llama.FAMILY, ConfigValues(OTHERS[name], 2, "fp16", 1, 2))
    ini = ConfigIni(text.encode(), "config.ini")
    assert find_family(ini) is llama.FAMILY
    assert llama.read(ini, lambda _: True) == OTHERS[name] == of_words(words(OTHERS[name]))


def test_a_factor_of_positions_alone_divides_them() -> None:
    """FasterTransformer's forks have no key for its kind."""
    assert changed(rope_scaling_factor=4.0) == OTHERS["linear"]


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
    dims = changed(has_qkv_bias=True)
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


def test_what_fastertransformer_computes_otherwise_is_listed_by_key() -> None:
    assert beyond_fastertransformer(PLAIN) == ()
    assert {line.partition(" ")[0] for line in beyond_fastertransformer(GEMMA2)} == {
        *("hidden_units", "has_zero_centred_norms", "activation_type", "has_output_norms", "embedding_scale"),
        *("attention_scalar", "attn_logit_softcap", "final_logit_softcap", "attention_window"),
    }
    assert [line.partition(" ")[0] for line in beyond_fastertransformer(OTHERS["llama3"])] == ["rope_type"]


@pytest.mark.parametrize(
    ("line", "named"),
    [("kv_head_num = 3", "kv_head_num"), ("rotary_embedding = 7", "rotary_embedding"), ("rope_type = yarn", "yarn")],
)
def test_what_no_model_can_have_is_refused_by_key(line: str, named: str) -> None:
    text = render_config(llama.FAMILY, ConfigValues(PLAIN, 1, "fp16", 1, 2))
    key = line.partition(" ")[0]
    kept = [each for each in text.splitlines() if not each.startswith(f"{key} ")]
    with pytest.raises(ConfigIniError, match=named):
        llama.read(ConfigIni("\n".join([*kept, line]).encode(), "config.ini"), lambda _: True)
