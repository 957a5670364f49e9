"""A training's LoRA adapter on a Hugging Face directory: what it adds to fused weights, by transformers' tensors.

The table of the training's weights says where every number of one lies in transformers' tensors. Here it rearranges
the numbers of rows and columns instead of weights, so that there is no second table for adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from export_scripts.checkpoints.lora.update import Update
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.megatron_decoder import table
from export_scripts.weights.schema import Rule, SourceMap, Sources, as_tuple, split_layer
from handover.errors import CheckpointError
from models.decoder import Decoder
from models.tensor import Tensor

_PLACE = re.compile(r"(?:.+\.)?((?:decoder|language_model\.encoder|language_model\.transformer|mtp)\.layers\..+)")

_OF_MATRIX = 2  # axes


@dataclass(frozen=True)
class Arranged:
    """Numbers of rows or of columns where a weight's are in transformers' tensor.

    Attributes:
        down, across: its first column, and its first row.
        is_straight: its last column and row are the same ones.
    """

    down: Array
    across: Array
    is_straight: bool


def arranged(view: Array, outer: int) -> Arranged:
    """Read numbers that were laid out as a weight, whose first ``outer`` axes are rows."""
    every: tuple[slice, ...] = (slice(None),) * outer
    inner = view.ndim - outer
    down, last_down = (view[every + (place,) * inner].reshape(-1) for place in (0, -1))
    across, last_across = (view[(place,) * outer].reshape(-1) for place in (0, -1))
    varies_down = np.array_equal(down, last_down) and bool((across == across[0]).all())
    varies_across = np.array_equal(across, last_across) and bool((down == down[0]).all())
    return Arranged(down, across, varies_down or varies_across)


def on_hub_names(updates: Iterable[Update], dims: object, where: str) -> tuple[Update, ...]:
    """Describe what a training's adapter adds by transformers' tensors.

    Raises:
        CheckpointError: the model is no decoder of models/, or has a weight in another form than single matrices.
    """
    if not isinstance(dims, Decoder):
        raise CheckpointError(
            f"{where} is an adapter of Megatron's on a Hugging Face directory of another model than Llama's relatives",
            "give the model as the training saved it",
        )
    made, tables, tensors = list[Update | str](), dict[bool, SourceMap](), dims.tensors()
    sections = dict[tuple[tuple[str, ...], int | None], dict[int, Update]]()
    for update in updates:
        places = [found[1] for name in update.names if (found := _PLACE.fullmatch(name))]
        is_legacy = any(place.startswith("language_model.") for place in places)
        if is_legacy not in tables:
            tables[is_legacy] = table("", places, dims)
        rules_of = tables[is_legacy]
        place = next(filter(rules_of.sources, places), "")
        entry = rules_of.sources(place)
        if entry and isinstance(entry[0], tuple):
            number = entry[0].index(place if place in entry[0] else split_layer(place)[0])
            sections.setdefault((entry[0], entry[1]), {})[number] = update
        else:
            made += _of_update(update, entry, rules_of, dims, tensors)
    for (keys, layer), parts in sections.items():
        rule = next(as_tuple(each.rules[keys])[0] for each in tables.values() if keys in each.rules)
        made.append(_of_sections(parts, len(keys), rule, rule.target.format(layer=layer), dims, tensors))
    changed = tuple(each for each in made if isinstance(each, Update))
    if problems := [each for each in made if isinstance(each, str)]:
        raise CheckpointError(
            f"{where} does not fit a Hugging Face directory\n  " + "\n  ".join(problems),
            "give the model as the training saved it",
        )
    return changed


def _of_sections(
    parts: Mapping[int, Update], count: int, rule: Rule, name: str, dims: Decoder, tensors: Mapping[str, Tensor]
) -> Update | str:
    """Return what is added to a tensor of which a training has ``count`` sections, or what is in the way.

    Args:
        parts: what is added to each section, by its place among them; all share their right factor.
        count: of sections.
        rule: of all.
        name: of the tensor.
        dims: of the model.
        tensors: the model's.
    """
    updates, tensor = [parts[number] for number in sorted(parts)], tensors.get(name)
    keys = ", ".join(key for update in updates for key in update.keys)
    if tensor is None or len(tensor.shape) != _OF_MATRIX or len({id(update.factors[0]) for update in updates}) > 1:
        return f"{keys}  the model has it in one array with others"
    if len(parts) < count or rule.elementwise or rule.concat_axis is None:
        return f"{keys}  is not all of {name}"
    ends = np.cumsum([update.shape[0] for update in updates])
    first, outer = ends - [update.shape[0] for update in updates], len(as_tuple(tensor.axes[0]))
    try:
        shown = [
            rule.layout(np.broadcast_to(start + np.arange(rows)[:, None], (rows, columns)), dims)[..., [0, -1]]
            for start, (rows, columns) in zip(first, (update.shape for update in updates), strict=True)
        ]
        by_row = arranged(np.concatenate(shown, rule.concat_axis), outer)
    except ValueError:
        return f"{keys}  does not fit {name}"
    if not by_row.is_straight or (size := (len(by_row.down), updates[0].shape[1])) != tensor.shape:
        return f"{keys}  is not rows of {name}"

    def read() -> tuple[Array, Array]:
        sides = [update.read() for update in updates]
        return np.concatenate([left for left, _ in sides])[by_row.down], sides[0][1]

    factors = tuple(factor for update in updates for factor in update.factors)
    used = tuple(dict.fromkeys(key for update in updates for key in update.keys))
    return replace(updates[0], names=(name,), shape=size, read=read, factors=factors, keys=used)


def _of_update(
    update: Update,
    found: tuple[Sources, int | None] | None,
    rules_of: SourceMap,
    dims: Decoder,
    tensors: Mapping[str, Tensor],
) -> Iterator[Update | str]:
    """Yield what is added to each of transformers' tensors in a weight, or what is in the way."""
    if found is None:
        yield f"{', '.join(update.keys)}  the model has no such weight"
        return
    rules = as_tuple(rules_of.rules[found[0]])
    for part, rule in enumerate(rules):
        name = rule.target.format(layer=found[1])
        if update.apart and len(rules) > 1 and part not in update.apart:
            continue
        yield _of_tensor(update, part if len(rules) > 1 else None, rule, name, tensors.get(name), dims)


def _of_tensor(
    update: Update, part: int | None, rule: Rule, name: str, tensor: Tensor | None, dims: Decoder
) -> Update | str:
    """Return what is added to one tensor, which is a part of the training's weight; None: it is all of it."""
    if tensor is None or rule.elementwise:
        return f"{', '.join(update.keys)}  is not rows and columns of a {name} of the model"
    shape, outer = update.shape, len(as_tuple(tensor.axes[0]))
    try:
        by_row = arranged(rule.layout(np.broadcast_to(np.arange(shape[0])[:, None], shape), dims), outer)
        by_column = arranged(rule.layout(np.broadcast_to(np.arange(shape[1])[None], shape), dims), outer)
    except ValueError:
        return f"{', '.join(update.keys)}  {list(shape)}  does not fit {name}"
    rows, columns = by_row.down, by_column.across
    if not (by_row.is_straight and by_column.is_straight):
        return f"{', '.join(update.keys)}  is not rows and columns of {name}"

    def read() -> tuple[Array, Array]:
        left, right = update.read()
        own = slice(None) if part is None else update.columns(part, right.shape[0])
        assert own is not None, f"{name} has matrices"
        return left[rows][:, own], right[own][:, columns]

    apart = update.apart if part is None else ()
    size = (len(rows), len(columns))
    return replace(update, names=(name,), shape=size, read=read, is_gated=False, apart=apart)
