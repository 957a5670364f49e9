"""What a table of weights is made of.

A model family declares FasterTransformer's layout once (``TensorSpec``), a checkpoint format declares which
source tensors become which target (``SourceMap``); ``matching.match`` demands that the two add up.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

import numpy as np

from export_scripts.tensors.dtypes import STORAGE, Array
from ft_format.families import t5
from ft_format.families.gpt import GptDims
from ft_format.layout import Dims, TensorSpec
from handover.errors import CheckpointError
from models.decoder import Decoder

Shape = tuple[int, ...]


class ModelDims(GptDims):
    """Dimensions of a decoder-only model, read from a training checkpoint."""

    error = CheckpointError


DecoderDims = ModelDims | Decoder
"""Dimensions of a decoder-only model."""


class T5Dims(t5.T5Dims):
    """Dimensions of a T5, read from a training checkpoint."""

    error = CheckpointError


class LazyTensor(Protocol):
    """A source tensor that is read only when it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor, training shards joined."""

    @property
    def data_type(self) -> str:
        """fp32, fp16 or bf16; another name where it is none of them."""

    @property
    def axis(self) -> int | None:
        """Axis along which the parts follow one another; None: there is one part."""

    @property
    def unproved(self) -> tuple[str, ...]:
        """Files that hold it without a checksum of its bytes."""

    def parts(self) -> tuple[Array, ...]:
        """Map the parts, without copying; bf16 comes as uint16."""


class Computed(ABC):
    """A tensor that is computed of others where it is read, in one part."""

    @property
    def axis(self) -> int | None:
        """None: there is one part."""
        return None

    @property
    @abstractmethod
    def sources(self) -> tuple[LazyTensor, ...]:
        """The others."""

    @property
    def data_type(self) -> str:
        """fp32; or the name of a source's type that is none of a weight's."""
        return next((each.data_type for each in self.sources if each.data_type not in STORAGE), "fp32")

    @property
    def unproved(self) -> tuple[str, ...]:
        """Files that hold a source without a checksum of its bytes."""
        return tuple(dict.fromkeys(file for each in self.sources for file in each.unproved))


def rows_of(tensor: LazyTensor | None) -> int:
    """Count a tensor's rows; 0 where there is none or it has no axes, which the completeness check reports."""
    return tensor.shape[0] if tensor and tensor.shape else 0


Layout = Callable[[Array, Any], Array]
"""A rearrangement, given the array and the Dims: a view wherever numpy can, and right for one training rank's part."""

Elementwise = Callable[[Array, Any], Array]
"""A function of fp32 values, given the array and the Dims."""


@dataclass(frozen=True)
class Rule:
    """What one source tensor, or several together, become.

    Attributes:
        target: FasterTransformer's name of it.
        layout: the rearrangement of each source.
        join_axis: axis along which training's tensor parallelism cut the source; None: every rank holds all of it.
        concat_axis: axis of the target along which several sources follow one another; None: they are added.
        pair_axis: axis along which every two of them follow one another first; None: they are no pairs.
        elementwise: a function of fp32 values, applied last.
        ranks: that the source was cut for, where the dimensions of its files differ from the model's.
    """

    target: str
    layout: Layout
    join_axis: int | None = None
    concat_axis: int | None = None
    pair_axis: int | None = None
    elementwise: Elementwise | None = None
    ranks: int = 1


Sources = str | tuple[str, ...]
Rules = Rule | tuple[Rule, ...]


@dataclass(frozen=True)
class SourceMap:
    """One checkpoint format's way to a schema. ``{layer}`` in a key or target stands for a layer's number.

    Attributes:
        name: of the format, for people.
        rules: by source key, or by several keys that become one target together; several rules where one source
            becomes several targets.
        ignored: source keys (shell patterns) that are dropped on purpose, with the reason.
        copies: those of them that are dropped as copies, by the key of what they must equal.
        generated: targets that no source holds, such as tables of positions; as fp32.
        biases: whether the configuration says that there is a bias, by its target (shell patterns; the first that fits
            counts). One of which it says nothing may be missing from every layer, and not from some.
    """

    name: str
    rules: Mapping[Sources, Rules]
    ignored: Mapping[str, str]
    generated: Mapping[str, Callable[[Any], Array]] = field(default_factory=dict)
    biases: Mapping[str, bool] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        by_key = {key: sources for sources in self.rules for key in as_tuple(sources)}
        object.__setattr__(self, "_sources_of", by_key)

    def sources(self, key: str) -> tuple[Sources, int | None] | None:
        """Find the entry of ``rules`` that a key belongs to, and the key's layer number."""
        pattern, layer = split_layer(key)
        by_key: Mapping[str, Sources] = self._sources_of  # type: ignore[attr-defined]
        if pattern in by_key:
            return by_key[pattern], layer
        return (by_key[key], None) if key in by_key else None

    def targets(self, key: str) -> tuple[str, ...]:
        """Names of what a key becomes a part of, with the layer's number filled in; none without a rule."""
        found = self.sources(key)
        if found is None:
            return ()
        return tuple(rule.target.format(layer=found[1]) for rule in as_tuple(self.rules[found[0]]))

    def join_axis(self, key: str) -> int | None:
        """Axis along which training's tensor parallelism cut a key's tensor; None: it did not."""
        found = self.sources(self.copies.get(key, key))
        return None if found is None else as_tuple(self.rules[found[0]])[0].join_axis

    def has_bias(self, name: str) -> bool | None:
        """Whether the configuration says that there is a bias of a target's name; None: it says nothing."""
        return next((said for pattern, said in self.biases.items() if fnmatchcase(name, pattern)), None)

    def is_ignored(self, key: str) -> bool:
        """Whether a key is dropped on purpose."""
        return any(fnmatchcase(key, pattern) for pattern in self.ignored)

    def ignored_as(self, key: str) -> str:
        """Return the reason for which a key is dropped; empty: it is not."""
        return next((reason for pattern, reason in self.ignored.items() if fnmatchcase(key, pattern)), "")


@dataclass(frozen=True)
class Assignment:
    """One target tensor and where it comes from.

    Attributes:
        name: of the target, without ``.<rank>.bin``.
        target: its declaration.
        keys: of the source tensors; empty: generated, or zeros.
        rule: how they become the target; None: generated, or zeros.
        generate: makes the target's values in fp32; None with an empty ``keys``: zeros.
        parts: of a file that holds several tensors, each of them; ``keys`` are theirs one after another.
    """

    name: str
    target: TensorSpec
    keys: tuple[str, ...] = ()
    rule: Rule | None = None
    generate: Callable[[Any], Array] | None = None
    parts: tuple[Assignment, ...] = ()

    def for_ranks(self, tensor_para_size: int) -> Assignment:
        """Divide what every rank adds to the ranks' sum."""
        rule = self.rule
        if rule is None or not self.target.is_summed or tensor_para_size == 1:
            return self

        def share(values: Array, dims: Any) -> Array:
            whole = rule.elementwise(values, dims) if rule.elementwise else values
            result: Array = whole / np.float32(tensor_para_size)
            return result

        return replace(self, rule=replace(rule, elementwise=share))


_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


def split_layer(key: str) -> tuple[str, int | None]:
    """Split a key into its pattern and its layer number, which is its first part of digits alone.

    ``a.layers.3.b`` gives (``a.layers.{layer}.b``, 3).
    """
    found = _NUMBER.search(key)
    if found is None:
        return key, None
    return f"{key[: found.start()]}{{layer}}{key[found.end() :]}", int(found.group())


def with_layer(key: str, layer: int) -> str:
    """Replace a key's layer number."""
    pattern, _ = split_layer(key)
    return pattern.replace("{layer}", str(layer), 1)


def laid_out_shape(layout: Layout, shape: Shape, dims: Dims) -> Shape | None:
    """Run a layout on an array without memory of its own; None: it does not fit."""
    try:
        return layout(np.broadcast_to(np.zeros((), np.uint8), shape), dims).shape
    except (ValueError, IndexError):
        return None


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Make a tuple of what may stand for itself where there is one."""
    return value if isinstance(value, tuple) else (value,)
