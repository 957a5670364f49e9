"""Attention with grouped queries: several heads of queries share one head of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from models.config_json import ConfigJson
from models.errors import ModelError
from models.keys import Fields, Keys
from models.spelling import Fused, SizeOf, Spelling
from models.tensor import Axis, Tensor

NO_NORM, BY_HEAD, WHOLE, UNIT = "", "head", "projection", "unit"
"""How queries and keys are normalised before they are rotated: not, each head by itself, or all heads together.

UNIT is of each head by itself, without weights, behind the rotation, and of layers that rotate alone.
"""
NAMES = {
    **{"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"},
    "query_key_value": "self_attn.qkv_proj",
    **{"attention_output": "self_attn.o_proj", "query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"},
    "sinks": "self_attn.sinks",
}
_FUSED = Fused((("query", "heads_per_group"), ("key", 1), ("value", 1)), "size_per_head")
_SPELLINGS = (
    Spelling(
        ("query", "key", "value"),
        (
            *("self_attention.query_key_value.{kind}", "attention.query_key_value.{kind}"),
            *("self_attention.linear_qkv.{kind}", "self_attention.layernorm_qkv.{kind}"),
        ),
        _FUSED,
    ),
    Spelling(
        ("attention_output",),
        (
            *("self_attention.dense.{kind}", "attention.dense.{kind}"),
            *("self_attention.linear_proj.{kind}", "self_attention.proj.{kind}"),
        ),
    ),
    Spelling(("query_norm",), ("self_attention.q_layernorm.{kind}",)),
    Spelling(("key_norm",), ("self_attention.k_layernorm.{kind}",)),
    Spelling(("sinks",), ("self_attention.core_attention.softmax_offset",), kinds=("",)),
)
_QUERY = ("kv_head_num", "heads_per_group", "size_per_head")
_GATED_QUERY = ("kv_head_num", "heads_per_group", 2, "size_per_head")
_KEY = ("kv_head_num", "size_per_head")
_GATED_SLOTS = (("query", "attention.queries_and_gates"), ("key", 1), ("value", 1))
_NORMS: Mapping[str, tuple[Axis, Axis]] = {BY_HEAD: ("size_per_head", "size_per_head"), WHOLE: (_QUERY, _KEY)}


@dataclass(frozen=True)
class _Gated(Fused):
    """A group's queries, then their gates; in the model each head's gate follows its query."""

    def read(self, values: Any, role: str, size_of: SizeOf) -> Any:
        """Show one of the tensors; of queries and gates [outer, heads, 2, inner, ...]."""
        shown = super().read(values, role, size_of)
        return shown if role != "query" else shown.reshape(len(shown), 2, -1, *shown.shape[2:]).swapaxes(1, 2)


@dataclass(frozen=True)
class Attention:
    """One kind of attention; heads of a group follow one another.

    Attributes:
        head_num, kv_head_num: heads of the queries, and of the keys and values; the second divides the first.
        size_per_head: width of each; heads times width need not be the width of the model.
        has_qkv_bias, has_output_bias: biases of the inputs, and of the output.
        qk_norm: NO_NORM, BY_HEAD, WHOLE or UNIT.
        scalar: scores are divided by its root; 0: by that of size_per_head.
        multiplier: of scores, in place of a root; 0: there is none.
        softcap: c of c * tanh(score / c); 0: there is none.
        is_fused: the weights of query, key and value are one tensor, one after another.
        rotates_neighbours: elements that follow one another are rotated; else the halves of a head.
        has_sinks: each head has one more score, a number that is trained, which takes its share and adds nothing.
        has_output_gate: what a head gives is multiplied by a sigmoid of the token, made behind its query.
        temperature, temperature_floor: in layers that do not rotate, the query at position p is multiplied by
            1 + temperature * log(1 + floor((p + 1) / temperature_floor)); 0, 0: it is not.
    """

    head_num: int
    kv_head_num: int
    size_per_head: int
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    qk_norm: str = NO_NORM
    scalar: float = 0.0
    multiplier: float = 0.0
    softcap: float = 0.0
    is_fused: bool = False
    rotates_neighbours: bool = False
    has_sinks: bool = False
    has_output_gate: bool = False
    temperature: float = 0.0
    temperature_floor: int = 0

    @property
    def heads_per_group(self) -> int:
        """Heads that share one key and value."""
        return self.head_num // self.kv_head_num

    @property
    def queries_and_gates(self) -> int:
        """Queries of a group, and their gates."""
        return 2 * self.heads_per_group

    def norms(self) -> dict[str, Tensor]:
        """List the weights of the norms of queries and keys, by role."""
        if self.qk_norm not in _NORMS:
            return {}
        cut = 0 if self.qk_norm == WHOLE else None
        axes = zip(("query_norm", "key_norm"), _NORMS[self.qk_norm], strict=True)
        return {f"{role}.weight": Tensor((each,), cut) for role, each in axes}

    def tensors(self) -> dict[str, Tensor]:
        """List the linear layers and the sinks, by role."""
        heads: dict[str, tuple[str | int, ...]] = {"query": _QUERY, "key": _KEY, "value": _KEY}
        if self.has_output_gate:
            heads["query"] = _GATED_QUERY
        weights = {role: Tensor((axis, "hidden_units"), 0) for role, axis in heads.items()}
        if self.is_fused:
            heads = {"query_key_value": ("qkv_head_num", "size_per_head")}
            weights = {"query_key_value": Tensor((heads["query_key_value"], "hidden_units"))}
        weights["attention_output"] = Tensor(("hidden_units", _QUERY), 1)
        found = {f"{role}.weight": weight for role, weight in weights.items()}
        if self.has_qkv_bias:
            found |= {f"{role}.bias": weights[role].bias for role in heads}
        if self.has_output_bias:
            found["attention_output.bias"] = weights["attention_output"].bias
        if self.has_sinks:
            found["sinks"] = Tensor((_QUERY[:2],), 0)
        return found

    def spellings(self, is_apart: bool = False) -> tuple[Spelling, ...]:
        """List Megatron's: legacy ("attention" is Megatron-LM's before 2021), core, Transformer Engine's layer."""
        if not self.has_output_gate:
            return _SPELLINGS
        return (replace(_SPELLINGS[0], fused=_Gated(_GATED_SLOTS, "size_per_head")), *_SPELLINGS[1:])


@dataclass(frozen=True)
class Heads(Keys):
    """How many heads there are, and how wide they are.

    Attributes:
        is_square_unsaid: head_dim is left out where heads times width is the model's width.
    """

    is_square_unsaid: bool = False
    says = ("attention.head_num", "attention.kv_head_num", "attention.size_per_head")

    def read(self, config: ConfigJson) -> dict[str, Any]:
        heads = config.size("num_attention_heads")
        kv_heads = config.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelError(f"config.json: num_key_value_heads {kv_heads} does not divide {heads} heads")
        return dict(zip(self.says, (heads, kv_heads, config.head_size), strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        heads, kv_heads, size = (fields[name] for name in self.says)
        said = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        return said if self.is_square_unsaid and self._is_square(fields) else {**said, "head_dim": size}

    def lacks(self, fields: Fields) -> list[str]:
        if not self.is_square_unsaid or self._is_square(fields):
            return []
        return [f"{self.says[2]}: {fields[self.says[2]]}  (it is hidden_size / num_attention_heads)"]

    def _is_square(self, fields: Fields) -> bool:
        heads, _, size = (fields[name] for name in self.says)
        return bool(heads * size == fields["hidden_units"])


@dataclass(frozen=True)
class Biases(Keys):
    """Which linear layers have biases.

    Attributes:
        attention: key that says it of attention; empty: no key does.
        mlp: that says it of the feed-forward; empty: it has none.
        has_qkv, has_mlp: where no key says it: whether attention's inputs have them, and the feed-forward.
    """

    attention: str = ""
    mlp: str = ""
    has_qkv: bool = False
    has_mlp: bool = False
    says = ("attention.has_qkv_bias", "attention.has_output_bias", "feed_forward.has_bias")

    def read(self, config: ConfigJson) -> dict[str, Any]:
        of_all = bool(self.attention and config.get(self.attention))
        biases = (of_all or self.has_qkv, of_all, bool(self.mlp and config.get(self.mlp)) or self.has_mlp)
        return dict(zip(self.says, biases, strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        qkv, _, mlp = (fields[name] for name in self.says)
        return {key: has for key, has in ((self.attention, qkv), (self.mlp, mlp)) if key}

    def lacks(self, fields: Fields) -> list[str]:
        meant = self.read(ConfigJson(self.write(fields)))
        is_said_twice = self.mlp and self.mlp == self.attention and len({fields[name] for name in self.says}) > 1
        if not is_said_twice and all(fields[name] == meant[name] for name in self.says):
            return []
        which = [name for name in self.says if fields[name]]
        return [f"{', '.join(which) or self.says[0]}: {bool(which)}  (it has other biases)"]


@dataclass(frozen=True)
class Multiplier(Keys):
    """What scores are multiplied by, where a key says it."""

    key: str
    says = ("attention.multiplier",)

    def read(self, config: ConfigJson) -> dict[str, Any]:
        said = config.above_zero(self.key)
        return {self.says[0]: 0.0 if said == config.head_size**-0.5 else said}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {self.key: fields[self.says[0]] or fields["attention.size_per_head"] ** -0.5}


@dataclass(frozen=True)
class Caps(Keys):
    """Gemma 2's: what scores are divided by, and what caps scores and logits.

    Attributes:
        has_scores: whether scores are capped: Gemma 3's class keeps the key and passes over it.
    """

    has_scores: bool = True
    _SCALAR: ClassVar[str] = "query_pre_attn_scalar"

    @property
    def says(self) -> tuple[str, ...]:
        return ("attention.scalar", *self._caps())

    def read(self, config: ConfigJson) -> dict[str, Any]:
        scalar = config.number(self._SCALAR)
        caps = {name: 0.0 if config.get(key) is None else config.above_zero(key) for name, key in self._caps().items()}
        return {"attention.scalar": 0.0 if scalar == config.head_size else scalar, **caps}

    def write(self, fields: Fields) -> dict[str, Any]:
        scalar = fields["attention.scalar"] or fields["attention.size_per_head"]
        said = int(scalar) if scalar == int(scalar) else scalar  # transformers' type of the key is a whole number's
        return {self._SCALAR: said, **{key: fields[name] or None for name, key in self._caps().items()}}

    def _caps(self) -> dict[str, str]:
        of_scores = {"attention.softcap": "attn_logit_softcapping"} if self.has_scores else {}
        return {**of_scores, "final_softcap": "final_logit_softcapping"}
