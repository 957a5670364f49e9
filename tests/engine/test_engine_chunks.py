"""Chunked prefill: a long prompt beside rows that decode changes no number, and delays them by one chunk at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, Tensors, ask, generated, prompts
from support.engines.paged_steps import paged_steps
from support.shards.family_shards import write_family
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from support.shards.llama_shards import settings_of
from support.shards.prefix_prompts import PREFIXES
from support.shards.prefix_prompts import greedy as greedy_after
from support.shards.prefix_prompts import write as write_prefixes
from support.shards.random_t5 import random_t5
from support.tiny_models.greedy import NEVER, greedy
from transformers import GPT2LMHeadModel

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.model.config import Stack
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job, Sequence
from backends.fastertransformer.engine.scheduling import chunks as scheduling_chunks
from backends.fastertransformer.engine.scheduling.batch import Batch
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.scheduling.tuning import TUNING
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps

Gpt2 = tuple[GPT2LMHeadModel, Settings]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Gpt2:
    model = random_gpt2(n_positions=256)
    return model, Settings(write_shards(model, tmp_path_factory.mktemp("gpt2")), 1, 1, "fp32", cpu_threads=1)


@pytest.fixture(autouse=True)
def free_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no chunk be smaller for the cells before it: in networks this narrow a few cost as much as products."""
    monkeypatch.setattr(scheduling_chunks, "TUNING", replace(TUNING, attention_cost=1e-9))


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The tokens of each chunk but a context's last."""
    found, run = list[int](), Batch.run_chunk

    def note(self: Batch, sequence: Sequence, count: int) -> None:
        found.append(count)
        run(self, sequence, count)

    monkeypatch.setattr(Batch, "run_chunk", note)
    yield found


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """From now on chunks and decode steps are one pass, as on a GPU: the tokens of each."""
    found, mix = list[int](), Steps.mix

    def note(self: Steps, ids: Any, starts: Any, lengths: Any, first: int) -> Any:
        found.append(len(ids))
        return mix(self, ids, starts, lengths, first)

    monkeypatch.setattr(Steps, "mix", note)
    monkeypatch.setattr(Steps, "can_mix", lambda self, _rows, _tokens, _contexts=1: not self.cache.has_windows)
    yield found


class Served:
    """A scheduler with a row that decodes for long."""

    def __init__(self, steps: Steps, budget: int, rows: int = 1, **ways: Any) -> None:
        self.steps, self.scheduler = steps, Scheduler(steps, 32, chunk_tokens=budget, **ways)
        self.allocator = steps.cache.allocator
        self.others = [self.submit(ask([[3 + row]], 200, end_id=NEVER)) for row in range(rows)]
        self.steps_of(2)

    def submit(self, tensors: Tensors, is_cancelled: Callable[[], bool] | None = None, **more: Any) -> list[Answer]:
        answers: list[Answer] = []
        request = parse_request(tensors, self.steps.config)
        self.scheduler.add(Job(request, answers.append, is_cancelled=is_cancelled, **more))
        return answers

    def steps_of(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.step()

    def run(self) -> None:
        while not self.scheduler.is_idle:
            self.scheduler.step()

    def say(self, tensors: Tensors, **more: Any) -> Tensors:
        answers = self.submit(tensors, **more)
        self.run()
        assert not isinstance(answers[-1], Failure), answers[-1]
        return answers[-1].tensors

    @property
    def counts(self) -> list[int]:
        """How many tokens the host knows of each row in the batch."""
        return [sequence.count for sequence in self.scheduler._batch]


def requests_of_all_kinds() -> list[Tensors]:
    scores = {f"is_return_context_{name}": True for name in ("log_probs", "cum_log_probs", "embeddings")}
    embeddings = np.random.default_rng(3).normal(0, 0.5, (1, 40, 32)).astype(np.float32)
    own = {"request_prompt_embedding": embeddings, "request_prompt_lengths": 40, "request_prompt_type": 1}
    long = prompts(150, seed=1)
    return [
        ask(long, 12, end_id=NEVER, is_return_log_probs=True),
        ask(prompts(100, 7, 90, seed=2), 9, end_id=NEVER, runtime_top_k=5, random_seed=3, is_return_log_probs=True),
        ask(prompts(5, seed=3), 3, end_id=NEVER),
        ask(prompts(97, seed=4), 8, end_id=NEVER, beam_width=3, is_return_log_probs=True),
        ask(prompts(128, seed=5), 5, end_id=NEVER, beam_width=2, is_return_log_probs=True, **scores),
        ask(prompts(90, seed=6), 6, end_id=NEVER, is_return_log_probs=True, **scores),
        ask(prompts(80, seed=7), 6, end_id=NEVER, **own),
        ask([long[0][:140] + [4, 5]], 6, end_id=NEVER, repetition_penalty=1.2),
    ]


def answers_of(steps: Steps, requests: list[Tensors], budget: int, **ways: Any) -> list[Tensors]:
    served = Served(steps, budget, **ways)
    answers = served.others
    for place, tensors in enumerate(requests):
        answers.append(served.submit(tensors))
        served.steps_of(place % 3)
    served.run()
    assert served.allocator.free == served.allocator.count and not steps.cache.page_tables.any()
    found = []
    for (answer,) in answers:
        assert not isinstance(answer, Failure), answer
        found.append(answer.tensors)
    return found


@pytest.mark.parametrize(
    ("budget", "steps_ahead", "is_mixed"),
    [
        *((1, False, False), (8, True, True), (33, True, True), (48, False, False)),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((1, False, True), (8, True, False), (33, True, False), (48, False, True))
        ),
    ],
)
def test_every_kind_of_request_gets_what_it_gets_whole(
    gpt2: Gpt2,
    budget: int,
    steps_ahead: bool,
    is_mixed: bool,
    chunks: list[int],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not (grows := budget == 8):
        monkeypatch.setattr(scheduling_chunks, "TUNING", replace(TUNING, attention_cost=1e-9, max_budget_tokens=0))
    requests = requests_of_all_kinds()
    whole = answers_of(paged_steps(gpt2[1]), requests, 0)
    assert not chunks
    passes = request.getfixturevalue("mixed") if is_mixed else []
    found = answers_of(paged_steps(gpt2[1]), requests, budget, steps_ahead=steps_ahead)
    largest = {1: 1, 33: 50, 48: 75}[budget] if is_mixed and not grows else budget
    assert max(chunks) > budget if grows else max(chunks) == largest
    assert len(chunks) >= 3
    assert len(passes) > len(chunks) / 2 or not is_mixed  # but those with embeddings
    for ours, theirs in zip(found, whole, strict=True):
        assert set(ours) == set(theirs)
        for name, values in theirs.items():
            if values.dtype.kind == "f":
                np.testing.assert_allclose(ours[name], values, atol=1e-3, rtol=1e-4)
            else:
                np.testing.assert_array_equal(ours[name], values)


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama31", marks=pytest.mark.long), "gemma2"])
def test_transformers_gives_the_same_tokens(
    gpt2: Gpt2, family: str, is_mixed: bool, chunks: list[int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, settings = gpt2 if family == "gpt2" else settings_of(family, tmp_path)
    line, budget = prompts(53, seed=8)[0], 10
    if is_mixed:
        request.getfixturevalue("mixed")
    served = Served(paged_steps(settings), budget, rows=3) if family != "gemma2" else short_positions(settings, budget)
    answers = served.submit(ask([line], 5, end_id=NEVER))
    served.run()
    assert answers[0].tensors and generated(answers[0].tensors) == greedy(model, line, 5)[len(line) :]
    assert chunks == ([budget - 3] * 7 if is_mixed else [budget] * 5)


def short_positions(settings: Settings, budget: int) -> Served:
    """Three rows that decode within 64 positions."""
    served = Served(paged_steps(settings), budget, rows=0)
    served.others = [served.submit(ask([[3 + row]], 60, end_id=NEVER)) for row in range(3)]
    served.steps_of(2)
    return served


@pytest.mark.parametrize("steps_ahead", [False, True])
def test_rows_that_decode_get_a_token_with_every_chunk(
    gpt2: Gpt2, steps_ahead: bool, mixed: list[int], chunks: list[int]
) -> None:
    served = Served(paged_steps(gpt2[1]), 16, rows=4, steps_ahead=steps_ahead)
    answers = served.submit(ask(prompts(100), 3, end_id=NEVER))
    for _ in range(100 // 12):
        before = served.counts
        served.scheduler.step()
        assert served.counts == [count + 1 for count in before] and len(before) == 4
    assert mixed == chunks == [12] * 8 and not answers
    served.scheduler.step()
    assert mixed[8:] == [4] and len(chunks) == 8 and len(served.counts) == 5
    served.run()
    assert answers[0].is_final


@pytest.mark.parametrize(("length", "tokens"), [(64, [22, 21, 21]), (50, [25, 25]), (65, [12] * 5 + [5])])
def test_a_short_prompt_is_run_in_few_equal_chunks(
    gpt2: Gpt2, length: int, tokens: list[int], mixed: list[int], chunks: list[int]
) -> None:
    served = Served(paged_steps(gpt2[1]), 16, rows=4)
    (line,) = prompts(length)
    answers = served.submit(ask([line], 3, end_id=NEVER))
    served.run()
    assert mixed == tokens and chunks == tokens[:-1]  # with the last one it joins
    assert answers[0].tensors and generated(answers[0].tensors) == greedy(gpt2[0], line, 3)[length:]


def test_many_rows_leave_half_of_the_budget_to_the_prompt(gpt2: Gpt2, mixed: list[int]) -> None:
    served = Served(paged_steps(gpt2[1]), 9, rows=20)
    served.submit(ask(prompts(43), 3, end_id=NEVER))
    served.steps_of(9)
    assert mixed == [5] * 8 + [3]


def test_a_chunk_grows_with_the_contexts_that_wait(gpt2: Gpt2, chunks: list[int]) -> None:
    served = Served(paged_steps(gpt2[1]), 8)
    for seed, length in enumerate((70, 50, 30)):
        served.submit(ask(prompts(length, seed=seed), 3, end_id=NEVER))
    served.steps_of(5)
    assert chunks == [24, 24, 16, 16]  # 22 tokens are left of the first, and the third is run whole
    served.run()


def test_without_a_mixed_pass_a_chunk_has_the_whole_budget(gpt2: Gpt2, chunks: list[int]) -> None:
    served = Served(paged_steps(gpt2[1]), 9, rows=4)
    served.submit(ask(prompts(43), 3, end_id=NEVER))
    served.steps_of(5)
    assert chunks == [9] * 4 and len(served.counts) == 5


@pytest.mark.parametrize(
    ("cells", "tokens"), [(0, 256), (2450, 256), (2460, 224), (3970, 224), (6000, 192), (7000, 160), (99_999, 128)]
)
def test_a_chunk_is_the_smaller_the_more_cells_it_attends_to(
    gpt2: Gpt2, cells: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Llama 3.1 8B, as was measured: at 8,192 cells attention takes as long as products."""
    monkeypatch.setattr(scheduling_chunks, "TUNING", TUNING)
    shape = Stack(head_num=32, kv_head_num=8, size_per_head=128, inter_size=14336, num_layer=32, is_gated=True)
    assert scheduling_chunks._cells_like_products(shape) == pytest.approx(8192, rel=1e-3)
    budgets = scheduling_chunks.Chunks(paged_steps(gpt2[1]), 256)
    monkeypatch.setattr(budgets, "_equal_cells", 8192.0)
    assert budgets._budget_after(cells) == tokens


def test_a_long_prompt_is_cut_into_ever_smaller_chunks(
    gpt2: Gpt2, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling_chunks, "TUNING", replace(TUNING, token_multiple=1))  # 57 cells of this network
    model, settings = gpt2
    served, line = Served(paged_steps(settings), 20), prompts(190, seed=8)[0]
    answers = served.submit(ask([line], 5, end_id=NEVER))
    served.run()
    assert answers[0].tensors and generated(answers[0].tensors) == greedy(model, line, 5)[len(line) :]
    assert chunks == sorted(chunks, reverse=True) and chunks[0] == 20 and chunks[-1] == 10


def test_what_delays_no_row_is_run_whole(gpt2: Gpt2, chunks: list[int]) -> None:
    served = Served(paged_steps(gpt2[1]), 20, rows=0)
    served.say(ask(prompts(100), 3, end_id=NEVER))  # no row decodes
    served.submit(ask(prompts(2), 30, end_id=NEVER))
    served.steps_of(2)
    served.submit(ask(prompts(40), 3, end_id=NEVER))  # two budgets
    served.submit(ask(prompts(9, 8, 7), 3, end_id=NEVER))
    served.steps_of(1)
    assert not chunks and len(served.counts) == 5


def test_a_context_goes_on_whole_when_the_last_row_has_ended(gpt2: Gpt2, chunks: list[int]) -> None:
    served = Served(paged_steps(gpt2[1]), 8, rows=0)
    served.submit(ask(prompts(2), 6, end_id=NEVER))
    served.steps_of(1)
    (line,) = prompts(100)
    answers = served.submit(ask([line], 4, end_id=NEVER))
    served.run()
    assert chunks == [8] * 5
    assert answers[0].tensors and generated(answers[0].tensors) == greedy(gpt2[0], line, 4)[100:]


def test_a_prompt_takes_its_pages_chunk_by_chunk_and_frees_them_when_it_is_cancelled(
    gpt2: Gpt2, mixed: list[int]
) -> None:
    served = Served(paged_steps(gpt2[1], pages=40), 33)
    gone = False
    answers = served.submit(ask(prompts(200), 50, end_id=NEVER), lambda: gone)
    for count in range(1, 5):
        served.steps_of(1)
        assert served.allocator.free == 40 - 1 - count
    gone = True
    served.steps_of(1)
    assert answers[-1].code == "CANCELLED" and served.allocator.free == 40 - 1
    assert not served.steps.cache.page_tables[1:].any()
    served.run()
    assert served.others[0][0].tensors and len(mixed) == 4


def test_a_prompt_goes_on_from_what_the_prefix_cache_has(gpt2: Gpt2, mixed: list[int]) -> None:
    head = prompts(96, seed=9)[0]
    served = Served(paged_steps(gpt2[1]), 11)
    served.allocator.prefixes.found = 0
    first = served.submit(ask([head], 2, end_id=NEVER))
    served.steps_of(12)
    assert sum(mixed) == 96 and first[0].is_final
    line = head + prompts(30, seed=10)[0]
    answers = served.submit(ask([line], 4, end_id=NEVER))
    served.run()
    assert sum(mixed) == 96 + 30 and served.allocator.prefixes.found == 96
    assert answers[0].tensors and generated(answers[0].tensors) == greedy(gpt2[0], line, 4)[126:]


@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_a_half_run_context_gives_its_pages_to_rows_that_decode(
    gpt2: Gpt2, keeps_prefixes: bool, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When they have ended it begins again, from those of its pages that the prefix cache still has."""
    dropped, drop = list[Sequence](), Batch.drop

    def note(self: Batch, sequence: Sequence) -> None:
        dropped.append(sequence)
        drop(self, sequence)

    monkeypatch.setattr(Batch, "drop", note)
    steps = paged_steps(gpt2[1], pages=8)
    steps.cache.allocator.keeps_prefixes, steps.cache.allocator.prefixes._most_unused = keeps_prefixes, 8
    served, (line,) = Served(steps, 1), prompts(100)
    served.steps_of(48)  # the row has two pages, and takes four more while the other is run
    answers = served.submit(ask([line], 5, end_id=NEVER))
    served.run()
    assert [each.job.request.rows[0].sampling.max_tokens for each in dropped] == [5]
    assert answers[0].tensors and generated(answers[0].tensors) == greedy(gpt2[0], line, 5)[100:]
    (answer,) = served.others[0]
    assert answer.tensors and generated(answer.tensors) == greedy(gpt2[0], [3], 200)[1:]
    assert served.allocator.free == 8 and sum(chunks) == 96
    assert served.allocator.prefixes.found == (32 if keeps_prefixes else 0)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_chunk_that_fails_fails_its_request_alone(
    gpt2: Gpt2, is_mixed: bool, chunks: list[int], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if is_mixed:
        request.getfixturevalue("mixed")
    served = Served(paged_steps(gpt2[1]), 16, rows=2)
    extend = served.steps.network.extend

    def fail(rows: Any, *rest: Any, **more: Any) -> torch.Tensor:
        if (rows.ids == 96).any():
            raise RuntimeError("no such token")
        return extend(rows, *rest, **more)

    monkeypatch.setattr(served.steps.network, "extend", fail)
    answers = served.submit(ask([[*prompts(60)[0], 96, *prompts(40)[0]]], 5, end_id=NEVER))
    (line,) = prompts(70, seed=2)
    later = served.submit(ask([line], 5, end_id=NEVER))
    served.run()
    assert answers[-1].code == "INTERNAL" and "no such token" in str(answers[-1].problem) and len(chunks) > 3
    assert later[0].tensors and generated(later[0].tensors) == greedy(gpt2[0], line, 5)[70:]
    for row, (answer,) in enumerate(served.others):
        assert answer.tensors and generated(answer.tensors) == greedy(gpt2[0], [3 + row], 200)[1:]
    assert served.allocator.free == served.allocator.count


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_numbers_that_overflow_in_a_chunk_are_cleared(
    gpt2: Gpt2, is_cancelled: bool, mixed: list[int], chunks: list[int]
) -> None:
    served, gone = Served(paged_steps(gpt2[1]), 16), False
    embeddings = np.zeros((1, 40, 32), np.float32)
    embeddings[0, 20] = 3e38
    own = {"request_prompt_embedding": embeddings, "request_prompt_lengths": 40, "request_prompt_type": 1}
    answers = served.submit(ask(prompts(80), 5, end_id=NEVER, **own), lambda: gone)
    served.steps_of(3)
    assert len(chunks) == 3 and any(block.isnan().any() for block in served.steps.cache.kv)
    gone = is_cancelled
    served.run()
    assert answers[-1].code == ("CANCELLED" if is_cancelled else "INTERNAL")
    assert all(block[:, 1:].isfinite().all() for block in served.steps.cache.kv)  # no row has page 0
    (answer,) = served.others[0]
    assert answer.tensors and generated(answer.tensors) == greedy(gpt2[0], [3], 200)[1:]


def test_a_conversation_is_run_in_chunks(gpt2: Gpt2, mixed: list[int], chunks: list[int]) -> None:
    served, line = Served(paged_steps(gpt2[1]), 17), list[int]()
    for turn, length in enumerate((70, 50)):
        new = prompts(length, seed=turn)[0]
        told = {"START": np.array([turn == 0], np.int32), "END": np.array([turn == 1], np.int32)}
        answers = served.submit(ask([new], 6, end_id=NEVER) | told, session="talk")
        served.steps_of(12)
        line = greedy(gpt2[0], line + new, 6)
        assert answers[0].tensors and generated(answers[0].tensors) == line[-6:]
    assert chunks == [16] * 4 + [26] and len(mixed) == 7
    served.run()
    assert served.allocator.free == served.allocator.count


def test_a_row_that_keeps_its_last_tokens_only_is_run_whole(gpt2: Gpt2, chunks: list[int]) -> None:
    served = Served(paged_steps(gpt2[1]), 16)
    told = {"START": np.ones(1, np.int32), "memory_len": np.array([[90]], np.uint32)}
    served.say(ask(prompts(80), 6, end_id=NEVER) | told, session="talk")
    assert not chunks


def test_a_prefix_prompt_precedes_the_first_chunk(tmp_path: Path, mixed: list[int], chunks: list[int]) -> None:
    model, settings = write_prefixes("gpt_neox", tmp_path)
    engine = open_engine(settings, CPU)
    steps = engine._steps
    served = Served(steps, 4, rows=0)
    served.submit(ask([[9]], 18, end_id=NEVER))
    served.steps_of(1)
    line = np.random.default_rng(5).integers(8, 96, 15).tolist()
    tensors = ask([line], 4, end_id=NEVER, prompt_learning_task_name_ids=2)
    assert generated(served.say(tensors)) == greedy_after(model, line, PREFIXES[2], 4)
    assert chunks == [5] * 2 and mixed == [5] * 3
    engine.close()


def test_an_encoder_decoder_is_run_whole(tmp_path: Path, chunks: list[int]) -> None:
    shards = write_family(random_t5(), tmp_path, 1)
    steps = paged_steps(Settings(shards, 1, 1, "fp32", model_type="T5", cpu_threads=1))
    scheduler, answers = Scheduler(steps, 8, chunk_tokens=4), list[Answer]()
    for length in (3, 40):
        tensors = ask(prompts(length), 12, end_id=NEVER)
        tensors["sequence_length"] = tensors.pop("input_lengths").astype(np.uint32)
        tensors["max_output_len"] = tensors.pop("request_output_len")
        scheduler.add(Job(parse_request(tensors, steps.config), answers.append))
        scheduler.step()
    while not scheduler.is_idle:
        scheduler.step()
    assert all(answer.tensors for answer in answers) and len(answers) == 2 and not chunks
