"""Interactive generation: a continued conversation against one long input, by Hugging Face."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.engines.asking import CPU, ask, generated, prompts, tiny_gpt2, word_list
from support.engines.paged_steps import paged_steps
from support.tiny_models.greedy import NEVER, greedy
from transformers import GPT2LMHeadModel

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.loading import load_steps
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps

TOKEN_BYTES = 3 * 2 * 32 * 4  # layers, k and v, hidden, fp32


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT2LMHeadModel, Settings]:
    return tiny_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def model(made: tuple[GPT2LMHeadModel, Settings]) -> GPT2LMHeadModel:
    return made[0]


@pytest.fixture
def steps(made: tuple[GPT2LMHeadModel, Settings]) -> Steps:
    return paged_steps(made[1])


class Talk:
    """A scheduler, and conversations on it."""

    def __init__(self, steps: Steps, idle_s: float = 60.0, is_inflight: bool = True) -> None:
        self.steps, self.scheduler = (
            steps,
            Scheduler(steps, 8, is_inflight=is_inflight, session_idle_s=idle_s, steps_ahead=True),
        )

    def submit(
        self, key: Any, rows: list[list[int]], count: Any, start: bool = False, end: bool = False, **scalars: Any
    ) -> list[Answer]:
        tensors = ask(rows, count, **({"end_id": NEVER} | scalars))
        tensors |= {"START": np.array([start], np.int32), "END": np.array([end], np.int32)}
        answers: list[Answer] = []
        self.scheduler.add(Job(parse_request(tensors, self.steps.config), answers.append, session=key))
        return answers

    def say(self, *given: Any, **more: Any) -> Any:
        """What comes back, or the problem's text."""
        answers = self.submit(*given, **more)
        self.run()
        (answer,) = answers
        return answer.problem if isinstance(answer, Failure) else answer.tensors

    def run(self) -> None:
        while not self.scheduler.is_idle:
            self.scheduler.step()


@pytest.mark.parametrize("is_inflight", [True, False])
def test_a_conversation_goes_on_as_one_long_input_does(steps: Steps, model: GPT2LMHeadModel, is_inflight: bool) -> None:
    talk = Talk(steps, is_inflight=is_inflight)
    first, second, third = prompts(5, 2, seed=1), prompts(3, 6, seed=2), prompts(1, 1, seed=3)
    lines = [greedy(model, line, 4) for line in first]
    for turn, (rows, count) in enumerate(((first, 4), (second, 5), (third, 6))):
        if turn:
            lines = [greedy(model, line + new, count) for line, new in zip(lines, rows, strict=True)]
        outputs = talk.say(7, rows, count, start=turn == 0, end=turn == 2, session_len=40)
        for row, line in enumerate(lines):
            assert outputs["sequence_length"][row, 0] == len(line)
            assert outputs["output_ids"][row, 0, : len(line)].tolist() == line
            assert generated(outputs, row) == line[-count:]
    assert "does not exist" in talk.say(7, third, 2)
    assert not talk.scheduler.sessions.saved_pages and talk.steps.cache.allocator.free == 200


@pytest.mark.parametrize("memory_len", [1, 4, 7])
def test_a_memory_of_the_last_tokens_is_attention_to_the_last_tokens(
    steps: Steps, model: GPT2LMHeadModel, memory_len: int
) -> None:
    talk, other = Talk(steps), None
    line: list[int] = []
    for turn, length in enumerate((memory_len, memory_len, 1, memory_len)):
        (new,) = prompts(length, seed=turn)
        count = 6
        line = greedy(model, line + new, count, window=memory_len)
        answers = talk.submit("a", [new], count, start=turn == 0, memory_len=memory_len)
        if turn == 1:  # among rows without a window
            other = talk.submit(None, prompts(9), 12)
        talk.run()
        assert answers[0].tensors and answers[0].tensors["output_ids"][0, 0].tolist()[: len(line)] == line
    assert other and other[0].tensors
    assert generated(other[0].tensors) == greedy(model, prompts(9)[0], 12)[9:]
    assert greedy(model, line[:4], 20) != greedy(model, line[:4], 20, window=memory_len)


def test_an_ended_row_goes_on_without_what_ended_it(steps: Steps, model: GPT2LMHeadModel) -> None:
    talk = Talk(steps)
    (first, second), new = prompts(5, 4), prompts(3, 3, seed=8)
    free = [greedy(model, line, 9)[len(line) :] for line in (first, second)]
    stops = np.concatenate([word_list([[94, 95]]), word_list([free[1][1:3]])])
    outputs = talk.say("x", [first, second], 9, start=True, end_id=[free[0][3], NEVER], stop_words_list=stops)
    cut = free[0].index(free[0][3]) + 1
    assert [generated(outputs, 0), generated(outputs, 1)] == [free[0][:cut], free[1][:3]]
    outputs = talk.say("x", new, 4)
    for row, line in enumerate((first + free[0][: cut - 1], second + free[1][:2])):
        expected = greedy(model, line + new[row], 4)
        assert outputs["output_ids"][row, 0, : len(expected)].tolist() == expected


def test_conversations_side_by_side_do_not_touch_each_other(steps: Steps, model: GPT2LMHeadModel) -> None:
    talk, lines = Talk(steps), {}
    for turn in range(3):
        waiting = {}
        for key in ("a", "b", 3):
            (new,) = prompts(2 + turn, seed=10 * len(lines) + turn)
            lines[key] = greedy(model, lines.get(key, []) + new, 5)
            waiting[key] = talk.submit(key, [new], 5, start=turn == 0)
            talk.scheduler.step()
        talk.submit(None, prompts(4), 3)
        talk.run()
        for key, answers in waiting.items():
            assert answers[0].tensors and answers[0].tensors["output_ids"][0, 0].tolist() == lines[key]


def test_a_cancelled_answer_leaves_what_has_come(steps: Steps, model: GPT2LMHeadModel) -> None:
    talk = Talk(steps)
    (first,), (second,) = prompts(5), prompts(3, seed=4)
    answers: list[Answer] = []
    tensors = ask([first], 30, end_id=NEVER) | {"START": np.ones(1, np.int32)}
    job = Job(parse_request(tensors, steps.config), answers.append, session="c")
    talk.scheduler.add(job)
    for _ in range(4):
        talk.scheduler.step()
    job.is_cancelled = lambda: True
    talk.scheduler.step()
    assert answers[0].code == "CANCELLED"
    expected = greedy(model, greedy(model, first, 3) + second, 5)  # the fourth was on its way
    assert talk.say("c", [second], 5)["output_ids"][0, 0].tolist() == expected


def test_idle_conversations_are_forgotten(steps: Steps) -> None:
    talk, now = Talk(steps, idle_s=10.0), [0.0]
    talk.scheduler.sessions._clock = lambda: now[0]
    talk.say("old", prompts(3), 2, start=True)
    now[0] = 6.0
    talk.say("new", prompts(3), 2, start=True)
    now[0] = 11.0
    assert "session old does not exist" in talk.say("old", prompts(3), 2)
    assert "output_ids" in talk.say("new", prompts(3), 2)
    assert talk.scheduler.sessions.saved_pages == 1 and steps.cache.allocator.free == 199
    now[0] = 30.0
    talk.scheduler.sessions.expire()
    assert steps.cache.allocator.free == 200 and talk.scheduler.sessions.idle_timeout_s is None


def test_the_one_that_was_idle_longest_makes_room(made: tuple[GPT2LMHeadModel, Settings]) -> None:
    small, _ = load_steps(replace(made[1], kv_cache_bytes=3 * 32 * TOKEN_BYTES), CPU)
    talk = Talk(small)
    talk.say("a", prompts(10), 4, start=True)  # 13 tokens are kept
    talk.say("b", prompts(10), 4, start=True)
    assert len(generated(talk.say(None, prompts(10), 15))) == 15
    assert "session a does not exist" in talk.say("a", prompts(1), 2)
    assert "output_ids" in talk.say("b", prompts(1), 2)


@pytest.mark.parametrize(
    ("key", "rows", "more", "words"),
    [
        ("none", prompts(3), {}, "session none does not exist: it did not begin with START"),
        ("a", prompts(3, 3), {}, "session a has 1 rows, the request 2"),
        ("a", prompts(14), {"count": 6}, "row 0 would have 28 tokens: 8 of the session, 14 of the input, .* allow 26"),
        ("a", prompts(7), {}, "row 0 has 7 tokens, over memory_len 6"),
        ("a", prompts(3), {"beam_width": 2}, "beam_width above 1 and prompts do not go with"),
        ("b", prompts(40), {"start": True, "count": 9}, "would have 49 tokens|exceeds max_pos_seq_len 48"),
    ],
)
def test_what_does_not_fit_a_conversation_is_refused_and_leaves_it_alone(
    steps: Steps, model: GPT2LMHeadModel, key: str, rows: list[list[int]], more: dict[str, Any], words: str
) -> None:
    talk = Talk(steps)
    line = greedy(model, prompts(5)[0], 3, window=6)
    talk.say("a", prompts(5), 3, start=True, session_len=26, memory_len=6)
    more = dict(more)
    try:
        problem = talk.say(key, rows, more.pop("count", 2), **more)
    except Exception as error:
        problem = str(error)
    assert re.search(words, problem), problem
    expected = greedy(model, line + [7], 3, window=6)
    assert talk.say("a", [[7]], 3)["output_ids"][0, 0].tolist() == expected


def test_a_busy_conversation_takes_no_second_request(steps: Steps) -> None:
    talk = Talk(steps)
    first = talk.submit("a", prompts(3), 6, start=True)
    talk.scheduler.step()
    second = talk.submit("a", prompts(2), 2)
    assert "has not answered its last request yet" in str(second[0].problem)
    talk.run()
    assert first[0].tensors


def test_the_engine_keeps_conversations_between_requests(
    made: tuple[GPT2LMHeadModel, Settings], model: GPT2LMHeadModel
) -> None:
    engine: Engine = open_engine(made[1], CPU)

    def say(rows: list[list[int]], start: bool, idle_s: float = 60.0) -> Answer:
        answers: queue.Queue[Answer] = queue.Queue()

        def take(answer: Answer) -> None:
            engine._scheduler.sessions._idle_s = idle_s
            answers.put(answer)

        tensors = ask(rows, 3, end_id=NEVER) | {"START": np.array([[start]], np.int32)}
        engine.submit(engine.parse(tensors), take, session="a")
        return answers.get(timeout=180)

    (first,), (second,) = prompts(4), prompts(2, seed=1)
    assert say([first], True).tensors
    expected = greedy(model, greedy(model, first, 3) + second, 3)
    again = say([second], False, idle_s=0.1)
    assert again.tensors and again.tensors["output_ids"][0, 0].tolist() == expected
    allocator = engine._steps.cache.allocator
    deadline = time.monotonic() + 240
    while allocator.free < allocator.count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert allocator.free == allocator.count  # forgotten without another request
    assert "does not exist" in str(say([second], False).problem)
    engine.close()


def fail_when(monkeypatch: pytest.MonkeyPatch, steps: Steps, is_time: Callable[[], bool]) -> list[int]:
    """Let decode steps raise when the condition holds; give the numbers of rows in those, as they come."""
    decode, sizes = steps.network.decode, []

    def explode(ids: Any, *rest: Any) -> Any:
        if is_time():
            sizes.append(len(ids))
            raise RuntimeError("out of memory")
        return decode(ids, *rest)

    monkeypatch.setattr(steps.network, "decode", explode)
    return sizes


@pytest.mark.parametrize("memory_len", [0, 4])
def test_a_conversation_outlives_a_step_that_failed_because_of_others(
    steps: Steps, model: GPT2LMHeadModel, monkeypatch: pytest.MonkeyPatch, memory_len: int
) -> None:
    talk = Talk(steps)
    lines: dict[str, list[int]] = {"a": [], "b": []}
    sizes = fail_when(monkeypatch, steps, lambda: any(each.job.session is None for each in talk.scheduler._batch))
    for turn in range(4):
        waiting = {}
        for seed, key in enumerate(lines):
            (new,) = prompts(3, seed=10 * turn + seed)
            lines[key] = greedy(model, lines[key] + new, 5, window=memory_len)
            waiting[key] = talk.submit(key, [new], 5, start=turn == 0, memory_len=memory_len)
            talk.scheduler.step()
        bad = talk.submit(None, prompts(4), 3) if turn in (0, 2) else []
        talk.run()
        assert [answer.problem for answer in bad] == ["generation failed: out of memory"] * len(bad)
        for key, answers in waiting.items():
            assert not isinstance(answers[0], Failure), answers[0]
            assert answers[0].tensors["output_ids"][0, 0, : len(lines[key])].tolist() == lines[key]
    assert sizes == [2, 1, 2, 1]  # of those that had decoded before
    assert steps.cache.allocator.free == 200 - 2  # nothing is kept of what was lost


def test_a_request_that_fails_leaves_its_conversation_as_it_was(
    steps: Steps, model: GPT2LMHeadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(steps)
    first, second, third = prompts(5, 4), prompts(3, 2, seed=1), prompts(2, 2, seed=2)
    talk.say("a", first, 4, start=True)
    with monkeypatch.context() as patch:  # row 0 has its one token before a step of row 1 fails
        sizes = fail_when(patch, steps, lambda: True)
        problem = talk.say("a", second, np.array([[1], [4]], np.uint32))
    assert problem == "generation failed: out of memory" and sizes[-1] == 1
    lines = [greedy(model, line, 4) for line in first]
    for new in (second, third):
        lines = [greedy(model, line + row, 4) for line, row in zip(lines, new, strict=True)]
        outputs = talk.say("a", new, 4)
        for row, line in enumerate(lines):
            assert outputs["output_ids"][row, 0, : len(line)].tolist() == line
    with monkeypatch.context() as patch:
        fail_when(patch, steps, lambda: True)
        assert "out of memory" in talk.say("b", first, 4, start=True)
    assert "session b does not exist" in talk.say("b", first, 4)


def test_what_an_input_is_asked_does_not_cover_what_was_made_again(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = []
    for is_lost in (False, True):
        talk = Talk(steps)
        talk.say("a", prompts(6), 3, start=True)
        if is_lost:
            with monkeypatch.context() as patch:
                fail_when(patch, steps, lambda: True)
                assert "out of memory" in talk.say("a", prompts(4, seed=1), 4)
        told = {"is_return_context_log_probs": True, "is_return_context_embeddings": True}
        scores.append(talk.say("a", prompts(4, seed=1), 2, **told))
    for name in ("context_log_probs", "context_embeddings", "output_ids"):
        np.testing.assert_allclose(scores[0][name], scores[1][name], atol=1e-4)
    assert not scores[0]["context_log_probs"][0, :8].any()
