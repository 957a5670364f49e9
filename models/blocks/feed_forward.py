"""The feed-forward: plain, gated, or a mixture of several of which a router chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.checks import shown
from models.config_json import ConfigJson
from models.keys import Fields, Keys
from models.tensor import Tensor

NAMES = {
    **{"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "router": "mlp.gate"},
    **{f"expert.{role}": f"mlp.experts.{{expert}}.{role}_proj" for role in ("gate", "up", "down")},
}
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


@dataclass(frozen=True)
class FeedForward:
    """One kind of feed-forward: down(activation(gate) * up), or down(activation(up)) where there is no gate.

    Attributes:
        inter_size: width of its middle; of one expert where there are several.
        is_gated: whether there is a gate.
        activation: one of ACTIVATIONS.
        has_bias: whether its linear layers have biases.
        expert_num, experts_per_token: experts of a layer, and those that a token uses; 0: there is one feed-forward.
    """

    inter_size: int
    is_gated: bool = True
    activation: str = "silu"
    has_bias: bool = False
    expert_num: int = 0
    experts_per_token: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """List the linear layers, by role; those of an expert as ``experts.<n>.gate.weight``."""
        if self.expert_num:
            experts = range(self.expert_num)
            found = {f"experts.{n}.{role}": each for n in experts for role, each in self._one().items()}
            return {"router.weight": Tensor(("expert_num", "hidden_units")), **found}
        return self._one()

    def _one(self) -> dict[str, Tensor]:
        inward = ("gate", "up") if self.is_gated else ("up",)
        found = {f"{role}.weight": Tensor(("inter_size", "hidden_units"), 0) for role in inward}
        found["down.weight"] = Tensor(("hidden_units", "inter_size"), 1)
        if self.has_bias:
            found |= {f"{role}.bias": Tensor(("inter_size",), 0) for role in inward}
            found["down.bias"] = Tensor(("hidden_units",))
        return found


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


@dataclass(frozen=True)
class Experts(Keys):
    """How many experts a layer has, and how many of them a token uses.

    Attributes:
        count, used: the keys.
    """

    count: str = "num_local_experts"
    used: str = "num_experts_per_tok"
    says = ("feed_forward.expert_num", "feed_forward.experts_per_token")

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return dict(zip(self.says, (config.experts(self.count), config.size(self.used)), strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        return {key: fields[name] for key, name in zip((self.count, self.used), self.says, strict=True)}

    def lacks(self, fields: Fields) -> list[str]:
        return [] if fields[self.says[0]] else [f"{self.says[0]}: 0  (it has experts)"]
