"""The equation that a conversion must fulfil, solved: every target gets its sources, or everything amiss is listed.

consumed + ignored = keys of the source        produced + zeros = schema        shapes are equal

Zeros are biases that the model does not have: the configuration says so, or it is silent and no layer has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from math import prod
from typing import Any

from export_scripts.tensors.dtypes import Array
from export_scripts.weights.schema import (
    Assignment,
    LazyTensor,
    Rule,
    Shape,
    SourceMap,
    Sources,
    as_tuple,
    laid_out_shape,
    split_layer,
)
from export_scripts.weights.sequences import Lazily, Texts
from ft_format.layout import Dims, TensorSpec
from handover.errors import CheckpointError

Given = tuple[tuple[str, ...], Rule | None, Callable[[Any], Array] | None]
"""What a target is made from; see ``Assignment``."""
_MOST_GENERATED = 1 << 28  # numbers, in memory as fp32


def match(
    schema: Mapping[str, TensorSpec],
    source_map: SourceMap,
    dims: Dims,
    tensors: Mapping[str, LazyTensor],
    other_keys: Iterable[str] = (),
) -> Sequence[Assignment]:
    """Find every target's sources, or refuse the checkpoint.

    Args:
        schema: every target by name, layers spelled out. All must be there but biases that the model does not have.
        source_map: the table of the checkpoint's format.
        dims: the model's dimensions.
        tensors: the source.
        other_keys: keys of the source whose values are not tensors.

    Raises:
        CheckpointError: listing every key without a rule, every target without a source and every wrong shape.
    """
    problems = [f"{key}  is not a tensor and has no rule" for key in other_keys if not source_map.is_ignored(key)]
    groups: dict[tuple[Sources, int | None], dict[str, str]] = {}  # pattern -> key, of each entry and layer
    for key, tensor in tensors.items():
        if source_map.is_ignored(key):
            continue
        found = source_map.sources(key)
        if found is None:
            problems.append(f"{key}  {list(tensor.shape)}  has no rule")
        else:
            pattern = split_layer(key)[0] if found[1] is not None else key
            groups.setdefault(found, {})[pattern] = key
    assigned: dict[str, Given] = {}
    for (sources, layer), present in groups.items():
        absent = [pattern.replace("{layer}", str(layer), 1) for pattern in as_tuple(sources) if pattern not in present]
        if absent:
            problems.append(f"{', '.join(absent)}  missing beside {', '.join(present.values())}")
            continue
        keys = tuple(present[pattern] for pattern in as_tuple(sources))
        for rule in as_tuple(source_map.rules[sources]):
            name = rule.target.format(layer=layer)
            problems += _assign(assigned, (keys, rule, None), name, schema, tensors, dims)
    problems += _fill(assigned, schema, source_map, dims)
    if problems:
        raise CheckpointError(
            f"{len(problems)} differences from {source_map.name}\n  " + "\n  ".join(problems),
            "nothing is skipped: the tables in export_scripts/weights must account for every tensor",
        )
    names, columns = Texts(schema), [tuple(schema.values()), *zip(*map(assigned.__getitem__, schema), strict=True)]
    return Lazily(lambda number: Assignment(names[number], *(each[number] for each in columns)), range(len(schema)))


def _assign(
    assigned: dict[str, Given],
    made: tuple[tuple[str, ...], Rule, None],
    name: str,
    schema: Mapping[str, TensorSpec],
    tensors: Mapping[str, LazyTensor],
    dims: Dims,
) -> list[str]:
    """Assign one target; returns what is wrong with it."""
    keys, rule, _ = made
    if name not in schema:
        return [f"{_shown(keys, tensors)}  gives {name}, which this model does not have"]
    if name in assigned:
        return [f"{', '.join(keys)}  gives {name}, as {', '.join(assigned[name][0])} does"]
    assigned[name] = made
    dims = dims.for_ranks(rule.ranks)
    wanted = schema[name].full_shape(dims)
    got = _combined_shape(rule, [laid_out_shape(rule.layout, tensors[key].shape, dims) for key in keys])
    if got == wanted:
        return []
    said = f"{name} {f'as {list(got)}' if got else 'but does not fit'} instead of {list(wanted)}"
    return [f"{_shown(keys, tensors)}  gives {said}"]


def _shown(keys: Sequence[str], tensors: Mapping[str, LazyTensor]) -> str:
    return ", ".join(f"{key}  {list(tensors[key].shape)}" for key in keys)


def _combined_shape(rule: Rule, shapes: Sequence[Shape | None]) -> Shape | None:
    """Shape of several laid-out sources together; None: they do not fit."""
    if rule.pair_axis is not None:
        pairs = zip(shapes[::2], shapes[1::2], strict=True)
        shapes = [_shape_along(rule.pair_axis, pair) for pair in pairs]
    return _shape_along(rule.concat_axis, shapes)


def _shape_along(axis: int | None, shapes: Sequence[Shape | None]) -> Shape | None:
    """Shape of what follows one another along an axis, or is added up; None: they do not fit."""
    first = shapes[0]
    if first is None or len(shapes) == 1:
        return first
    if axis is None:
        return first if all(shape == first for shape in shapes) else None
    total = 0
    for shape in shapes:
        if (
            shape is None
            or len(shape) != len(first)
            or shape[:axis] + shape[axis + 1 :] != first[:axis] + first[axis + 1 :]
        ):
            return None
        total += shape[axis]
    return (*first[:axis], total, *first[axis + 1 :])


def _fill(assigned: dict[str, Given], schema: Mapping[str, TensorSpec], source_map: SourceMap, dims: Dims) -> list[str]:
    """Fill the remaining targets with what is generated, or zeros to a bias that the model does not have.

    Returns:
        What is still missing, one line each.
    """
    problems = []
    given = {split_layer(name)[0] for name in assigned}
    for name, target in schema.items():
        if name in assigned:
            continue
        pattern = split_layer(name)[0]
        generate = source_map.generated.get(name) or source_map.generated.get(pattern)
        if generate and prod(target.full_shape(dims)) > _MOST_GENERATED:
            problems.append(f"{name}  {list(target.full_shape(dims))}  is computed, and larger than any model's")
            continue
        reason = None if generate else _why_not_zeros(name, source_map, given)
        if reason is None:
            assigned[name] = ((), None, generate)
        else:
            problems.append(f"{name}  {list(target.full_shape(dims))}  has no source{reason}")
    return problems


def _why_not_zeros(name: str, source_map: SourceMap, given: Set[str]) -> str | None:
    """Return why what is missing cannot be zeros; None: it is a bias that the model does not have."""
    if ".bias" not in name:
        return ""
    said = source_map.has_bias(name)
    if said is not None:
        return ", and the configuration does not say that there is none" if said else None
    pattern, layer = split_layer(name)
    if layer is None:  # the only one of its name: the others of its kind tell whether the model has such
        others = [each for each in given if ".bias" in each and ("norm" in each) == ("norm" in name)]
        return f", and {others[0]} has one" if others else None
    return ", and other layers have one" if pattern in given else None


def zeros_made(assignments: Iterable[Assignment]) -> tuple[str, ...]:
    """List the biases that are zeros because the model has none; nothing where there are no such."""
    zeros = [each.name for each in assignments if each.rule is None and each.generate is None]
    if not zeros:
        return ()
    kinds = ", ".join(dict.fromkeys(split_layer(name)[0] for name in zeros))
    return (f"the checkpoint has no biases of these, and {len(zeros)} tensors are zeros: {kinds}",)
