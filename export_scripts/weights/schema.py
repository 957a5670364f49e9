"""What a table of weights is made of, and the equation that a conversion must fulfil.

A model family declares FasterTransformer's layout once (``TargetTensor``), a checkpoint format declares which
source tensor becomes which target (``SourceMap``). ``match`` then demands:

    consumed + ignored = keys of the source        produced + zeros = schema        shapes are equal
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Protocol

import numpy as np

from export_scripts.dtypes import Array
from handover.errors import CheckpointError

Symbol = str | int | tuple[str, ...]


@dataclass(frozen=True)
class ModelDims:
    """Dimensions of a GPT, in FasterTransformer's words.

    Attributes:
        head_num, size_per_head: attention heads and the width of each.
        inter_size: width of the feed-forward's middle.
        num_layer: transformer blocks.
        max_pos_seq_len: rows of the position table.
        vocab_size: rows of the embedding, with the training's padding.
        layernorm_eps: epsilon of every layer norm.
        has_untied_head: the output projection has weights of its own.
    """

    head_num: int
    size_per_head: int
    inter_size: int
    num_layer: int
    max_pos_seq_len: int
    vocab_size: int
    layernorm_eps: float = 1e-5
    has_untied_head: bool = False

    @property
    def hidden_units(self) -> int:
        """Width of the residual stream."""
        return self.head_num * self.size_per_head

    def axis_size(self, symbol: str | int) -> int:
        """Resolve one symbol of a shape."""
        return symbol if isinstance(symbol, int) else int(getattr(self, symbol))


class LazyTensor(Protocol):
    """A source tensor that is read only when it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor, training shards joined."""

    @property
    def data_type(self) -> str:
        """fp32, fp16 or bf16."""

    def read(self) -> Array:
        """Read it; bf16 comes as uint16."""


Layout = Callable[[Array, ModelDims], Array]


@dataclass(frozen=True)
class TargetTensor:
    """One tensor of FasterTransformer's layout.

    Attributes:
        shape: symbols of ModelDims, or numbers; a tuple of symbols is one axis on disk that has inner structure,
            as ("head_num", "size_per_head").
        split_axis: axis of ``shape`` that tensor_para_size divides; None: written once, for all ranks.
    """

    shape: tuple[Symbol, ...]
    split_axis: int | None = None

    def full_shape(self, dims: ModelDims) -> tuple[int, ...]:
        """Shape of the whole tensor with inner structure spelled out, as layouts return it."""
        return tuple(
            dims.axis_size(part) for axis in self.shape for part in (axis if isinstance(axis, tuple) else (axis,))
        )

    def shard_shape(self, dims: ModelDims, tensor_para_size: int) -> tuple[int, ...]:
        """Shape of one rank's file."""
        sizes = [
            prod(dims.axis_size(part) for part in axis) if isinstance(axis, tuple) else dims.axis_size(axis)
            for axis in self.shape
        ]
        if self.split_axis is not None:
            sizes[self.split_axis] //= tensor_para_size
        return tuple(sizes)


@dataclass(frozen=True)
class Rule:
    """What one source tensor becomes.

    Attributes:
        target: FasterTransformer's name of it.
        layout: the rearrangement.
        join_axis: axis along which training's tensor parallelism cut the source; None: every rank holds all of it.
    """

    target: str
    layout: Layout
    join_axis: int | None = None


@dataclass(frozen=True)
class SourceMap:
    """One checkpoint format's way to a schema. ``{layer}`` in a key or target stands for a layer's number.

    Attributes:
        name: of the format, for people.
        rules: by source key.
        ignored: source keys (shell patterns) that are dropped on purpose, with the reason.
    """

    name: str
    rules: Mapping[str, Rule]
    ignored: Mapping[str, str]

    def rule(self, key: str) -> tuple[Rule, str] | None:
        """Find the rule of a key and the name of its target, with the layer's number filled in."""
        pattern, layer = split_layer(key)
        rule = self.rules.get(pattern)
        return (rule, rule.target.format(layer=layer)) if rule else None

    def is_ignored(self, key: str) -> bool:
        """Whether a key is dropped on purpose."""
        return any(fnmatchcase(key, pattern) for pattern in self.ignored)


@dataclass(frozen=True)
class Assignment:
    """One target tensor and where it comes from.

    Attributes:
        name: of the target, without ``.<rank>.bin``.
        target: its declaration.
        source_key: of the source tensor; None: zeros.
        layout: the rearrangement; None: zeros.
    """

    name: str
    target: TargetTensor
    source_key: str | None = None
    layout: Layout | None = None


_LAYER = re.compile(r"\.layers\.(\d+)\.")


def split_layer(key: str) -> tuple[str, int | None]:
    """Split a key into its pattern and its layer number: ``a.layers.3.b`` gives (``a.layers.{layer}.b``, 3)."""
    found = _LAYER.search(key)
    if found is None:
        return key, None
    return f"{key[: found.start(1)]}{{layer}}{key[found.end(1) :]}", int(found.group(1))


def with_layer(key: str, layer: int) -> str:
    """Replace a key's layer number."""
    pattern, _ = split_layer(key)
    return pattern.replace("{layer}", str(layer))


def match(
    schema: Mapping[str, TargetTensor],
    source_map: SourceMap,
    dims: ModelDims,
    tensors: Mapping[str, LazyTensor],
    other_keys: Iterable[str] = (),
) -> tuple[Assignment, ...]:
    """Give every target its source, or refuse the checkpoint.

    Args:
        schema: every target by name, layers spelled out. A missing bias is zeros; anything else must be there.
        source_map: the table of the checkpoint's format.
        dims: the model's dimensions.
        tensors: the source.
        other_keys: keys of the source whose values are not tensors.

    Raises:
        CheckpointError: listing every key without a rule, every target without a source and every wrong shape.
    """
    found: dict[str, Assignment] = {}
    problems = [f"{key}  is not a tensor and has no rule" for key in other_keys if not source_map.is_ignored(key)]
    for key, tensor in tensors.items():
        if source_map.is_ignored(key):
            continue
        ruled = source_map.rule(key)
        if ruled is None:
            problems.append(f"{key}  {list(tensor.shape)}  has no rule")
            continue
        rule, name = ruled
        if name not in schema:
            problems.append(f"{key}  {list(tensor.shape)}  gives {name}, which this model does not have")
        elif name in found:
            problems.append(f"{key}  gives {name}, as {found[name].source_key} does")
        else:
            problems += _shape_problems(key, tensor, rule, name, schema[name], dims)
            found[name] = Assignment(name, schema[name], key, rule.layout)
    for name, target in schema.items():
        if name not in found and name.endswith(".bias"):
            found[name] = Assignment(name, target)
        elif name not in found:
            problems.append(f"{name}  {list(target.full_shape(dims))}  has no source")
    if problems:
        raise CheckpointError(
            f"{len(problems)} differences from {source_map.name}\n  " + "\n  ".join(problems),
            "nothing is skipped: the tables in export_scripts/weights must account for every tensor",
        )
    return tuple(found[name] for name in schema)


def _shape_problems(
    key: str, tensor: LazyTensor, rule: Rule, name: str, target: TargetTensor, dims: ModelDims
) -> list[str]:
    """Run the layout on an array without memory of its own and compare the shapes."""
    wanted = target.full_shape(dims)
    try:
        got = rule.layout(np.broadcast_to(np.zeros((), np.uint8), tensor.shape), dims).shape
    except ValueError:
        got = None
    if got == wanted:
        return []
    given = f"as {list(got)}" if got else "but does not fit"
    return [f"{key}  {list(tensor.shape)}  gives {name} {given} instead of {list(wanted)}"]
