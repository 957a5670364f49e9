"""The feed-forward: plain or gated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.checks import shown
from models.config_json import ConfigJson
from models.keys import Fields, Keys
from models.spelling import Fused, Spelling
from models.tensor import Tensor

NAMES = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj"}
TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate")
EXACT_GELU = ("gelu", "gelu_python")
FUNCTIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(TANH_GELU, "gelu"),
    **dict.fromkeys(EXACT_GELU, "exact_gelu"),
    "relu": "relu",
    "relu2": "squared_relu",
}
"""The function by transformers' names; "gelu" is its tanh form."""
_WORDS = {"silu": "silu", "gelu": "gelu_pytorch_tanh", "exact_gelu": "gelu", "relu": "relu", "squared_relu": "relu2"}
ACTIVATIONS = tuple(_WORDS)
_INWARD = ("mlp.dense_h_to_4h.{kind}", "mlp.linear_fc1.{kind}", "layernorm_mlp.fc1_{kind}")
_HALVES = Fused((("gate", 1), ("up", 1)))
_APART = (
    Spelling(("gate",), ("mlp.dense_h_to_4h.{kind}", "mlp.linear_fc1.{kind}_w")),
    Spelling(("up",), ("mlp.dense_h_to_4h_2.{kind}", "mlp.linear_fc1.{kind}_v")),
)
_DOWN = Spelling(("down",), ("mlp.dense_4h_to_h.{kind}", "mlp.linear_fc2.{kind}", "layernorm_mlp.fc2_{kind}"))


@dataclass(frozen=True)
class FeedForward:
    """One kind of feed-forward: down(activation(gate) * (up + offset)), or down(activation(up)) where there is no gate.

    Attributes:
        inter_size: width of its middle.
        activation: one of ACTIVATIONS.
        has_bias: whether its linear layers have biases.
        is_fused: gate and up are one tensor, one after another.
        gate_factor: of what SiLU's sigmoid is taken of; x * sigmoid(1.702 * x) is called quick GELU.
        up_offset: that offset.
        clamp: the gate is at most this number, and what is multiplied with it lies between its negative and it; 0:
            they are as they are.
    """

    inter_size: int
    is_gated: bool = True
    activation: str = "silu"
    has_bias: bool = False
    is_fused: bool = False
    gate_factor: float = 1.0
    up_offset: float = 0.0
    clamp: float = 0.0

    @property
    def is_clamped(self) -> bool:
        """Whether the gate is more than its activation."""
        return (self.gate_factor, self.up_offset, self.clamp) != (1, 0, 0)

    def norms(self) -> dict[str, Tensor]:
        """List the weights of norms, by role: it has none."""
        return {}

    def tensors(self, middle: str = "inter_size", outer: str = "hidden_units") -> dict[str, Tensor]:
        """List the linear layers, by role; ``middle`` and ``outer`` are the symbols of its widths."""
        weights = {role: Tensor((middle, outer), 0) for role in ("gate", "up")[not self.is_gated :]}
        if self.is_fused:
            weights = {"gate_up": Tensor(((2, middle), outer))}
        weights["down"] = Tensor((outer, middle), 1)
        found = {f"{role}.weight": weight for role, weight in weights.items()}
        if self.has_bias:
            found |= {f"{role}.bias": weight.bias for role, weight in weights.items()}
        return found

    def spellings(self, is_apart: bool = False) -> tuple[Spelling, ...]:
        """List Megatron's: legacy, core, Transformer Engine's layer.

        Args:
            is_apart: gate and up are two matrices; else they are one, the gate first.
        """
        if not self.is_gated:
            return (Spelling(("up",), _INWARD), _DOWN)
        return (*_APART, _DOWN) if is_apart else (Spelling(("gate", "up"), _INWARD, _HALVES), _DOWN)


@dataclass(frozen=True)
class Function(Keys):
    """The function of the feed-forward.

    Attributes:
        key: that the class reads.
        also: keys that are written with the same word.
        other: words that this class takes for another.
        exact: word for the exact GELU.
    """

    key: str = "hidden_act"
    also: tuple[str, ...] = ()
    other: Mapping[str, str] = field(default_factory=dict)
    exact: str = "gelu"
    says = ("feed_forward.activation",)

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return {self.says[0]: FUNCTIONS[self._word(config)]}

    def write(self, fields: Fields) -> dict[str, Any]:
        word = {**_WORDS, "exact_gelu": self.exact}[fields[self.says[0]]]
        return dict.fromkeys(sorted((*self.also, self.key)), word)

    def problems(self, config: ConfigJson) -> list[str]:
        word = self._word(config)
        return [] if word in FUNCTIONS else [f"{self.key}: {shown(word)}  (it has {', '.join(FUNCTIONS)})"]

    def _word(self, config: ConfigJson) -> str:
        word = str(config.get(self.key))
        return self.other.get(word, word)
