"""A request as the scheduler meets it: whether it can ever fit, its client, and what others get back at its end."""

from __future__ import annotations

import logging
from collections import Counter

from ..cache.kv_cache import KvCache
from ..errors import RequestError
from ..rows.answer import Answer
from ..rows.sequence import Job, Sequence

_log = logging.getLogger(__name__)


def check_need(sequence: Sequence, cache: KvCache) -> None:
    """Refuse a row that would not fit if it were alone.

    Raises:
        RequestError: the cache has too few bytes, or states for too few rows.
    """
    entries, source = sequence.reservation.most_entries, sequence.source_length
    if (need := cache.bytes_of([(sequence.width, entries, source)])) > cache.budget_bytes:
        tokens = entries + source
        raise RequestError(
            f"row {sequence.row} needs {need} bytes of KV cache: {sequence.width} x {tokens} tokens of"
            f" {cache.shape.token_bytes} bytes; there are {cache.budget_bytes} (see kv_cache_bytes)"
        )
    if sequence.width > cache.allocator.most_rows:
        raise RequestError(
            f"row {sequence.row} has {sequence.width} beams, each with a state; there are"
            f" {cache.allocator.most_rows} (see kv_cache_bytes)"
        )


def end_grammars(job: Job) -> None:
    """Leave the lexers of a request's grammars to other requests; see Grammar.expect."""
    for sequence in job.sequences:
        if sequence.guided:
            sequence.guided.end()
    for grammar, rows in Counter(filter(None, job.grammars)).items():
        grammar.forget(rows)
    job.grammars = ()


def note_adapters(job: Job, more: int) -> None:
    """Count the rows of a request that comes, or is answered, by adapter.

    Raises:
        RequestError: an adapter was unloaded since the request was read.
    """
    adapters = [each.adapter for each in job.sequences if each.adapter]
    for adapter in adapters:
        adapter.note_rows(more)
    if more > 0 and (gone := [each.name for each in adapters if not each.is_known]):
        raise RequestError(f"the adapter '{gone[0]}' was unloaded")


def is_cancelled(job: Job) -> bool:
    """Whether its client has gone; one that cannot be asked has."""
    try:
        return job.is_cancelled is not None and job.is_cancelled()
    except Exception:
        _log.exception("is_cancelled failed")
        return True


def send(job: Job, answer: Answer) -> bool:
    """Pass an answer to the request's callback; false if the callback failed."""
    try:
        job.answer(answer)
    except Exception:
        _log.exception("the response callback raised")
        return False
    return True
