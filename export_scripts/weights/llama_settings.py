"""What ``config.json`` of Llama and its relatives says: dimensions, and what neither target can express.

Keys and defaults: transformers, ``models/{llama,mistral,...}/configuration_*.py`` and ``modeling_rope_utils.py``, of
version 4 (``rope_theta``, ``rope_scaling``) and of version 5 (``rope_parameters``, ``layer_types``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from export_scripts.weights.architecture import EXACT_GELU, TANH_GELU, Settings
from export_scripts.weights.schema import LlamaDims
from export_scripts.weights.values import bounded, epsilon, number, positive, shown
from ft_format.families.llama_dims import ALL_LAYERS, LINEAR_ROPE, LLAMA3_ROPE, PLAIN_ROPE
from ft_format.layout import LARGEST, MOST_LAYERS
from handover.errors import CheckpointError

FUNCTIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(TANH_GELU, "gelu"),
    **dict.fromkeys(EXACT_GELU, "exact_gelu"),
    "relu": "relu",
    "relu2": "squared_relu",
}
"""The feed-forward's function by transformers' name."""
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROPE_REASON = "positions as they are, divided by one factor (linear) and Llama 3.1's (llama3) are read"


@dataclass(frozen=True)
class Relative:
    """What one architecture of transformers has of its own.

    Attributes:
        defaults: of ``config.json``, where they are not those of Llama.
        fixed: dimensions that no key says.
        bias_key, mlp_bias_key: keys that say whether there are biases; empty: there are none.
        eps_key: of the norms' epsilon.
        window: how ``sliding_window`` is meant: "" not at all, "all" every layer, "some" by layer_types,
            max_window_layers or, without both, every other.
        is_partly_rotated: whether partial_rotary_factor is honoured.
        has_fixed_activation: whether the feed-forward's function is the tanh form of GELU, whatever is said.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    bias_key: str = ""
    mlp_bias_key: str = ""
    eps_key: str = "rms_norm_eps"
    window: str = ""
    is_partly_rotated: bool = False
    has_fixed_activation: bool = False

    def dims(self, settings: Settings) -> LlamaDims:
        """Read the dimensions.

        Raises:
            CheckpointError: a size is missing, or does not fit the others.
        """
        given = self.completed(settings)
        hidden, heads = _size(given, "hidden_size"), _size(given, "num_attention_heads")
        kv_heads = _size(given, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(f"config.json: num_key_value_heads {kv_heads} does not divide {heads} heads")
        size = self._head_size(given, hidden, heads)
        layers = bounded(given.get("num_hidden_layers"), "config.json: num_hidden_layers", MOST_LAYERS)
        has_bias = bool(self.bias_key and given.get(self.bias_key))
        window, which = self._window(given, layers)
        sizes: dict[str, Any] = {
            "head_num": heads,
            "kv_head_num": kv_heads,
            "size_per_head": size,
            "hidden_units": hidden,
            "inter_size": given.size("intermediate_size"),
            "num_layer": layers,
            "vocab_size": given.size("vocab_size"),
            "max_pos_seq_len": given.size("max_position_embeddings"),
            "rotary_embedding": self._rotary_width(given, size),
            "layernorm_eps": epsilon(given.get(self.eps_key), f"config.json: {self.eps_key}"),
            "model_variant": given.text("model_type"),
            "has_untied_head": False,  # whoever opens the checkpoint knows better
            "activation_type": FUNCTIONS.get(self._function(given), ""),
            "has_qkv_bias": has_bias,
            "has_dense_bias": has_bias,
            "has_mlp_bias": bool(self.mlp_bias_key and given.get(self.mlp_bias_key)),
            "attention_window": window,
            "attention_window_layers": which,
        }
        return LlamaDims(**{**sizes, **_rope(given), **self.fixed})

    def problems(self, settings: Settings) -> list[str]:
        """List the keys in the way, one line each."""
        given = self.completed(settings)
        found = []
        function = self._function(given)
        if function not in FUNCTIONS:
            found.append(f"hidden_act: {shown(function)}  (it has {', '.join(FUNCTIONS)})")
        rope = _rope_parameters(given)
        kind = rope.get("rope_type", rope.get("type", PLAIN_ROPE))
        if kind not in (PLAIN_ROPE, LINEAR_ROPE, LLAMA3_ROPE) or any(isinstance(v, dict) for v in rope.values()):
            found.append(f"{_rope_key(given)}: {shown(kind if kind != PLAIN_ROPE else rope)}  ({_ROPE_REASON})")
        part = given.rotary_fraction("partial_rotary_factor", 1.0)
        if not self.is_partly_rotated and part != 1:
            found.append(f"partial_rotary_factor: {part:g}  (whole heads are rotated)")
        if given.get("use_bidirectional_attention"):
            found.append("use_bidirectional_attention: True  (a token sees those before it alone)")
        if kinds := {*_layer_types(given)} - {_SLIDING, _FULL}:
            found.append(f"layer_types: {', '.join(map(shown, sorted(map(str, kinds))))}  (it has {_SLIDING}, {_FULL})")
        if not self.window and _SLIDING in _layer_types(given):
            found.append(f"layer_types: {_SLIDING}  (transformers' own model of this type has no such layers)")
        return found

    def completed(self, settings: Settings) -> Settings:
        """Add the architecture's defaults."""
        return Settings({**_DEFAULTS, **self.defaults, **settings})

    def _function(self, given: Settings) -> str:
        if self.has_fixed_activation:
            return "gelu_pytorch_tanh"
        return str(given.get("hidden_activation") or given.get("hidden_act"))

    def _head_size(self, given: Settings, hidden: int, heads: int) -> int:
        if given.get("head_dim") is not None:
            return _size(given, "head_dim")
        return given.head_size("hidden_size", "num_attention_heads")

    def _rotary_width(self, given: Settings, size: int) -> int:
        width = int(size * given.rotary_fraction("partial_rotary_factor", 1.0))
        if width < 2 or width % 2:
            raise CheckpointError(f"config.json: {width} of a head's {size} elements are rotated, not pairs of them")
        return width

    def _window(self, given: Settings, layers: int) -> tuple[int, str]:
        """Read how many tokens a layer sees, and which layers: see ``LlamaDims.attention_window_layers``."""
        if not self.window or given.get("sliding_window") is None or given.get("use_sliding_window", True) is False:
            return 0, ALL_LAYERS
        window = given.size("sliding_window")
        if self.window == "all":
            return window, ALL_LAYERS
        kinds = _layer_types(given)
        if kinds and len(kinds) != layers:
            raise CheckpointError(f"config.json: layer_types names {len(kinds)} layers of {layers}")
        if not kinds and "max_window_layers" in given:
            first = given.whole("max_window_layers")
            kinds = [_SLIDING if layer >= first else _FULL for layer in range(layers)]
        which = shortest([kind == _SLIDING for kind in kinds or ([_SLIDING, _FULL] * layers)[:layers]])
        return (window, which) if "1" in which else (0, ALL_LAYERS)


_DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Of Llama."""


def shortest(layers: Sequence[bool]) -> str:
    """Write which layers have something as 1 and 0, as few of them as are repeated to the last layer."""
    flags = "".join("1" if each else "0" for each in layers)
    return next(flags[:n] for n in range(1, len(flags) + 1) if (flags[:n] * len(flags))[: len(flags)] == flags)


def _size(given: Settings, key: str, default: int | None = None) -> int:
    """Read a size; ``default`` stands for a missing key and for null."""
    value = given.get(key)
    return bounded(default if value is None else value, f"config.json: {key}", LARGEST)


def _layer_types(given: Settings) -> list[Any]:
    return given.entries("layer_types", [])


def _rope_key(given: Settings) -> str:
    return "rope_parameters" if isinstance(given.get("rope_parameters"), Mapping) else "rope_scaling"


def _rope_parameters(given: Settings) -> Mapping[str, Any]:
    """Read what is said of the rotation: by transformers 5 with its base, before that without it."""
    said = given.get(_rope_key(given))
    if said is not None and not isinstance(said, Mapping):
        raise CheckpointError(f"config.json: {_rope_key(given)} is {shown(said)}, not a mapping")
    return said or {}


def _rope(given: Settings) -> dict[str, Any]:
    rope, where = _rope_parameters(given), f"config.json: {_rope_key(given)}"
    kind = rope.get("rope_type", rope.get("type", PLAIN_ROPE))
    found: dict[str, Any] = {
        "rope_theta": _above_zero(rope.get("rope_theta", given.get("rope_theta", 10000.0)), "config.json: rope_theta"),
        "rope_type": kind,
    }
    if kind != PLAIN_ROPE:
        found["rope_scaling_factor"] = _above_zero(rope.get("factor"), f"{where}: factor")
    if kind == LLAMA3_ROPE:
        for own in ("low_freq_factor", "high_freq_factor"):
            found[f"rope_{own}"] = _above_zero(rope.get(own), f"{where}: {own}")
        length = rope.get("original_max_position_embeddings", given.get("max_position_embeddings"))
        found["rope_original_max_position"] = positive(length, f"{where}: original_max_position_embeddings")
    return found


def _above_zero(value: Any, where: str) -> float:
    result = number(value, where)
    if result <= 0:
        raise CheckpointError(f"{where} is {shown(value)}, not a number above 0")
    return result


class Gemma(Relative):
    """Gemma and Gemma 2: embeddings scaled by the root of the width, and numbers that cap scores and logits."""

    def dims(self, settings: Settings) -> LlamaDims:
        """Read the dimensions; see ``Relative.dims``."""
        given, plain = self.completed(settings), super().dims(settings)
        scalar = number(given.get("query_pre_attn_scalar", plain.size_per_head), "config.json: query_pre_attn_scalar")
        return replace(
            plain,
            embedding_scale=plain.hidden_units**0.5,
            attention_scalar=0.0 if scalar == plain.size_per_head else scalar,
            attn_logit_softcap=_cap(given, "attn_logit_softcapping"),
            final_logit_softcap=_cap(given, "final_logit_softcapping"),
        )


def _cap(given: Settings, key: str) -> float:
    """Read a number that caps others; 0: there is none."""
    return 0.0 if given.get(key) is None else _above_zero(given[key], f"config.json: {key}")
