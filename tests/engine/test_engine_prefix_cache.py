"""The prefix cache: what rows share is computed once, and changes no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, Tensors, ask, generated, prompts
from support.engines.paged_steps import paged_steps
from support.engines.remembering_network import RememberingNetwork, remembering_steps
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from support.shards.prefix_prompts import FAMILIES, PREFIXES, greedy, write
from support.tiny_models.huggingface_models import VOCAB

from backends.fastertransformer.engine.cache.page_allocator import PageAllocator
from backends.fastertransformer.engine.cache.prefix_index import PAGE, PageKey
from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.loading import load_steps
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps

NEVER = 4000


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    shards = write_shards(random_gpt2(n_positions=256), tmp_path_factory.mktemp("gpt2"))
    return Settings(shards, 1, 1, "fp32", cpu_threads=1)


class Served:
    """A scheduler, and the tokens that its network ran as contexts."""

    def __init__(self, steps: Steps, **ways: Any) -> None:
        self.steps, self.scheduler = steps, Scheduler(steps, 32, **ways)
        self.allocator = steps.cache.allocator

    def submit(self, tensors: Tensors) -> list[Answer]:
        answers: list[Answer] = []
        self.scheduler.add(Job(parse_request(tensors, self.steps.config), answers.append))
        return answers

    def run(self) -> None:
        while not self.scheduler.is_idle:
            self.scheduler.step()

    def say(self, tensors: Tensors) -> Tensors:
        answers = self.submit(tensors)
        self.run()
        assert not isinstance(answers[-1], Failure), answers[-1]
        return answers[-1].tensors

    @property
    def found(self) -> int:
        return self.allocator.prefixes.found


def remembering(settings: Settings, pages: int = 100, **ways: Any) -> Served:
    return Served(remembering_steps(read_config(settings.checkpoint, "GPT"), pages), **ways)


def extended(served: Served) -> int:
    network = served.steps.network
    assert isinstance(network, RememberingNetwork)
    return network.extended


def without(settings: Settings) -> Served:
    served = remembering(settings)
    served.allocator.keeps_prefixes = False
    return served


def test_a_prompt_that_was_seen_is_run_but_for_its_last_page(settings: Settings) -> None:
    served = remembering(settings)
    (line,) = prompts(100)
    first = served.say(ask([line], 9, end_id=NEVER))
    assert extended(served) == 100 and served.found == 0
    second = served.say(ask([line], 9, end_id=NEVER))
    assert extended(served) == 100 + 4 and served.found == 96
    assert generated(first) == generated(second) == generated(without(settings).say(ask([line], 9, end_id=NEVER)))
    served.say(ask([line[:64]], 3, end_id=NEVER))  # the last token is always run: here with all of its page
    assert extended(served) == 104 + 32 and served.allocator.free == 100


def test_a_conversation_finds_what_was_answered(settings: Settings) -> None:
    served, line = remembering(settings), prompts(50)[0]
    for turn in range(3):
        answer = served.say(ask([line], 30, end_id=NEVER))
        assert generated(answer) == generated(without(settings).say(ask([line], 30, end_id=NEVER)))
        before = extended(served)
        line = [*line, *generated(answer), *prompts(10, seed=turn)[0]]
    assert served.found == 64 + 96 and before == 50 + (90 - 64) + (130 - 96)


def test_rows_that_come_together_share_what_the_first_computes(settings: Settings) -> None:
    head = prompts(70)[0]
    rows = [head + prompts(5, seed=seed)[0] for seed in range(6)]
    served = remembering(settings)
    together = served.say(ask(rows, 8, end_id=NEVER))
    assert extended(served) == 75 + 5 * (75 - 64)
    for row, line in enumerate(rows):
        assert generated(together, row) == generated(without(settings).say(ask([line], 8, end_id=NEVER)))


def test_pages_unused_for_longest_are_forgotten_first(settings: Settings) -> None:
    served = remembering(settings, pages=7)
    served.allocator.prefixes._most_unused = 7
    first, second, third = ([seed] + prompts(95, seed=seed)[0] for seed in range(3))
    for line in (first, second, first, third):  # three pages each, and a place for what is generated
        served.say(ask([line], 1, end_id=NEVER))
    assert served.found == 64
    served.say(ask([first], 1, end_id=NEVER))
    assert served.found == 128
    served.say(ask([second], 1, end_id=NEVER))
    assert served.found == 128 + 32 and served.allocator.free == 7


def test_equal_hashes_are_not_taken_for_equal_tokens(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageKey, "__hash__", lambda _: 1)
    assert hash(PageKey(0, b"a")) == hash(PageKey(3, b"b"))
    served = remembering(settings, pages=30)
    lines = [prompts(50, seed=seed % 3)[0] + prompts(40, seed=10 + seed % 4)[0] for seed in range(12)]
    for line in lines:
        assert generated(served.say(ask([line], 40, end_id=NEVER))) == generated(
            without(settings).say(ask([line], 40, end_id=NEVER))
        )
    assert served.found > 0


def test_a_page_of_a_failed_step_is_not_found(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    served, line = remembering(settings), prompts(90)[0]
    expected = generated(without(settings).say(ask([line], 9, end_id=NEVER)))
    with monkeypatch.context() as patch:
        patch.setattr(served.steps.network, "extend", lambda *_: 1 / 0)
        answers = served.submit(ask([line, line], 9, end_id=NEVER))
        served.run()
        assert "division" in str(answers[0].problem)
    before = extended(served)
    assert generated(served.say(ask([line], 9, end_id=NEVER))) == expected
    assert extended(served) == before + 90 and served.allocator.free == 100


def test_numbers_that_overflow_stay_with_those_who_have_them(settings: Settings) -> None:
    """A page with NaN is cleared once no row uses it, and no later row finds it."""
    served = remembering(settings)
    extend = served.steps.network.extend

    def spoil(rows: Any, cache: Any, *rest: Any) -> torch.Tensor:
        hidden = extend(rows, cache, *rest)
        if (rows.ids == 77).any():
            hidden[-1] = float("nan")
            cache.kv[0][:, cache.page_tables[rows.slots[-1], 0]] = float("nan")
        return hidden

    served.steps.network.extend = spoil  # type: ignore[method-assign]
    line = [token if token != 77 else 1 for token in prompts(60)[0]]
    answers = served.submit(ask([[77, *line], line], 9, end_id=NEVER))
    served.run()
    assert "overflow" in str(answers[0].problem)
    assert not served.steps.cache.kv[0].isnan().any() and served.allocator.free == 100
    expected = generated(without(settings).say(ask([line], 9, end_id=NEVER)))
    assert generated(served.say(ask([line], 9, end_id=NEVER))) == expected


KINDS: list[dict[str, Any]] = [
    {},
    {"beam_width": 2},
    {"is_return_log_probs": True, "runtime_top_k": 4},
    {"is_return_context_log_probs": True, "is_return_context_cum_log_probs": True, "is_return_log_probs": True},
    {"is_return_context_embeddings": True},
    {"repetition_penalty": 1.3},
]


@pytest.mark.parametrize("steps_ahead", [False, True])
def test_the_network_gives_the_same_with_and_without(settings: Settings, steps_ahead: bool) -> None:
    head, found = prompts(80)[0], []
    for is_kept in (True, False):
        steps = paged_steps(settings, pages=120)
        steps.cache.allocator.keeps_prefixes = is_kept
        served, answers = Served(steps, steps_ahead=steps_ahead), []
        for seed, kind in enumerate(2 * KINDS):
            rows = [head[: 80 - 16 * (seed % 3)] + prompts(12, seed=seed)[0], prompts(40, seed=seed % 2)[0]]
            answers.append(served.submit(ask(rows, 25, end_id=NEVER, random_seed=seed, **kind)))
            for _ in range(seed % 4):
                served.scheduler.step()
        served.run()
        found.append([each[-1].tensors for each in answers])
        assert (served.found > 500) == is_kept and steps.cache.allocator.free == 120
    for one, other in zip(*found, strict=True):
        assert one and other and set(one) == set(other)
        for name, values in other.items():
            if values.dtype.kind == "f":
                np.testing.assert_allclose(one[name], values, atol=1e-3)
            else:
                np.testing.assert_array_equal(one[name], values)


def test_a_parameter_turns_it_off(settings: Settings) -> None:
    for is_on in (True, False):
        steps, _ = load_steps(replace(settings, has_prefix_cache=is_on, kv_cache_bytes=1 << 22), CPU)
        served, (line,) = Served(steps), prompts(70)
        answers = [generated(served.say(ask([line], 5, end_id=NEVER))) for _ in range(2)]
        assert answers[0] == answers[1] and served.found == (64 if is_on else 0)
        assert len(served.allocator.prefixes) == (2 if is_on else 0)


def test_a_host_keeps_a_part_of_its_pages_only() -> None:
    allocator = PageAllocator(20, most_unused=3)
    for seed in range(4):
        ids = np.array(prompts(64, seed=seed)[0])
        row = allocator.take(64)
        allocator.prefixes.add(row.pages, ids)
        allocator.release([row])
        assert len(allocator.prefixes) == min(3, 2 * seed + 2) and allocator.free == 20
    assert len(allocator.prefixes.find(ids)) * PAGE == 64


def test_a_host_keeps_more_once_it_computes_again_what_it_has_forgotten() -> None:
    """Prompts that never come again take little memory; those that come again are all found in the end."""
    allocator = PageAllocator(100, most_unused=12, first_unused=3)

    def say(seed: int) -> int:
        ids = np.array(prompts(64, seed=seed)[0])
        known = allocator.prefixes.find(ids)
        row = allocator.take(64, shared=known)
        allocator.prefixes.add(row.pages, ids)
        allocator.release([row])
        return len(known)

    assert not any(map(say, range(30)))
    assert len(allocator.prefixes) == 3
    assert not any(say(seed) for seed in range(4))  # forgotten, all of them
    assert [say(seed) for seed in range(4)] == 4 * [2]
    assert not any(map(say, range(30, 60))) and len(allocator.prefixes) == 3 + 8
    assert not any(map(say, range(30)))
    assert len(allocator.prefixes) == 12 and allocator.free == 100


def test_on_a_cpu_a_row_that_finds_pages_has_contiguous_copies(settings: Settings) -> None:
    """They are read in place in every step. Where most pages are in use, rows share what they find."""
    heads = [*prompts(70), *prompts(70), *prompts(100, seed=7)]
    rows = [head + prompts(9, seed=seed)[0] for seed, head in enumerate(heads)]
    for used in (0, 60):
        served = remembering(settings)
        for line in (rows[0], rows[2]):
            served.say(ask([line], 9, end_id=NEVER))
        known = list(served.allocator.prefixes._known)
        others = served.allocator.take(used * PAGE)
        answers = served.submit(ask(rows, 40, end_id=NEVER))
        served.scheduler.step()
        pages = [sequence.reservation.rows[0].pages for sequence in served.scheduler._batch]
        if used:
            assert pages[0][:2] == pages[1][:2] == known[:2] and pages[2][:3] == known[-3:]
        else:
            assert all(row == list(range(row[0], row[0] + len(row))) for row in pages)
            served.steps.slots.clear(np.setdiff1d(known, pages[0]))  # the first one's are behind those it has found
        served.run()
        assert served.found == 64 + 64 + 96 and answers[-1].tensors
        for row, line in enumerate(rows):
            expected = without(settings).say(ask([line], 40, end_id=NEVER))
            assert generated(answers[-1].tensors, row) == generated(expected)
        served.allocator.release([others])
        assert served.allocator.free == 100
        assert {known.uses for known in served.allocator.prefixes._known.values()} == {0}


def test_a_row_with_copies_spoils_its_own_pages_only(settings: Settings) -> None:
    served, line = remembering(settings), prompts(90)[0]
    expected = generated(without(settings).say(ask([line], 9, end_id=NEVER)))
    served.say(ask([line[:40]], 9, end_id=NEVER))
    other = served.allocator.take(PAGE)  # behind the page that is known
    with pytest.MonkeyPatch.context() as patch:
        extend = served.steps.network.extend

        def spoil(rows: Any, cache: Any, *rest: Any) -> torch.Tensor:
            hidden = extend(rows, cache, *rest)
            cache.kv[0][:, cache.page_tables[rows.slots, rows.positions // PAGE].long()] = float("nan")
            return torch.full_like(hidden, float("nan"))

        patch.setattr(served.steps.network, "extend", spoil)
        answers = served.submit(ask([line, line], 9, end_id=NEVER))
        served.run()
        assert "overflow" in str(answers[0].problem)
    served.allocator.release([other])
    assert not served.steps.cache.kv[0].isnan().any() and served.allocator.free == 100
    before = served.found
    assert generated(served.say(ask([line], 9, end_id=NEVER))) == expected and served.found == before + 32


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_different_prefix_prompts_share_nothing(family: str, tmp_path: Path) -> None:
    """Against Hugging Face, which begins with the task's keys and values."""
    model, with_prefixes = write(family, tmp_path)
    engine = open_engine(replace(with_prefixes, kv_cache_bytes=1 << 24), CPU)
    line = np.random.default_rng(5).integers(8, VOCAB, 45).tolist()
    for task in (0, 1, 2, 0, 2, 1):
        tensors = ask([line], 9, end_id=NEVER, prompt_learning_task_name_ids=task)
        (outputs,) = engine.generate([engine.parse(tensors)])
        assert generated(outputs) == greedy(model, line, PREFIXES[task], 9)
    assert engine._steps.cache.allocator.prefixes.found == (32 - 5) + 32 + (32 - 3)
    engine.close()
