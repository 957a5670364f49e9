"""The ids that ``config.ini`` names, made such that no request fails by them: one rule for every format.

An id beyond the vocabulary is no reason to refuse a checkpoint: transformers and FasterTransformer load it. What
becomes of it, ``models.directory.SpecialIds`` decides; it is said, and ``export.model.start_id`` and ``end_id`` name
others.
"""

from __future__ import annotations

from dataclasses import replace

from export_scripts.checkpoints.source import Source
from export_scripts.weights.remarks import ShardRemark
from handover.errors import CheckpointError
from handover.text_ids import TextIds
from models.directory import LARGEST_ID


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
    named = source.ids if end_id is None else replace(source.ids, end_id=end_id, more_end_ids=())
    named = named if start_id is None else replace(named, start_id=start_id)
    ids = named.settled(vocab_size, source.ids.pad_id if source.family.is_encoder_decoder else None)
    end, others = ids.end_id, ids.more_end_ids
    about_end = _about_end(named.end_id, vocab_size)
    about_start = _about_start(named.start_id, ids.start_id, vocab_size)
    about_others = (
        ShardRemark(
            f"a text ends with token {end}, and with {', '.join(map(str, others))}: FasterTransformer's end_id is one "
            "token, so that requests name the others as stop words"
        )
        if others
        else ""
    )
    text_ids = replace(source.tokenizer.text_ids, more_end_ids=others)
    said = tuple(filter(None, (about_end, about_start, about_others, _about_texts(text_ids))))
    tokenizer = replace(source.tokenizer, text_ids=text_ids)
    return replace(source, ids=ids, tokenizer=tokenizer, remarks=(*source.remarks, *said))


def _about_end(end: int, vocab_size: int) -> str:
    """Return why no text ends by itself; empty: texts do."""
    if 0 <= end < vocab_size:
        return ""
    if not 0 <= end <= LARGEST_ID:
        return "no end token is named: no text ends by itself; export.model.end_id=N names one"
    return (
        f"the end token {end} is beyond the vocabulary of {vocab_size}: no text ends by itself; "
        "export.model.end_id=N names another"
    )


def _about_start(start: int, stand_in: int, vocab_size: int) -> str:
    """Return what stands in for a start token without an embedding; empty: it has one."""
    if 0 <= start < vocab_size:
        return ""
    what = "no start token is named" if start < 0 else f"the start token {start} is beyond the vocabulary"
    return f"{what}: token {stand_in} stands in for it; export.model.start_id=N names another"


def _about_texts(text_ids: TextIds) -> str:
    """Return what the tokenizer puts around a text; empty: nothing."""
    around = [f"{list(ids)} {place}" for ids, place in ((text_ids.before, "before"), (text_ids.after, "behind")) if ids]
    return f"the tokenizer puts {' and '.join(around)} a text, and so do the models for text" if around else ""
