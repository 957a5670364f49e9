"""Tokens that a ``tokenizer.json`` puts around a text.

Rules: tokenizers, ``processors/*.rs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handover.errors import CheckpointError
from models.checks import quoted

Around = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids before a text, and behind it."""


def around_of(processor: Any, where: str) -> Around:
    """Read a post-processor, or those that it is a sequence of.

    Raises:
        CheckpointError: it is damaged.
    """
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    try:
        kind = processor["type"] if processor else ""
        if kind == "Sequence":
            for part in processor["processors"]:
                more_before, more_after = around_of(part, where)
                before, after = (*more_before, *before), (*after, *more_after)
        elif kind in ("RobertaProcessing", "BertProcessing"):
            before, after = (int(processor["cls"][1]),), (int(processor["sep"][1]),)
        elif kind == "TemplateProcessing":
            before, after = _of_template(processor)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{where} has a damaged post_processor: {quoted(str(error))}", "copy the checkpoint again"
        ) from error
    return before, after


def _of_template(processor: Mapping[str, Any]) -> Around:
    """Read the template for one text: special tokens around ``$A``."""
    ids: dict[bool, list[int]] = {False: [], True: []}
    is_behind = False
    for piece in processor["single"]:
        if "Sequence" in piece:
            is_behind = True
        else:
            ids[is_behind] += map(int, processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    return tuple(ids[False]), tuple(ids[True])


def has_part(description: Any, kind: str) -> bool:
    """Whether a part of a ``tokenizer.json``, or one of those that it is a sequence of, is of a kind."""
    if not isinstance(description, Mapping):
        return False
    parts = [*(description.get("decoders") or ()), *(description.get("pretokenizers") or ())]
    return description.get("type") == kind or any(has_part(part, kind) for part in parts)
