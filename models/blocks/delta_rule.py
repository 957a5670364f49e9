"""The gated delta rule: a state for each head that forgets, and learns a token's value by its key.

Linear layers make queries, keys, values and a gate of the output (z), and for each head of the values how much is
learnt (beta) and forgotten (alpha); queries, keys and values go through a short convolution first. Parameters and
order: megatron-core, ``ssm/gated_delta_net``; transformers, ``Qwen3NextGatedDeltaNet``, whose two linear layers have
all that belongs to a head of the keys together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from models.config_json import ConfigJson
from models.keys import Fields, Key, Keys
from models.spelling import SizeOf, Spelling
from models.tensor import Tensor

NAMES = {
    **{"delta_in": "linear_attn.in_proj_qkvz", "delta_gates": "linear_attn.in_proj_ba"},
    **{"delta_conv": "linear_attn.conv1d", "delta_decay": "linear_attn.A_log", "delta_step": "linear_attn.dt_bias"},
    **{"delta_norm": "linear_attn.norm", "delta_output": "linear_attn.out_proj"},
}
_BY_HEAD = Tensor(("delta.value_head_num",), 0, stays_fp32=True)
_KEY_HEADS = "delta.key_head_num"


class ByKeyHead(Spelling):
    """Sections of the training's that are joined within each head of the keys."""

    section_axis: ClassVar[int] = 1

    def read(self, values: Any, role: str, tensor: Tensor, size_of: SizeOf) -> Any:
        """Show a section, whole: [heads of the keys, what belongs to one, in]."""
        return values.reshape(size_of(_KEY_HEADS), -1, *values.shape[1:])


@dataclass(frozen=True)
class DeltaRule:
    """One kind of it; heads of the values that share a head of queries and keys follow one another.

    Attributes:
        key_head_num, value_head_num: heads of queries and keys, and of values; the first divides the second.
        key_size, value_size: width of each.
        conv_size: tokens that the convolution sees, the token itself among them.
    """

    key_head_num: int
    value_head_num: int
    key_size: int
    value_size: int
    conv_size: int = 4

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
        return 2 * self.key_head_num * self.key_size + self.value_head_num * self.value_size

    def norms(self) -> dict[str, Tensor]:
        """List the norms that are stored as those of the residual stream: its own never lacks one."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """List the tensors, by role."""
        return {
            "delta_in.weight": Tensor(((_KEY_HEADS, "delta.in_per_key"), "hidden_units"), 0),
            "delta_gates.weight": Tensor(((_KEY_HEADS, "delta.gates_per_key"), "hidden_units"), 0),
            "delta_conv.weight": Tensor(("delta.channels", 1, "delta.conv_size"), 0),
            **dict.fromkeys(("delta_decay", "delta_step"), _BY_HEAD),
            "delta_norm.weight": Tensor(("delta.value_size",)),
            "delta_output.weight": Tensor(("hidden_units", ("delta.value_head_num", "delta.value_size")), 1),
        }

    def spellings(self, is_apart: bool = False) -> tuple[Spelling, ...]:
        """List megatron-core's; the norm before the block is fused."""
        place = "self_attention"
        return (
            Spelling(("input_norm",), (f"{place}.in_proj.layer_norm_{{kind}}",)),
            ByKeyHead(("delta_in",), (f"{place}.in_proj.{{kind}}",), sections=("query", "key", "value", "z")),
            ByKeyHead(("delta_gates",), (f"{place}.in_proj.{{kind}}",), sections=("beta", "alpha")),
            Spelling(("delta_conv",), (f"{place}.conv1d.{{kind}}",), sections=("query", "key", "value")),
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
)
"""Qwen3-Next's words."""
