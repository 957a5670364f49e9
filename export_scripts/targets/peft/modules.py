"""Which of transformers' linear layers an adapter changes, and which rows of its matrices are theirs.

The tables of weights say where every number of a training's weight comes to lie in transformers' tensors. Here they
rearrange the numbers of rows and columns instead of weights, so that there is no second table for adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from export_scripts.checkpoints.lora.on_hub import Arranged, arranged, on_hub_names
from export_scripts.checkpoints.lora.update import MergedTensor, Update
from export_scripts.checkpoints.source import Source
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.hub_tensor import HubTensor
from export_scripts.weights.schema import Assignment, Rule, as_tuple
from models.decoder import Decoder
from models.peft import name_in_class

_WEIGHT = ".weight"
_OF_MATRIX = 2  # axes


@dataclass(frozen=True)
class Module:
    """A linear layer that an adapter changes.

    Attributes:
        name: that transformers' class gives it.
        update: of the training's weight, which may hold other layers' too.
        part: number of the layer among them.
        rows, columns: of the update, in the order of the layer's.
        is_transposed: transformers keeps the weight as [in, out].
    """

    name: str
    update: Update
    part: int
    rows: Array
    columns: Array
    is_transposed: bool

    @property
    def rank(self) -> int:
        """Rank of the layer's own product."""
        ranks = {tensor.shape[0] for tensor in self.update.factors[::2]}
        return ranks.pop()

    def matrices(self, rank: int, scale: float) -> tuple[Array, Array]:
        """Read PEFT's lora_A [rank, in] and lora_B [out, rank], fp32.

        Args:
            rank: of the directory, not below the layer's own: the rest is zeros.
            scale: of the directory, by which the product is multiplied.
        """
        left, right = self.update.read()
        own = self.update.columns(self.part, right.shape[0])
        assert own is not None, f"{self.name} has matrices"
        down, up, more = right[own][:, self.columns], left[self.rows][:, own], rank - self.rank
        if scale != self.update.scale:
            up = up * np.float32(self.update.scale / scale)
        return np.pad(down, ((0, more), (0, 0))), np.pad(up, ((0, 0), (0, more)))


def modules_of(
    source: Source, assignments: Sequence[Assignment], tensors: Mapping[str, HubTensor]
) -> tuple[tuple[Module, ...], list[str]]:
    """Find the layers that the adapter in a model changes.

    Returns:
        The layers; and what PEFT cannot say, one line each.

    Raises:
        CheckpointError: sections of a weight are no part of one of transformers'.
    """
    by_pivot: dict[str, list[str]] = {}
    for name, taken in tensors.items():
        by_pivot.setdefault(taken.pivot or name, []).append(name)
    by_name = {assignment.name: assignment for assignment in assignments}
    modules, problems, sections = [], [], list[Update]()
    own = source.dims.tensors() if isinstance(source.dims, Decoder) else {}
    for key, tensor in source.tensors.items():
        if not isinstance(tensor, MergedTensor):
            continue
        sources = source.source_map.sources(key)
        assert sources is not None, f"{key} is matched"
        rules = as_tuple(source.source_map.rules[sources[0]])
        whole = own.get(rules[0].target.format(layer=sources[1]))
        if isinstance(sources[0], tuple) and whole and len(whole.shape) == _OF_MATRIX:  # experts' is an array of them
            sections.append(tensor.update)
            continue
        found = list(_of_weight(key, tensor.update, rules, sources, source, by_name, by_pivot, tensors))
        modules += [each for each in found if isinstance(each, Module)]
        problems += [each for each in found if isinstance(each, str)]
    for update in on_hub_names(sections, source.dims, str(source.archive.path)) if sections else ():
        rows, columns = map(np.arange, update.shape)
        modules.append(Module(name_in_class(update.names[0].removesuffix(_WEIGHT)), update, 0, rows, columns, False))
    return tuple(modules), problems


def _of_weight(
    key: str,
    update: Update,
    rules: Sequence[Rule],
    sources: tuple[object, int | None],
    source: Source,
    by_name: Mapping[str, Assignment],
    by_pivot: Mapping[str, Sequence[str]],
    tensors: Mapping[str, HubTensor],
) -> Iterator[Module | str]:
    """Find the layers in one weight, or say what is in the way."""
    if update.apart and len(rules) == 1:
        yield f"{key}  is one matrix of transformers', and the adapter has several pairs of matrices for its parts"
        return
    for part, rule in enumerate(rules):
        if update.apart and part not in update.apart:
            continue
        pivot = rule.target.format(layer=sources[1])
        spec = by_name[pivot].target
        names = by_pivot.get(pivot, ())
        is_cut = "vocab_size" in spec.shape and source.own is None
        if is_cut:
            yield f"{key}  is cut to the tokenizer's size, and PEFT's matrices are not"
        elif len(by_name[pivot].keys) > 1 or rule.elementwise or not names:
            yield f"{key}  is computed into transformers' weights"
        for name in () if is_cut else names:
            yield _module(name, key, update, part, rule, tensors[name], source)


def _module(
    name: str, key: str, update: Update, part: int, rule: Rule, taken: HubTensor, source: Source
) -> Module | str:
    if taken.elementwise or taken.rows_before or taken.is_zeros or not name.endswith(_WEIGHT):
        return f"{key}  is computed into transformers' {name}"
    shape = update.shape
    rows = _arranged(np.broadcast_to(np.arange(shape[0])[:, None], shape), rule, taken, source)
    columns = _arranged(np.broadcast_to(np.arange(shape[1])[None], shape), rule, taken, source)
    is_transposed = len(rows.down) > 1 and bool((rows.down == rows.down[0]).all())
    of_rows, of_columns = (rows.across, columns.down) if is_transposed else (rows.down, columns.across)
    if not rows.is_straight or not columns.is_straight:
        return f"{key}  is not rows and columns of transformers' {name}"
    return Module(name_in_class(name.removesuffix(_WEIGHT)), update, part, of_rows, of_columns, is_transposed)


def _arranged(numbers: Array, rule: Rule, taken: HubTensor, source: Source) -> Arranged:
    """Rearrange numbers as a weight."""
    view = rule.layout(numbers, source.dims)
    if taken.part:
        axis, start, stop = taken.part
        view = np.moveaxis(np.moveaxis(view, axis, 0)[start:stop], 0, axis)
    view = view.transpose(taken.order) if taken.order else view
    return arranged(view, taken.merged[0] if taken.merged else 1)
