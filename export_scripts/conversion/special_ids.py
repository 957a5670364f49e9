"""The ids that ``config.ini`` names, made such that no request fails by them: one rule for every format.

An id beyond the vocabulary is no reason to refuse a checkpoint: transformers and FasterTransformer load it. An end
token that the model cannot make never comes, so it stays as it is; an empty prompt that began with a token without an
embedding would fail, so another begins it. Both are said, and ``export.model.start_id`` and ``end_id`` name others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from export_scripts.checkpoints.source import Source
from export_scripts.weights.remarks import ShardRemark
from handover.errors import CheckpointError
from handover.text_ids import TextIds

_LARGEST = 2**31 - 1  # FasterTransformer's int


def with_settled_ids(source: Source, start_id: int | None = None, end_id: int | None = None) -> Source:
    """Settle start_id and end_id, and add a remark for each that is not simply the checkpoint's.

    Args:
        source: a checkpoint.
        start_id: that the user gives; None: the checkpoint's own.
        end_id: likewise.

    Raises:
        CheckpointError: a given id is beyond the vocabulary.
    """
    vocab_size = source.dims.axis_size("vocab_size")
    for key, given in (("start_id", start_id), ("end_id", end_id)):
        if given is not None and not 0 <= given < vocab_size:
            raise CheckpointError(
                f"export.model.{key} {given} is beyond the vocabulary of {vocab_size}",
                f"the ids of {source.archive.path} are 0 to {vocab_size - 1}",
            )
    end, about_end = _settled_end(source.ids.end_id if end_id is None else end_id, vocab_size)
    stand_ins = (source.ids.pad_id if source.family.name == "t5" else None, end)
    start, about_start = _settled_start(source.ids.start_id if start_id is None else start_id, stand_ins, vocab_size)
    others = tuple(each for each in source.ids.more_end_ids if end_id is None and each != end and each < vocab_size)
    about_others = (
        ShardRemark(
            f"a text ends with token {end}, and with {', '.join(map(str, others))}: FasterTransformer's end_id is one "
            "token, so that requests name the others as stop words"
        )
        if others
        else ""
    )
    ids = replace(source.ids, start_id=start, end_id=end, more_end_ids=others)
    text_ids = replace(source.tokenizer.text_ids, more_end_ids=others)
    said = tuple(filter(None, (about_end, about_start, about_others, _about_texts(text_ids))))
    tokenizer = replace(source.tokenizer, text_ids=text_ids)
    return replace(source, ids=ids, tokenizer=tokenizer, remarks=(*source.remarks, *said))


def _settled_end(end: int, vocab_size: int) -> tuple[int, str]:
    """Give the id that ends a text, and what is to be said of it; one that never comes where none is named."""
    if end < 0 or end > _LARGEST:
        return vocab_size, "no end token is named: no text ends by itself; export.model.end_id=N names one"
    if 0 <= end < vocab_size:
        return end, ""
    return end, (
        f"the end token {end} is beyond the vocabulary of {vocab_size}: no text ends by itself; "
        "export.model.end_id=N names another"
    )


def _settled_start(start: int, stand_ins: Iterable[int | None], vocab_size: int) -> tuple[int, str]:
    """Give the id that begins a text, and what is to be said of it; the first stand-in that has an embedding, or 0."""
    if 0 <= start < vocab_size:
        return start, ""
    stand_in = next((each for each in stand_ins if each is not None and 0 <= each < vocab_size), 0)
    what = "no start token is named" if start < 0 else f"the start token {start} is beyond the vocabulary"
    return stand_in, f"{what}: token {stand_in} stands in for it; export.model.start_id=N names another"


def _about_texts(text_ids: TextIds) -> str:
    """Say what the tokenizer puts around a text; empty: nothing."""
    around = [f"{list(ids)} {place}" for ids, place in ((text_ids.before, "before"), (text_ids.after, "behind")) if ids]
    return f"the tokenizer puts {' and '.join(around)} a text, and so do the models for text" if around else ""
