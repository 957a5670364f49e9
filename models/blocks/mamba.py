"""Mamba 2: a state for each head that every token updates, in the place of keys and values of all tokens before it.

One linear layer makes a gate (z), what is put into the state (x), by which numbers it is put in and read out (B, C: a
group of heads shares them) and how far the state moves (dt); x, B and C go through a short convolution first.
Parameters and order: megatron-core, ``ssm/mamba_mixer.py``; transformers, ``NemotronHMamba2Mixer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from models.config_json import ConfigJson
from models.keys import Fields, Key, Keys, flag
from models.spelling import Spelling
from models.tensor import Tensor

NAMES = {
    **{"mamba_in": "mixer.in_proj", "mamba_conv": "mixer.conv1d", "mamba_decay": "mixer.A_log"},
    **{"mamba_skip": "mixer.D", "mamba_step": "mixer.dt_bias", "mamba_norm": "mixer.norm"},
    "mamba_output": "mixer.out_proj",
}
CORE_EPS = 1e-5
"""What megatron-core's norm of the output adds to the variance, whatever the other norms add."""
_BY_HEAD = Tensor(("mamba.head_num",), 0, stays_fp32=True)


@dataclass(frozen=True)
class Mamba:
    """One kind of Mamba 2.

    Attributes:
        head_num, size_per_head: heads, and the width of each.
        group_num: groups of heads that share B and C.
        state_size: numbers that the state has for each element of a head.
        conv_size: tokens that the convolution sees, the token itself among them.
        has_conv_bias, has_bias: biases of the convolution, and of the linear layers.
        least_step: what dt is at least.
        norm_eps: what the output's norm adds to the variance; 0: what the other norms add.
        chunk_size: tokens that are computed together; the result does not depend on it.
        has_norm: whether the output is normalised.
        has_norm_before_gate: whether it is, before the gate is multiplied in; else behind.
        in_sections, conv_sections: what lies one after another along the first axis of the linear layer, and of the
            convolution.
    """

    head_num: int
    size_per_head: int
    group_num: int
    state_size: int
    conv_size: int = 4
    has_conv_bias: bool = True
    has_bias: bool = False
    least_step: float = 0.0
    norm_eps: float = 0.0
    chunk_size: int = 128
    has_norm: bool = True
    has_norm_before_gate: bool = False
    in_sections: ClassVar[tuple[str, ...]] = ("z", "x", "B", "C", "dt")
    conv_sections: ClassVar[tuple[str, ...]] = ("x", "B", "C")

    @property
    def inter_size(self) -> int:
        """Width of all heads."""
        return self.head_num * self.size_per_head

    @property
    def widths(self) -> Mapping[str, int]:
        """Rows of each section."""
        shared = self.group_num * self.state_size
        return {"z": self.inter_size, "x": self.inter_size, "B": shared, "C": shared, "dt": self.head_num}

    @property
    def in_size(self) -> int:
        """Rows of the linear layer."""
        return sum(self.widths[name] for name in self.in_sections)

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return sum(self.widths[name] for name in self.conv_sections)

    @property
    def memory(self) -> tuple[int, ...]:
        """Shape of what every token updates, of a text."""
        return self.head_num, self.size_per_head, self.state_size

    def norms(self) -> dict[str, Tensor]:
        """List the weights of norms that are stored as those of the residual stream, by role: its own is not."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """List the tensors, by role."""
        inward, conv = Tensor(("mamba.in_size", "hidden_units"), 0), Tensor(("mamba.channels", 1, "mamba.conv_size"), 0)
        output = Tensor(("hidden_units", "mamba.inter_size"), 1)
        found = {"mamba_in.weight": inward, "mamba_conv.weight": conv, "mamba_output.weight": output}
        found |= dict.fromkeys(("mamba_decay", "mamba_skip", "mamba_step"), _BY_HEAD)
        if self.has_norm:
            found["mamba_norm.weight"] = Tensor(("mamba.inter_size",), 0)
        if self.has_conv_bias:
            found["mamba_conv.bias"] = conv.bias
        if self.has_bias:
            found |= {"mamba_in.bias": inward.bias, "mamba_output.bias": output.bias}
        return found

    def spellings(self, is_apart: bool = False) -> tuple[Spelling, ...]:
        """List megatron-core's; the norm before the block is fused, or ModelOpt's, which is not."""
        return (
            Spelling(("input_norm",), ("mixer.in_proj.layer_norm_{kind}", "norm.{kind}")),
            Spelling(("mamba_in",), _either("in_proj.{kind}"), sections=self.in_sections),
            Spelling(("mamba_conv",), _either("conv1d.{kind}"), sections=self.conv_sections),
            Spelling(("mamba_decay",), _either("A_log"), kinds=("",)),
            Spelling(("mamba_skip",), _either("D"), kinds=("",)),
            Spelling(("mamba_step",), _either("dt_bias"), kinds=("",)),
            Spelling(("mamba_norm",), _either("norm.{kind}")),
            Spelling(("mamba_output",), _either("out_proj.{kind}")),
        )


def _either(name: str) -> tuple[str, str]:
    """Spell a name as a layer of Mamba alone has it, and one with attention beside it (Megatron-Bridge's Falcon-H1)."""
    return f"mixer.{name}", f"mamba_mixer.{name}"


class LeastStep(Keys):
    """What dt is at least: transformers' class starts from its logarithm, so that 0 cannot be said."""

    says: ClassVar[tuple[str, ...]] = ("mamba.least_step",)
    _KEY: ClassVar[str] = "time_step_min"
    _NONE: ClassVar[float] = 1e-30
    """Nothing that a state is moved by in fp32 or bf16 differs from it where it is less."""

    def read(self, config: ConfigJson) -> dict[str, Any]:
        least = config.number(self._KEY)
        return {self.says[0]: 0.0 if least <= self._NONE else least}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {self._KEY: fields[self.says[0]] or self._NONE}


class OneEpsilon(Keys):
    """The output's norm adds to the variance what the other norms add."""

    says: ClassVar[tuple[str, ...]] = ("mamba.norm_eps",)

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return {self.says[0]: 0.0}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {}

    def lacks(self, fields: Fields) -> list[str]:
        own, others = fields[self.says[0]], fields["norms.eps"]
        return (
            []
            if own in (0, others) or not fields["mamba.has_norm"]
            else [f"{self.says[0]}: {own}  (the other norms add {others})"]
        )


KEYS: tuple[Keys, ...] = (
    Key("mamba_num_heads", "mamba.head_num"),
    Key("mamba_head_dim", "mamba.size_per_head"),
    Key("n_groups", "mamba.group_num"),
    Key("ssm_state_size", "mamba.state_size"),
    Key("conv_kernel", "mamba.conv_size"),
    Key("use_conv_bias", "mamba.has_conv_bias", flag, unset=False),
    Key("use_bias", "mamba.has_bias", flag, unset=False),
    Key("chunk_size", "mamba.chunk_size"),
    LeastStep(),
    OneEpsilon(),
)
"""Nemotron-H's words."""
