"""The gated delta rule: a state for each head that forgets, and learns a token's value by its key.

Linear layers make queries, keys, values and a gate of the output (z), and for each head of the values how much is
learnt (beta) and forgotten (alpha); queries, keys and values go through a short convolution first. Parameters and
order: megatron-core, ``ssm/gated_delta_net``; transformers, ``Qwen3NextGatedDeltaNet``, whose two linear layers have
all that belongs to a head of the keys together, and ``Qwen3_5GatedDeltaNet``, which has a linear layer of queries, keys
and values, one after another, and one of each of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from models.config_json import ConfigJson
from models.keys import Constants, Fields, Key, Keys
from models.spelling import SizeOf, Spelling
from models.tensor import Tensor

NAMES = {
    **{"delta_in": "linear_attn.in_proj_qkvz", "delta_gates": "linear_attn.in_proj_ba"},
    **{f"delta_{name}": f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")},
    **{"delta_conv": "linear_attn.conv1d", "delta_decay": "linear_attn.A_log", "delta_step": "linear_attn.dt_bias"},
    **{"delta_norm": "linear_attn.norm", "delta_output": "linear_attn.out_proj"},
}
_BY_HEAD = Tensor(("delta.value_head_num",), 0, stays_fp32=True)
_KEY_HEADS = "delta.key_head_num"
_GATE = Tensor(("delta.value_head_num", "hidden_units"), 0)
_BY_KEY = {
    "delta_in.weight": Tensor(((_KEY_HEADS, "delta.in_per_key"), "hidden_units"), 0),
    "delta_gates.weight": Tensor(((_KEY_HEADS, "delta.gates_per_key"), "hidden_units"), 0),
}
_BY_KIND = {
    "delta_qkv.weight": Tensor(("delta.channels", "hidden_units"), 0),
    "delta_z.weight": Tensor((("delta.value_head_num", "delta.value_size"), "hidden_units"), 0),
    **dict.fromkeys(("delta_b.weight", "delta_a.weight"), _GATE),
}
"""What goes in, as one of the two classes stores it."""
_BY_HEADS = 3
"""Axes of a section that is shown by heads of the keys: those, rows of one, in."""


class ByKeyHead(Spelling):
    """Sections of the training's that are joined within each head of the keys."""

    section_axis: ClassVar[int] = 1

    def read(self, values: Any, role: str, tensor: Tensor, size_of: SizeOf) -> Any:
        """Show a section, whole, or by heads of the keys some of it: [heads of the keys, what belongs to one, in]."""
        return values if values.ndim == _BY_HEADS else values.reshape(size_of(_KEY_HEADS), -1, *values.shape[1:])


class ByKind(Spelling):
    """A section of the training's that is one of the model's, or one after another."""

    def read(self, values: Any, role: str, tensor: Tensor, size_of: SizeOf) -> Any:
        """Show a section, or some of it, which may lie there by heads of the keys."""
        rows = values.reshape(-1, values.shape[-1]) if values.ndim == _BY_HEADS else values
        return super().read(rows, role, tensor, size_of)


@dataclass(frozen=True)
class DeltaRule:
    """One kind of it; heads of the values that share a head of queries and keys follow one another.

    Attributes:
        key_head_num, value_head_num: heads of queries and keys, and of values; the first divides the second.
        key_size, value_size: width of each.
        conv_size: tokens that the convolution sees, the token itself among them.
        is_by_kind: what goes in is stored by kind, all heads of it together; else by heads of the keys.
        in_sections, conv_sections: what a training has one after another along the first axis of the linear layer, and
            of the convolution.
    """

    key_head_num: int
    value_head_num: int
    key_size: int
    value_size: int
    conv_size: int = 4
    is_by_kind: bool = False
    in_sections: ClassVar[tuple[str, ...]] = ("query", "key", "value", "z", "beta", "alpha")
    conv_sections: ClassVar[tuple[str, ...]] = ("query", "key", "value")

    @property
    def widths(self) -> Mapping[str, int]:
        """Rows of each section."""
        keys, values = self.key_head_num * self.key_size, self.value_head_num * self.value_size
        gates = dict.fromkeys(("beta", "alpha"), self.value_head_num)
        return {"query": keys, "key": keys, "value": values, "z": values, **gates}

    @property
    def heads_per_key(self) -> int:
        """Heads of values that share one of keys."""
        return self.value_head_num // self.key_head_num

    @property
    def in_per_key(self) -> int:
        """Rows of query, key, values and gates of the output of one head of the keys."""
        return 2 * (self.key_size + self.heads_per_key * self.value_size)

    @property
    def gates_per_key(self) -> int:
        """Rows that say how much is learnt and forgotten, of one head of the keys."""
        return 2 * self.heads_per_key

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return sum(self.widths[name] for name in self.conv_sections)

    @property
    def memory(self) -> tuple[int, ...]:
        """Shape of what every token updates, of a text."""
        return self.value_head_num, self.key_size, self.value_size

    def norms(self) -> dict[str, Tensor]:
        """List the norms that are stored as those of the residual stream: its own never lacks one."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """List the tensors, by role."""
        return {
            **(_BY_KIND if self.is_by_kind else _BY_KEY),
            "delta_conv.weight": Tensor(("delta.channels", 1, "delta.conv_size"), 0),
            **dict.fromkeys(("delta_decay", "delta_step"), _BY_HEAD),
            "delta_norm.weight": Tensor(("delta.value_size",)),
            "delta_output.weight": Tensor(("hidden_units", ("delta.value_head_num", "delta.value_size")), 1),
        }

    def spellings(self, is_apart: bool = False) -> tuple[Spelling, ...]:
        """List megatron-core's; the norm before the block is fused."""
        place = "self_attention"
        into, mixed = f"{place}.in_proj.{{kind}}", self.conv_sections
        by_kind = (("z", "z"), ("b", "beta"), ("a", "alpha"))
        by_key = (
            ByKeyHead(("delta_in",), (into,), sections=(*mixed, "z")),
            ByKeyHead(("delta_gates",), (into,), sections=("beta", "alpha")),
        )
        apart = (
            ByKind(("delta_qkv",), (into,), sections=mixed),
            *(ByKind((f"delta_{role}",), (f"{into}.{section}",)) for role, section in by_kind),
        )
        return (
            Spelling(("input_norm",), (f"{place}.in_proj.layer_norm_{{kind}}",)),
            *(apart if self.is_by_kind else by_key),
            Spelling(("delta_conv",), (f"{place}.conv1d.{{kind}}",), sections=mixed),
            Spelling(("delta_decay",), (f"{place}.A_log",), kinds=("",)),
            Spelling(("delta_step",), (f"{place}.dt_bias",), kinds=("",)),
            Spelling(("delta_norm",), (f"{place}.out_norm.{{kind}}",), is_centred=True),
            Spelling(("delta_output",), (f"{place}.out_proj.{{kind}}",)),
        )


class DeltaHeads(Keys):
    """How many heads there are of keys and of values."""

    says: ClassVar[tuple[str, ...]] = ("delta.key_head_num", "delta.value_head_num")
    _KEYS, _VALUES = "linear_num_key_heads", "linear_num_value_heads"

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return dict(zip(self.says, (config.size(self._KEYS), config.size(self._VALUES)), strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        return {self._KEYS: fields[self.says[0]], self._VALUES: fields[self.says[1]]}

    def problems(self, config: ConfigJson) -> list[str]:
        keys, values = self.read(config).values()
        return [f"{self._VALUES}: {values}  (no multiple of {self._KEYS} {keys})"] if values % keys else []


KEYS: tuple[Keys, ...] = (
    DeltaHeads(),
    Key("linear_key_head_dim", "delta.key_size"),
    Key("linear_value_head_dim", "delta.value_size"),
    Key("linear_conv_kernel_dim", "delta.conv_size"),
    Constants({"attn_output_gate": True}),
)
"""Qwen3-Next's words, and that of the attention beside it."""
