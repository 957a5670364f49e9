"""Llama, and what its relatives share with it. Keys and defaults: transformers, ``configuration_llama.py``."""

from __future__ import annotations

from collections.abc import Sequence

from models.architecture import Architecture
from models.blocks.attention import Biases, Heads
from models.blocks.feed_forward import Function
from models.blocks.rotary import Rope
from models.config_json import ConfigJson
from models.keys import Key, Keys, flag

_HEADS, _FUNCTION, _ROPE = Heads(), Function(), Rope()
DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
}


def keys(
    *,
    heads: Keys = _HEADS,
    function: Keys = _FUNCTION,
    eps: str = "rms_norm_eps",
    middle: str = "intermediate_size",
    rope: Keys = _ROPE,
    more: Sequence[Keys] = (),
) -> tuple[Keys, ...]:
    """List the keys of a relative, in the order in which they are written.

    Args:
        heads: how the heads are said.
        function: how the feed-forward's function is said.
        eps: key of the norms' epsilon.
        middle: key of the width of a feed-forward's middle.
        rope: how the rotation is said.
        more: those that Llama has not, and its biases.
    """
    return (
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "hidden_units"),
        Key(middle, "feed_forward.inter_size"),
        Key("num_hidden_layers", "num_layer", lambda config, key: config.layer_num),
        heads,
        function,
        Key("max_position_embeddings", "max_positions", unset=DEFAULTS["max_position_embeddings"]),
        Key(eps, "norms.eps", ConfigJson.epsilon),
        rope,
        *more,
        Key("tie_word_embeddings", "has_tied_head", flag, unset=False),
    )


LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    keys=keys(more=[Biases("attention_bias", "mlp_bias")]),
    defaults=DEFAULTS,
)
