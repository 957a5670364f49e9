"""What ``config.json`` of Llama and its relatives says: dimensions, and what neither target can express.

Keys and defaults: transformers, ``models/{llama,mistral,...}/configuration_*.py``. A key counts where the class of that
model reads it, and nowhere else: Mistral has a window though ``use_sliding_window`` is false, Qwen2 has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from export_scripts.weights.architecture import EXACT_GELU, FULL, SLIDING, TANH_GELU, Settings
from export_scripts.weights.rope_settings import above_zero, rope_dims, rope_parameters, rope_problems, rotated_part
from export_scripts.weights.schema import LlamaDims
from export_scripts.weights.values import bounded, epsilon, number
from ft_format.families.llama_dims import ALL_LAYERS
from ft_format.layout import LARGEST, MOST_LAYERS
from handover.errors import CheckpointError
from models.checks import shown

FUNCTIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(TANH_GELU, "gelu"),
    **dict.fromkeys(EXACT_GELU, "exact_gelu"),
    "relu": "relu",
    "relu2": "squared_relu",
}
"""The feed-forward's function by transformers' name."""
EVERY, LISTED, BEHIND_THE_FIRST, ALTERNATE = "every", "listed", "behind the first", "alternate"
"""Layers with a window: every one; those that ``layer_types`` lists, or every one; those that it lists, or, with
``use_sliding_window``, those from ``max_window_layers`` on; those that it lists, or every other."""


@dataclass(frozen=True)
class Relative:
    """What one architecture of transformers has of its own.

    Attributes:
        defaults: of ``config.json``, where they are not those of Llama.
        fixed: dimensions that no key says.
        bias_key, mlp_bias_key: keys that say whether there are biases; empty: there are none.
        eps_key: of the norms' epsilon.
        window: which layers have a window; empty: none.
        is_partly_rotated: whether partial_rotary_factor is honoured.
        function_key: of the feed-forward's function.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    bias_key: str = ""
    mlp_bias_key: str = ""
    eps_key: str = "rms_norm_eps"
    window: str = ""
    is_partly_rotated: bool = False
    function_key: str = "hidden_act"

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
            "rotary_embedding": _rotary_width(given, size),
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
        return LlamaDims(**{**sizes, **rope_dims(given), **self.fixed})

    def problems(self, settings: Settings) -> list[str]:
        """List the keys in the way, one line each."""
        given = self.completed(settings)
        found = []
        function = self._function(given)
        if function not in FUNCTIONS:
            found.append(f"{self.function_key}: {shown(function)}  (it has {', '.join(FUNCTIONS)})")
        found += rope_problems(given)
        part = rotated_part(rope_parameters(given))
        if not self.is_partly_rotated and part != 1:
            found.append(f"partial_rotary_factor: {part:g}  (whole heads are rotated)")
        return found

    def completed(self, settings: Settings) -> Settings:
        """Add the architecture's defaults."""
        return Settings({**_DEFAULTS, **self.defaults, **settings})

    def _function(self, given: Settings) -> str:
        return str(given.get(self.function_key))

    def _head_size(self, given: Settings, hidden: int, heads: int) -> int:
        if given.get("head_dim") is not None:
            return _size(given, "head_dim")
        return given.head_size("hidden_size", "num_attention_heads")

    def _window(self, given: Settings, layers: int) -> tuple[int, str]:
        """Read how many tokens a layer sees, and which layers: see ``LlamaDims.attention_window_layers``."""
        kinds = given.layer_types(layers)
        if self.window in ("", EVERY):
            kinds = []
        elif not kinds and self.window == ALTERNATE:
            kinds = ([SLIDING, FULL] * layers)[:layers]
        is_on = self.window != BEHIND_THE_FIRST or bool(given.get("use_sliding_window"))
        if not self.window or not is_on or given.get("sliding_window") is None:
            if SLIDING in kinds:
                raise CheckpointError(f"config.json: some layers have {SLIDING}, and sliding_window is not set or off")
            return 0, ALL_LAYERS
        if not kinds and self.window == BEHIND_THE_FIRST:
            first = given.whole("max_window_layers")
            kinds = [SLIDING if layer >= first else FULL for layer in range(layers)]
        which = shortest([kind == SLIDING for kind in kinds or [SLIDING]])
        return (given.size("sliding_window"), which) if "1" in which else (0, ALL_LAYERS)


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


def _rotary_width(given: Settings, size: int) -> int:
    width = int(size * rotated_part(rope_parameters(given)))
    if width < 2 or width % 2:
        raise CheckpointError(f"config.json: {width} of a head's {size} elements are rotated, not pairs of them")
    return width


class Gemma(Relative):
    """Gemma: embeddings scaled by the root of the width."""

    def dims(self, settings: Settings) -> LlamaDims:
        """Read the dimensions; see ``Relative.dims``."""
        plain = super().dims(settings)
        return replace(plain, embedding_scale=plain.hidden_units**0.5)

    def completed(self, settings: Settings) -> Settings:
        """Read ``gelu`` as transformers 5 does: Google's files say so, and mean the tanh form; see the base."""
        given = super().completed(settings)
        return Settings({**given, "hidden_act": "gelu_pytorch_tanh"}) if given["hidden_act"] == "gelu" else given


class Gemma2(Gemma):
    """Gemma 2: Gemma with numbers that cap scores and logits, and another key for the feed-forward's function."""

    def dims(self, settings: Settings) -> LlamaDims:
        """Read the dimensions; see ``Relative.dims``."""
        given, plain = self.completed(settings), super().dims(settings)
        scalar = number(given.get("query_pre_attn_scalar", plain.size_per_head), "config.json: query_pre_attn_scalar")
        return replace(
            plain,
            attention_scalar=0.0 if scalar == plain.size_per_head else scalar,
            attn_logit_softcap=_cap(given, "attn_logit_softcapping"),
            final_logit_softcap=_cap(given, "final_logit_softcapping"),
        )


def _cap(given: Settings, key: str) -> float:
    """Read a number that caps others; 0: there is none."""
    return 0.0 if given.get(key) is None else above_zero(given[key], f"config.json: {key}")
