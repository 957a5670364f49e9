"""Latent attention: keys and values of all heads are made from one narrow vector for each token, queries may be.

A head's queries and keys have a part that is not rotated and one that is; the rotated part of the keys is one for all
heads. Scores are divided by the root of both widths together and, where YaRN has ``mscale_all_dim``, multiplied by the
square of what that grows to: transformers, ``modeling_deepseek_v3.py``, ``yarn_apply_mscale``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.blocks.rope_scaling import Yarn
from models.blocks.rotary import Rope, Rotary, rope_key, rope_parameters
from models.checks import shown
from models.config_json import ConfigJson
from models.keys import Fields, Keys
from models.spelling import Fused, Spelling
from models.tensor import Tensor

NAMES = {
    **{"latent.query": "self_attn.q_proj", "latent.output": "self_attn.o_proj"},
    **{"latent.query_down": "self_attn.q_a_proj", "latent.query_norm": "self_attn.q_a_layernorm"},
    **{"latent.query_up": "self_attn.q_b_proj", "latent.kv_down": "self_attn.kv_a_proj_with_mqa"},
    **{"latent.kv_norm": "self_attn.kv_a_layernorm", "latent.kv_up": "self_attn.kv_b_proj"},
}
NORM_EPS = 1e-6
"""What both norms add to the variance: the default of transformers' classes, which no key changes."""
_PLACE = "self_attention."
_DOWN = Fused((("query_down", "latent.query_rank"), ("kv_down", "latent.kv_width")))
_SPELLINGS = (
    *(
        Spelling((f"latent.{role}",), (f"{_PLACE}{name}.{{kind}}",))
        for role, name in (
            *(("query", "linear_q_proj"), ("query_down", "linear_q_down_proj"), ("query_up", "linear_q_up_proj")),
            *(("kv_down", "linear_kv_down_proj"), ("kv_up", "linear_kv_up_proj"), ("output", "linear_proj")),
        )
    ),
    *(
        Spelling(
            (f"latent.{role}_norm",), (f"{_PLACE}{role_of}_layernorm.{{kind}}", f"{_PLACE}{up}.layer_norm_{{kind}}")
        )
        for role, role_of, up in (("query", "q", "linear_q_up_proj"), ("kv", "kv", "linear_kv_up_proj"))
    ),
    Spelling(("latent.query_down", "latent.kv_down"), (f"{_PLACE}linear_qkv_down_proj.{{kind}}",), _DOWN),
    Spelling(("input_norm",), (f"{_PLACE}linear_qkv_down_proj.layer_norm_{{kind}}",)),
)
"""megatron-core's: of Transformer Engine and of its local specification, and of ``mla_down_proj_fusion``."""


@dataclass(frozen=True)
class Latent:
    """One kind of latent attention; how many heads there are says ``Attention``, and how wide their queries are.

    Attributes:
        kv_rank: width of the vector that keys and values are made from.
        plain_size, rotated_size: of a head's queries and keys: what is not rotated, and what is, behind it.
        value_size: of a head's values.
        query_rank: width of the vector that queries are made from; 0: they are made from the token itself.
        is_interleaved: neighbours are rotated against each other; else the halves of the rotated part.
        has_bias: whether what leads to the narrow vectors, and the output, have biases.
    """

    kv_rank: int
    plain_size: int
    rotated_size: int
    value_size: int
    query_rank: int = 0
    is_interleaved: bool = True
    has_bias: bool = False

    @property
    def kv_width(self) -> int:
        """Width of what a token's keys and values are made from, the rotated part of the keys with it."""
        return self.kv_rank + self.rotated_size

    @property
    def kv_size(self) -> int:
        """Width of a head's keys that are not rotated, and of its values."""
        return self.plain_size + self.value_size

    def scale(self, rotary: Rotary | None) -> float:
        """Return what scores are multiplied by; ``rotary`` is the rotation of the rotated part."""
        scaling = rotary.scaling if rotary else None
        grown = scaling.grown(scaling.mscale_all_dim) if isinstance(scaling, Yarn) and scaling.mscale_all_dim else 1.0
        return float((self.plain_size + self.rotated_size) ** -0.5 * grown**2)

    def norms(self) -> dict[str, Tensor]:
        """List the weights of the norms of the narrow vectors, by role."""
        found = {"latent.kv_norm.weight": Tensor(("latent.kv_rank",))}
        return {"latent.query_norm.weight": Tensor(("latent.query_rank",)), **found} if self.query_rank else found

    def tensors(self) -> dict[str, Tensor]:
        """List the linear layers, by role."""
        query = ("head_num", "size_per_head")
        weights = {
            "kv_down": Tensor(("latent.kv_width", "hidden_units")),
            "kv_up": Tensor((("head_num", "latent.kv_size"), "latent.kv_rank"), 0),
            "output": Tensor(("hidden_units", ("head_num", "latent.value_size")), 1),
        }
        if self.query_rank:
            weights["query_down"] = Tensor(("latent.query_rank", "hidden_units"))
            weights["query_up"] = Tensor((query, "latent.query_rank"), 0)
        else:
            weights["query"] = Tensor((query, "hidden_units"), 0)
        found = {f"latent.{role}.weight": weight for role, weight in weights.items()}
        if self.has_bias:
            biased = [role for role in ("query_down", "kv_down", "output") if role in weights]
            found |= {f"latent.{role}.bias": weights[role].bias for role in biased}
        return found

    def spellings(self, is_apart: bool = False) -> tuple[Spelling, ...]:
        """List megatron-core's."""
        return _SPELLINGS


class LatentHeads(Keys):
    """How many heads there are, how wide they are, and from how narrow a vector they are made."""

    _SIZES = {
        "kv_lora_rank": "latent.kv_rank",
        "qk_nope_head_dim": "latent.plain_size",
        "qk_rope_head_dim": "latent.rotated_size",
        "v_head_dim": "latent.value_size",
    }
    _HEADS, _KV_HEADS, _RANK = "num_attention_heads", "num_key_value_heads", "q_lora_rank"
    says = (
        *("attention.head_num", "attention.kv_head_num", "attention.size_per_head", "latent.query_rank"),
        *_SIZES.values(),
    )

    def read(self, config: ConfigJson) -> dict[str, Any]:
        heads = config.size(self._HEADS)
        sizes = {field: config.size(key) for key, field in self._SIZES.items()}
        return {
            **dict.fromkeys(self.says[:2], heads),
            self.says[2]: sizes["latent.plain_size"] + sizes["latent.rotated_size"],
            self.says[3]: 0 if config.get(self._RANK) is None else config.size(self._RANK),
            **sizes,
        }

    def write(self, fields: Fields) -> dict[str, Any]:
        return {
            **dict.fromkeys((self._HEADS, self._KV_HEADS), fields[self.says[0]]),
            self._RANK: fields[self.says[3]] or None,
            **{key: fields[field] for key, field in self._SIZES.items()},
        }

    def problems(self, config: ConfigJson) -> list[str]:
        heads = config.size(self._HEADS)
        kv_heads, rotated = config.size(self._KV_HEADS, heads), config.size("qk_rope_head_dim")
        size = config.size("head_dim", rotated)
        found = [] if kv_heads == heads else [f"{self._KV_HEADS}: {kv_heads}  (each of {heads} heads has its own)"]
        return found if size == rotated else [*found, f"head_dim: {size}  (it is qk_rope_head_dim, {rotated})"]


class LatentRope(Rope):
    """The rotation of the parts that are rotated, alike in all layers."""

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return super().read(_of_rotated(config))

    def write(self, fields: Fields) -> dict[str, Any]:
        return super().write({**fields, "attention.size_per_head": fields["latent.rotated_size"]})

    def problems(self, config: ConfigJson) -> list[str]:
        rope, key = rope_parameters(config), "mscale_all_dim"
        found = super().problems(config)
        if rope.get(key) and rope["rope_type"] not in ("default", Yarn.kind):
            found.append(f"{rope_key(config)}: {key}: {shown(rope[key])}  ({Yarn.kind} alone has it)")
        return found

    def lacks(self, fields: Fields) -> list[str]:
        return super().lacks({**fields, "attention.size_per_head": fields["latent.rotated_size"]})


def _of_rotated(config: ConfigJson) -> ConfigJson:
    return ConfigJson({**config, "head_dim": config.size("qk_rope_head_dim")})
