"""Experts that a hub's file holds together: [expert, in, out].

Along out gate and up take turns in GPT-OSS, and follow one another in Llama 4. Trainings keep them as [out, in], the
gate's rows before those of up. Which axis is which, the format alone says: in GPT-OSS the model and an expert's middle
are equally wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from models.spelling import SizeOf, Spelling
from models.tensor import Tensor

_GATE_UP, _DOWN, _BIAS = "experts_gate_up", "experts_down", "_bias"
NAMES = {
    **{_GATE_UP: "mlp.experts.gate_up_proj", f"{_GATE_UP}{_BIAS}": "mlp.experts.gate_up_proj_bias"},
    **{_DOWN: "mlp.experts.down_proj", f"{_DOWN}{_BIAS}": "mlp.experts.down_proj_bias"},
}
_EXPERTS, _MIDDLE, _WIDTH = "mixture.expert_num", "mixture.inter_size", "hidden_units"
_FC1, _FC2 = "linear_fc1", "linear_fc2"


@dataclass(frozen=True)
class Gathered(Spelling):
    """One of these arrays, put together of all the tensors of a training that ``names`` lists.

    Attributes:
        axes: of the array, along which they follow one another: of pairs the axis of the pairs comes first, and then
            that of the two in each.
        halves: matrices that lie one after another along the rows of each of them; 0: it is one, which the array does
            not take apart.
        is_one: each of them is of one expert; else of all of them.
        cut: axis along which tensor parallelism cuts each; None: every rank has all of it.
        is_in_halves: gates come before what they are multiplied with; else they take turns.
    """

    axes: tuple[int, ...] = ()
    halves: int = 0
    is_one: bool = False
    cut: int | None = None
    is_in_halves: bool = False
    kinds: tuple[str, ...] = ("",)

    def read(self, values: Any, role: str, tensor: Tensor, size_of: SizeOf) -> Any:
        """Show what of the array a training's tensor is, or one rank's part of that.

        It is [experts, in, out, half] where gates and what they are multiplied with take turns, and else
        [experts, in, half, out].
        """
        values = values[None] if self.is_one else values
        if self.halves:
            values = values.reshape(values.shape[0], self.halves, -1, *values.shape[2:])
        order = tuple(reversed(range(1, values.ndim)))
        if self.halves and self.is_in_halves:
            order = (*order[:-2], *reversed(order[-2:]))
        return values.transpose(0, *order)


def tensors(has_bias: bool, is_in_halves: bool = False) -> dict[str, Tensor]:
    """List the arrays by role."""
    both: tuple[str | int, ...] = (2, _MIDDLE) if is_in_halves else (_MIDDLE, 2)
    found = {_GATE_UP: Tensor((_EXPERTS, _WIDTH, both), 2), _DOWN: Tensor((_EXPERTS, _MIDDLE, _WIDTH), 1)}
    if has_bias:
        found |= {f"{_GATE_UP}{_BIAS}": Tensor((_EXPERTS, both), 1), f"{_DOWN}{_BIAS}": Tensor((_EXPERTS, _WIDTH))}
    return found


def spellings(expert_num: int, is_apart: bool, is_in_halves: bool = False) -> Iterator[Spelling]:
    """List megatron-core's; see ``Mixture.spellings``."""
    for kind, last in (("weight", 3), ("bias", 2)):
        ends, halves = (("_w", "_v"), 1) if is_apart else (("",), 2)
        suffix = _BIAS if kind == "bias" else ""
        pair = (last - is_in_halves,) if is_apart else ()
        for names, is_one in _places(expert_num, f"{_FC1}.{kind}", ends):
            axes = (0, *pair) if is_one else pair
            made = Gathered((f"{_GATE_UP}{suffix}",), names, axes=axes, halves=halves, is_one=is_one, cut=0)
            yield replace(made, is_in_halves=is_in_halves)
        cut = 1 if kind == "weight" else None
        for names, is_one in _places(expert_num, f"{_FC2}.{kind}", ("",)):
            axes = (0,) if is_one else ()
            yield Gathered((f"{_DOWN}{suffix}",), names, axes=axes, is_one=is_one, cut=cut)


def _places(expert_num: int, name: str, ends: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """List where a training has a tensor of each expert, or one of all: the names, and whether they are of each."""
    for place in ("experts.experts.{}.{}", "experts.local_experts.{}.{}", "experts.{1}{0}"):
        yield tuple(f"mlp.{place.format(n, name)}{end}" for n in range(expert_num) for end in ends), True
    yield tuple(f"mlp.experts.experts.{name}{end}" for end in ends), False
