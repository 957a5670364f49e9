"""A GPU's steps are launched late: requests that arrive meanwhile join the next one, and the GPU never waits for it."""

from __future__ import annotations

import threading

import pytest
from support.engines.asking import CPU, ask, generated, prompts
from support.engines.paged_steps import paged_steps
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from support.tiny_models.greedy import NEVER, greedy
from transformers import GPT2LMHeadModel

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.launch_times import LaunchTimes
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.settings import Settings

Gpt2 = tuple[GPT2LMHeadModel, Settings]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Gpt2:
    model = random_gpt2(n_positions=256)
    return model, Settings(write_shards(model, tmp_path_factory.mktemp("gpt2")), 1, 1, "fp32", cpu_threads=1)


class Gpu:
    """A GPU whose steps take 10 ms, and a host that takes 1 ms to launch one; both on a clock that stands otherwise."""

    def __init__(self) -> None:
        self.now = self._free_at = 0.0
        self.ends: list[float] = []
        self.idle_s = 0.0

    def launch(self, step_s: float = 0.010, launch_s: float = 0.001) -> None:
        self.now += launch_s
        if self.ends:
            self.idle_s += max(0.0, self.now - self._free_at)
        self._free_at = max(self.now, self._free_at) + step_s
        self.ends.append(self._free_at)

    def wait(self, number: int) -> bool:
        """Wait for a step; says whether it was still running."""
        end = self.ends[number]
        was_running = end > self.now
        self.now = max(self.now, end)
        return was_running

    def is_idle(self) -> bool:
        return self._free_at <= self.now


class Host:
    """What the scheduler tells about steps of equal size, of which one is launched ahead."""

    def __init__(self) -> None:
        self.gpu, self.steps = Gpu(), 0
        self.times = LaunchTimes(lambda: self.gpu.now)

    def step(self, step_s: float = 0.010, launch_s: float = 0.001, tokens: int = 0) -> float:
        """Take a step when it is time to; returns how long that has waited."""
        spare_s = self.times.spare_s(tokens > 0)
        self.gpu.now += spare_s
        self.times.begin(is_idle=self.gpu.is_idle())
        self.gpu.launch(step_s, launch_s)
        self.times.launch(8, tokens, is_first=not self.steps)
        self.steps += 1
        if self.steps > 1:
            self.times.read(self.gpu.wait(self.steps - 2))
        return spare_s


def test_a_launch_waits_for_all_but_its_own_time_and_a_tenth_of_the_step() -> None:
    host = Host()
    assert [host.step() for _ in range(2)] == [0.0, 0.0]  # nothing is known of such steps yet
    waits = [host.step() for _ in range(20)]
    assert waits[2:] == pytest.approx([0.9 * 0.010 - 0.001 - 0.0005] * 18)
    assert host.gpu.idle_s == 0


def test_launches_with_contexts_have_a_time_of_their_own() -> None:
    host = Host()
    for _ in range(5):
        host.step()
        host.step(tokens=300, launch_s=0.003)
    assert host.times.spare_s(has_waiting=False) - host.times.spare_s(has_waiting=True) == pytest.approx(0.002, rel=0.1)
    assert host.gpu.idle_s == 0


def test_steps_that_turn_out_shorter_are_launched_earlier() -> None:
    host = Host()
    for _ in range(10):
        host.step()
    before = host.times.spare_s(has_waiting=False)
    for _ in range(3):
        host.step(step_s=0.008)
    assert host.times.spare_s(has_waiting=False) == pytest.approx(before - 0.9 * 0.002)
    assert host.gpu.idle_s < 0.002  # by the first of them


def test_a_host_that_is_held_up_launches_earlier_for_a_while() -> None:
    host = Host()
    for _ in range(10):
        host.step()
    before = host.times.spare_s(has_waiting=False)
    host.step(launch_s=0.004)
    after = host.times.spare_s(has_waiting=False)
    assert after == pytest.approx(before - 0.003)
    for _ in range(200):
        host.step()
    assert host.times.spare_s(has_waiting=False) == pytest.approx(before)


def test_a_launch_behind_the_end_of_a_step_is_earlier_the_next_time() -> None:
    host = Host()
    for _ in range(10):
        host.step()
    before = host.times.spare_s(has_waiting=False)
    host.gpu.now += 0.02  # the host was busy elsewhere
    host.times.begin(is_idle=True)
    host.gpu.launch()
    host.times.launch(8, 0, is_first=False)
    host.times.read(host.gpu.wait(len(host.gpu.ends) - 2))
    assert host.times.spare_s(has_waiting=False) < before


def test_where_no_step_is_under_way_nothing_waits(gpt2: Gpt2) -> None:
    scheduler = Scheduler(paged_steps(gpt2[1]), 8)  # on a CPU no step is launched ahead
    assert scheduler.spare_s == 0
    request = parse_request(ask(prompts(9), 5, end_id=NEVER), scheduler._steps.config)
    scheduler.add(Job(request, lambda answer: None))
    while not scheduler.is_idle:
        scheduler.step()
        assert scheduler.spare_s == 0


def test_a_request_that_arrives_while_a_step_runs_is_in_the_next_one(
    gpt2: Gpt2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine waits before a launch until a request is there: its first token comes with the other's next."""
    is_waiting, has_time = threading.Event(), True

    def spare_s(scheduler: Scheduler) -> float:
        if has_time and scheduler._batch.pending and not scheduler._waiting:
            is_waiting.set()
            return 60.0
        return 0.0

    monkeypatch.setattr(Scheduler, "spare_s", property(spare_s))
    engine = open_engine(gpt2[1], CPU)
    engine._scheduler._steps_ahead = True
    steps: list[tuple[str, int]] = []
    lines, ended = prompts(9, 7), threading.Event()

    def submit(name: str, line: list[int]) -> list[Answer]:
        answers: list[Answer] = []

        def take(answer: Answer) -> None:
            answers.append(answer)
            steps.append((name, len(answers)))
            if answer.is_final and name == "late":
                ended.set()

        engine.submit(engine.parse(ask([line], 4, end_id=NEVER)), take, is_streaming=True)
        return answers

    first = submit("early", lines[0])
    assert is_waiting.wait(240)
    has_time = False
    late = submit("late", lines[1])
    assert ended.wait(240)
    assert steps[:3] == [("early", 1), ("early", 2), ("late", 1)]
    for answers, line in ((first, lines[0]), (late, lines[1])):
        assert answers[-1].tensors and generated(answers[-1].tensors) == greedy(gpt2[0], line, 4)[len(line) :]
    engine.close()


def test_an_engine_that_waits_before_a_launch_closes_at_once(gpt2: Gpt2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "spare_s", property(lambda scheduler: 60.0))
    engine = open_engine(gpt2[1], CPU)
    answers: list[Answer] = []
    engine.submit(engine.parse(ask(prompts(9), 4, end_id=NEVER)), answers.append)
    engine.close()
    assert answers[-1].problem
