"""Which rows share the states of a lexer: rows that run at a time do not, and one that has reached a limit ends."""

from __future__ import annotations

import os
import queue
from pathlib import Path

import numpy as np
import pytest
from support.engines.asking import CPU
from support.tiny_models.guided_model import END, guided, guided_gpt2, texts

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.grammar import compiled, guided_row, library
from backends.fastertransformer.engine.grammar.compiled import Grammars
from backends.fastertransformer.engine.grammar.guided_row import Grammar, GuidedRow
from backends.fastertransformer.engine.grammar.masks import RowMasks, mask_bytes
from backends.fastertransformer.engine.request.guides import Guide
from backends.fastertransformer.engine.rows.answer import Answer, Failure

GUIDE = Guide("regex", "(no|yes) [0-9a-f]{2,20}")
# How many states a text makes depends on how often its letters change.
HOSTILE = "(a|b)*a(a|b){30}c"


@pytest.fixture
def grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grammars:
    monkeypatch.setattr(compiled, "most_lexers", lambda _: 4)
    return Grammars(guided_gpt2(tmp_path).checkpoint, END + 1)


def of_rows(grammars: Grammars, rows: int) -> Grammar:
    found = {each for each in grammars.compile_rows([GUIDE] * rows) if each}
    assert len(found) == 1
    return found.pop()


def masks_after(rows: list[GuidedRow], text: bytes) -> np.ndarray:
    bits = np.zeros((len(rows), mask_bytes(END + 1)), np.uint8)
    row_masks = RowMasks(rows, END + 1, bits)
    row_masks.follow([(list(text[:at]), []) for at in range(len(rows))])
    row_masks.compute()
    return bits


def test_rows_that_run_at_a_time_have_lexers_of_their_own(grammars: Grammars) -> None:
    grammar = of_rows(grammars, 3)
    rows = [grammar.begin([END]) for _ in range(3)]
    assert len({id(row.lexer) for row in rows}) == grammar.lexers == 3
    assert of_rows(grammars, 1) is grammar and grammar.lexers == 4
    rows.append(grammar.begin([END]))
    of_rows(grammars, 2)
    rows += [grammar.begin([END]) for _ in range(2)]  # more than there may be: two share
    lexers = [row.lexer for row in rows]
    assert grammar.lexers == 4 and sorted(each.rows for each in {*lexers} if each) == [1, 1, 2, 2]
    for row in rows[:4]:
        row.end()
        row.end()  # counts once
    later = [grammar.begin([END]) for _ in range(2)]
    assert {id(row.lexer) for row in later}.isdisjoint(map(id, lexers[4:]))


def test_rows_of_one_lexer_and_of_several_get_the_same_masks(grammars: Grammars) -> None:
    """Rows are handed to the library ordered by their lexers; each must find its mask in its own place."""
    grammar = of_rows(grammars, 4)
    mixed = [grammar.begin([END]) for _ in range(9)]
    assert len({id(row.lexer) for row in mixed}) == 4
    alone = [Grammars(grammars._directory, END + 1).compile(GUIDE).begin([END]) for _ in mixed]
    bits = [masks_after(rows, b"yes 12ab3") for rows in (mixed, alone)]
    np.testing.assert_array_equal(*bits)
    assert len({mask.tobytes() for mask in bits[0]}) > 3


def test_the_time_to_compile_limits_the_lexers_and_one_core_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    found = [guided_row.most_lexers(seconds) for seconds in (0.001, 0.05, 2.0)]
    assert found == [64, 6, 1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2), raising=False)
    assert guided_row.most_lexers(0.001) == 1


def test_lexers_are_kept_up_to_a_number_and_while_rows_use_them(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_MOST_LEXERS_KEPT", 6)
    first, other = of_rows(grammars, 4), Guide("regex", "a+")
    grammars.compile_rows([other] * 3)
    assert grammars.compile(GUIDE) is first
    first.forget(4)
    assert grammars.compile(other).is_used and not first.is_used
    grammars.compile_rows([other])
    assert grammars.compile(GUIDE) is not first


def test_grammars_that_have_grown_while_they_were_used_are_dropped_for_others(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_MOST_BYTES_KEPT", 64 << 20)
    first, other = of_rows(grammars, 1), Guide("regex", "a+")
    first.note(2.0)  # seconds of work
    grammars.compile_rows([other])
    assert grammars.compile(GUIDE) is first  # which a row still follows
    first.forget(1)
    grammars.compile_rows([other])
    assert grammars.find_rows([GUIDE]) is None


def answers_of(engine: Engine, requests: list[dict[str, np.ndarray]]) -> list[Answer]:
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    for request in requests:
        engine.submit(engine.parse(request), answers.put)
    return [answers.get(timeout=180) for _ in requests]


def test_requests_that_have_ended_in_whatever_way_leave_their_lexers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "most_lexers", lambda _: 64)
    engine = open_engine(guided_gpt2(tmp_path, max_queue_length=2), CPU)
    request = guided(["regex", "regex"], [GUIDE.text] * 2, 8)
    codes: set[str] = set()
    for _ in range(3):
        codes |= {getattr(each, "code", "") for each in answers_of(engine, [request] * 4)}
    assert "UNAVAILABLE" in codes and "" in codes
    assert engine._grammars.compile(GUIDE).lexers <= 2 * 4
    assert not engine._grammars.compile(GUIDE).is_used
    engine.close()


def test_a_limit_that_one_row_has_reached_fails_no_later_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "MOST_STATES", 90)
    engine = open_engine(guided_gpt2(tmp_path), CPU)
    failed = False
    for seed in range(12):
        tensors = guided(["regex"], [HOSTILE], 300, seed=seed)
        (found,) = answers_of(engine, [tensors])
        said = b"" if isinstance(found, Failure) else texts(found.tensors)[0]
        if failed and said:
            break
        failed = failed or "too many states" in getattr(found, "problem", "")
    else:
        pytest.fail("no row was generated after one that had reached the limit")
    engine.close()
