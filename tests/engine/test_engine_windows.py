"""Models whose every layer has a window: the cache keeps what is seen, and tokens are transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, ask, generated
from support.engines.few_pages import Served, spoiled
from support.engines.paged_steps import paged_steps
from support.shards.llama_shards import served_of
from support.tiny_models.greedy import NEVER, argmaxes, greedy
from support.tiny_models.llama_models import VOCAB

from backends.fastertransformer.engine.cache.page_allocator import PageAllocator
from backends.fastertransformer.engine.cache.prefix_index import PAGE
from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.rows.answer import Failure
from backends.fastertransformer.engine.settings import Settings

WINDOW, POSITIONS = 40, 512
MOST = 5  # pages of a row at once: 72 tokens may begin anywhere in a page, and one page to grow
Opened = tuple[Any, Settings]


def opened_of(name: str, folder: Path, ranks: int = 1) -> Opened:
    sizes = {"sliding_window": WINDOW, "max_position_embeddings": POSITIONS}
    root, model = served_of(name, folder, ranks, **sizes)
    return model, Settings(root, ranks, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22)


@pytest.fixture(scope="module", params=["mistral", "starcoder2"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return opened_of(request.param, tmp_path_factory.mktemp(request.param))


def prompt(length: int, seed: int = 3) -> list[int]:
    line: list[int] = np.random.default_rng(seed).integers(3, VOCAB, length).tolist()
    return line


# Neither, and both.
@pytest.mark.in_ci(when=lambda at: at.steps_ahead == at.keeps_prefixes)
@pytest.mark.parametrize("keeps_prefixes", [False, True])
@pytest.mark.parametrize("steps_ahead", [False, True])
def test_a_row_of_many_windows_takes_the_pages_of_one(opened: Opened, steps_ahead: bool, keeps_prefixes: bool) -> None:
    model, settings = opened
    steps = paged_steps(settings, MOST)
    steps.cache.allocator.keeps_prefixes = keeps_prefixes
    served = Served(steps, steps_ahead=steps_ahead)
    with spoiled(steps):
        for length in (200, 64, 33):
            line = prompt(length)
            found = served.say(ask([line], 160, end_id=NEVER))
            assert len(found) == 160 and found == argmaxes(model, line, found)
            assert served.allocator.free == MOST and not steps.cache.page_tables.any()
    assert 3 <= served.most_used <= MOST


def test_what_a_window_needs_is_what_is_refused(opened: Opened) -> None:
    """One page fewer than a row may have at once; a row that ends before it has as many is answered."""
    model, settings = opened
    served, line = Served(paged_steps(settings, MOST - 1)), prompt(200)
    token_bytes = served.steps.cache.shape.token_bytes
    (answer,) = served.submit(ask([line], 160, end_id=NEVER))
    needed, there = MOST * PAGE * token_bytes, (MOST - 1) * PAGE * token_bytes
    assert f"needs {needed} bytes of KV cache: 1 x {MOST * PAGE} tokens of" in str(answer.problem)
    assert f"there are {there}" in str(answer.problem)
    found = served.say(ask([line[:90]], 38, end_id=NEVER))
    assert len(found) == 38 and found == argmaxes(model, line[:90], found)


def test_rows_come_go_and_are_set_back(opened: Opened) -> None:
    model, settings = opened
    served, rows = Served(paged_steps(settings, 2 * MOST), steps_ahead=True), []
    with spoiled(served.steps):
        for seed, (length, count) in enumerate([(10, 150), (200, 60), (100, 90), (3, 100), (64, 70), (150, 5)]):
            line = prompt(length, seed % 3)
            rows.append((line, count, served.submit(ask([line], count, end_id=NEVER))))
            for _ in range(5 * seed):
                served.scheduler.step()
        served.run()
    for line, count, answers in rows:
        assert not isinstance(answers[-1], Failure), answers[-1]
        found = generated(answers[-1].tensors)
        assert len(found) == count and found == argmaxes(model, line, found)
    assert served.most_used > MOST and served.allocator.free == 2 * MOST


def test_beams_slide_together(opened: Opened) -> None:
    model, settings = opened
    line = prompt(70)
    expected = model.generate(
        torch.tensor([line]), max_new_tokens=60, num_beams=3, do_sample=False, eos_token_id=NEVER, pad_token_id=0
    )[0, 70:].tolist()
    served = Served(paged_steps(settings, 3 * MOST))
    with spoiled(served.steps):
        assert served.say(ask([line], 60, end_id=NEVER, beam_width=3)) == expected
    assert served.allocator.free == 3 * MOST


def test_pages_that_were_given_back_are_found_again(opened: Opened) -> None:
    """The pages of a prompt that a row has outgrown, and those of its end, whose beginning has no page any more."""
    model, settings = opened
    served, line = Served(paged_steps(settings, 40)), prompt(70)
    served.allocator.prefixes._most_unused = 40
    with spoiled(served.steps):
        first = served.say(ask([line], 120, end_id=NEVER))
        assert first == argmaxes(model, line, first) and served.allocator.prefixes.found == 0
        assert served.say(ask([line], 120, end_id=NEVER)) == first
        assert served.allocator.prefixes.found == 64
        line = [*line, *first, *prompt(7, seed=8)]  # the next turn
        found = served.say(ask([line], 30, end_id=NEVER))
        assert found == argmaxes(model, line, found)
        assert served.allocator.prefixes.found == 64 + 160 + (189 - 160) // PAGE * PAGE
        long = prompt(300, seed=9)  # its beginning is never in a page
        for known in (0, 288):
            before = served.allocator.prefixes.found
            found = served.say(ask([long], 9, end_id=NEVER))
            assert found == argmaxes(model, long, found)
            assert served.allocator.prefixes.found == before + known
    assert served.allocator.free == 40


def test_what_needs_more_pages_than_there_are_is_run_from_its_beginning(opened: Opened) -> None:
    """To go on from 64 known tokens with 200 new ones takes pages for these, and a new row's are fewer."""
    model, settings = opened
    served, line = Served(paged_steps(settings, MOST)), prompt(264)
    served.allocator.prefixes._most_unused = MOST
    served.say(ask([line[:70]], 2, end_id=NEVER))
    found = served.say(ask([line], 9, end_id=NEVER))
    assert found == argmaxes(model, line, found)
    assert served.allocator.free == MOST


def test_a_conversation_goes_on_behind_its_window(opened: Opened) -> None:
    model, settings = opened
    served, line = Served(paged_steps(settings, 12), steps_ahead=True), list[int]()
    with spoiled(served.steps):
        for turn, (new, count) in enumerate([(50, 60), (3, 33), (90, 64), (1, 40)]):
            line += prompt(new, seed=turn)
            expected = greedy(model, line, count)[len(line) :] if turn == 1 else []
            end = expected[-1] if expected else NEVER  # which the next turn overwrites
            tensors = ask([line[-new:]], count, end_id=end) | {"START": np.array([int(turn == 0)], np.int32)}
            found = served.say(tensors, session="talk")
            assert found == argmaxes(model, line, found) and (found[-1] == end or len(found) == count)
            line += found[:-1] if found[-1] == end else found
            assert served.scheduler.sessions.saved_pages == 12 - served.allocator.free <= MOST
        served.scheduler.sessions.end("talk")
    assert served.allocator.free == 12


def test_a_table_lists_what_is_kept_and_nothing_else() -> None:
    """For every length: what the next token sees is kept, and a page more, and no row has more than is counted."""
    allocator = PageAllocator(20, window=WINDOW)
    for entries in range(1, 200):
        row = allocator.take(entries, most=400, unneeded=allocator.pages_before_window(entries))
        row.slot = 3
        for position in range(entries, min(entries + 40, 220)):
            assert allocator.grow(row, position + 1, allocator.pages_before_window(position))
            kept = [place for place, page in enumerate(row.pages) if page]
            assert kept == list(range(kept[0], position // PAGE + 1)) and len(kept) <= allocator.most_kept == MOST
            assert kept[0] * PAGE <= max(0, position - WINDOW + 1 - PAGE) < (kept[0] + 1) * PAGE
        listed = allocator.take_changes()
        if listed is not None:
            assert all(page == ([*row.pages, *row.held][column]) for _, column, page in listed.T.tolist())
        allocator.release([row])
        assert allocator.free == 20


def test_a_page_with_bad_numbers_is_cleared_when_the_last_row_gives_it_back() -> None:
    allocator = PageAllocator(20, most_unused=10, window=WINDOW)
    ids = np.arange(64)
    first = allocator.take(64)
    allocator.prefixes.add(first.pages, ids)
    second = allocator.take(70, shared=allocator.prefixes.find(ids))
    assert allocator.prefixes.forget(first.pages, is_dirty=True) == [1, 2]
    allocator.release([first])
    assert allocator.take_dirty() == []
    assert allocator.grow(second, 150, allocator.pages_before_window(149)) and second.pages[:2] == [0, 0]
    assert sorted(allocator.take_dirty()) == [1, 2] and allocator.take_dirty() == []


def test_layers_without_a_window_keep_all(tmp_path: Path) -> None:
    """Every second layer of Gemma 2 has a window: pages are of all layers."""
    model, settings = opened_of("gemma2", tmp_path)
    assert read_config(settings.checkpoint, "Llama").reach == 0
    served, line = Served(paged_steps(settings, 8)), prompt(150)
    found = served.say(ask([line], 100, end_id=NEVER))
    assert found == argmaxes(model, line, found)
    assert served.most_used == 8


def test_ranks_slide_alike(tmp_path: Path) -> None:
    model, settings = opened_of("mistral", tmp_path, 2)
    token_bytes = 2 * 2 * 2 * 16 * 4  # layers, k and v, a rank's heads, size
    cache = {"has_process_per_rank": True, "kv_cache_bytes": (11 + 1) * PAGE * token_bytes}
    engine = open_engine(replace(settings, **cache), CPU)
    lines, counts = [prompt(100), prompt(9, 1), prompt(60, 2), prompt(100)], [60, 150, 5, 70]
    (outputs,) = engine.generate([engine.parse(ask(lines, counts, end_id=NEVER))])
    allocator = engine._steps.cache.allocator
    assert allocator.count == allocator.free == 11
    engine.close()
    for row, (line, count) in enumerate(zip(lines, counts, strict=True)):
        found = generated(outputs, row)
        assert len(found) == count and found == argmaxes(model, line, found)
