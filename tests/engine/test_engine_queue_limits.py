"""Limits of the queue: who is refused, what is said, and that other clients notice nothing."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from support.engines.asking import CPU, ask, generated, prompts, tiny_gpt2
from support.engines.paged_steps import paged_steps

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import UNAVAILABLE, Answer
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.scheduling.waiting import QueueLimits
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps

NEVER = 4000


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return tiny_gpt2(tmp_path_factory.mktemp("gpt2"))[1]


@pytest.fixture
def steps(settings: Settings) -> Steps:
    return paged_steps(settings)


def submit(
    scheduler: Scheduler, steps: Steps, count: int = 6, rows: int = 1, session: str | None = None
) -> list[Answer]:
    answers: list[Answer] = []
    tensors = ask(prompts(*[4] * rows), count, end_id=NEVER)
    if session:
        tensors |= {"START": np.array([1], np.int32)}
    scheduler.add(Job(parse_request(tensors, steps.config), answers.append, session=session))
    return answers


def run(scheduler: Scheduler) -> None:
    while not scheduler.is_idle:
        scheduler.step()


def test_a_request_that_finds_the_queue_full_is_refused_at_once(steps: Steps) -> None:
    scheduler = Scheduler(steps, 2, limits=QueueLimits(requests=2))
    running = submit(scheduler, steps, rows=2)
    scheduler.step()
    waiting = [submit(scheduler, steps, rows=2), submit(scheduler, steps)]
    refused = submit(scheduler, steps, session="talk")
    assert refused[0].code == UNAVAILABLE and refused[0].is_final and "talk" not in scheduler.sessions.known
    assert "2 requests wait already, and max_queue_length is 2: send it again later" in str(refused[0].problem)
    run(scheduler)
    again = submit(scheduler, steps)
    run(scheduler)
    for answers in (running, *waiting, again):
        assert answers[0].tensors and len(generated(answers[0].tensors)) == 6


def test_a_request_that_has_waited_too_long_is_refused_but_none_that_has_begun(steps: Steps) -> None:
    now = [0.0]
    scheduler = Scheduler(steps, 1, limits=QueueLimits(wait_s=5.0, clock=lambda: now[0]))
    running, half = submit(scheduler, steps), submit(scheduler, steps, count=3, rows=2)
    late = submit(scheduler, steps, session="talk")
    scheduler.step()
    now[0] = 4.9
    later = submit(scheduler, steps, count=2)
    while not running:
        scheduler.step()
    scheduler.step()  # the second request has its first row in the batch
    assert not late
    now[0] = 5.1
    scheduler.step()
    assert late[0].code == UNAVAILABLE and "it has waited for 5.1 s, and max_queue_s is 5: send it" in str(
        late[0].problem
    )
    assert "talk" not in scheduler.sessions.known
    now[0] = 9.0
    run(scheduler)
    assert half[0].tensors and later[0].tensors and steps.cache.allocator.free == steps.cache.allocator.count


def test_the_parameters_reach_the_scheduler(settings: Settings) -> None:
    engine = open_engine(replace(settings, max_queue_length=1), CPU, max_rows=1)
    is_open, has_begun = threading.Event(), threading.Event()

    def hold(_: Answer) -> None:
        has_begun.set()
        assert is_open.wait(240)  # the engine's thread takes no step meanwhile

    request = engine.parse(ask(prompts(4), 5, end_id=NEVER))
    engine.submit(request, hold, is_streaming=True)
    assert has_begun.wait(240)
    answers: list[Answer] = []
    are_answered = threading.Barrier(2)

    def take(answer: Answer) -> None:
        answers.append(answer)
        if len(answers) == 3:
            are_answered.wait(240)

    for _ in range(3):
        engine.submit(request, take)
    is_open.set()
    are_answered.wait(240)
    engine.close()
    assert [getattr(answer, "code", "") for answer in answers] == [UNAVAILABLE, UNAVAILABLE, ""]
