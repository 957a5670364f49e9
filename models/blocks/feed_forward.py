"""The feed-forward: plain, gated, or a mixture of several of which a router chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from models.checks import shown
from models.config_json import ConfigJson
from models.keys import Fields, Keys
from models.spelling import Fused, Spelling
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
_INWARD = ("mlp.dense_h_to_4h.{kind}", "mlp.linear_fc1.{kind}", "layernorm_mlp.fc1_{kind}")
_HALVES = Fused((("gate", 1), ("up", 1)))
_APART = (
    Spelling(("gate",), ("mlp.dense_h_to_4h.{kind}", "mlp.linear_fc1.{kind}_w")),
    Spelling(("up",), ("mlp.dense_h_to_4h_2.{kind}", "mlp.linear_fc1.{kind}_v")),
)
_DOWN = Spelling(("down",), ("mlp.dense_4h_to_h.{kind}", "mlp.linear_fc2.{kind}", "layernorm_mlp.fc2_{kind}"))


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
        weights = {role: Tensor(("inter_size", "hidden_units"), 0) for role in ("gate", "up")[not self.is_gated :]}
        weights["down"] = Tensor(("hidden_units", "inter_size"), 1)
        found = {f"{role}.weight": weight for role, weight in weights.items()}
        if self.has_bias:
            found |= {f"{role}.bias": weight.bias for role, weight in weights.items()}
        return found

    def spellings(self, is_apart: bool = False) -> tuple[Spelling, ...]:
        """List Megatron's: legacy, core, Transformer Engine's layer.

        Rank files hold tensors of each expert, distributed checkpoints arrays of all of them or, with
        ``singleton_local_shards``, arrays of each. Which training rank had an expert does not show in their names.

        Args:
            is_apart: gate and up are two matrices; else they are one, the gate first.
        """
        one: tuple[Spelling, ...]
        if not self.is_gated:
            one = (Spelling(("up",), _INWARD), _DOWN)
        elif is_apart:
            one = (*_APART, _DOWN)
        else:
            one = (Spelling(("gate", "up"), _INWARD, _HALVES), _DOWN)
        if not self.expert_num:
            return one
        found = [Spelling(("router",), ("mlp.router.{kind}",))]
        for spelling in one:
            core = [name.removeprefix("mlp.") for name in spelling.names if name.startswith("mlp.linear_fc")]
            every = [tuple(f"experts.{n}.{role}" for role in spelling.roles) for n in range(self.expert_num)]
            for number, roles in enumerate(every):
                places = (f"mlp.experts.experts.{number}", f"mlp.experts.local_experts.{number}")
                names = tuple(f"{place}.{name}" for place in places for name in core)
                found.append(replace(spelling, roles=roles, names=names))
            stacked = tuple(f"mlp.experts.experts.{name}" for name in core)
            found.append(replace(spelling, roles=sum(every, ()), names=stacked, is_stacked=True))
        return tuple(found)


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
