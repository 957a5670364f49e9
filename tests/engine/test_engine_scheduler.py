"""In-flight batching: who is in a step, what each gets, what one request's trouble does to the others."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.engines.asking import CPU, Tensors, ask, generated, padded, prompts, tiny_gpt2, word_list
from support.engines.paged_steps import paged_steps
from support.shards.llama_shards import settings_of

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.loading import load_steps
from backends.fastertransformer.engine.ops.packed_rows import Rows
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps

NEVER = 4000  # an end_id outside the vocabulary
SETUPS = [(4, True, 0), (64, True, 90), (64, True, 9), (5, False, 0)]


ALSO_A_LLAMA = pytest.mark.parametrize("settings", ["gpt2", "gemma2"], indirect=True)


@pytest.fixture(scope="module")
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    name = getattr(request, "param", "gpt2")
    folder = tmp_path_factory.mktemp(name)
    return tiny_gpt2(folder)[1] if name == "gpt2" else settings_of(name, folder)[1]


@pytest.fixture(scope="module")
def steps(settings: Settings) -> Steps:
    return load_steps(settings, CPU)[0]


@pytest.fixture(scope="module")
def engine(settings: Settings) -> Engine:
    return open_engine(settings, CPU)


class Client:
    """One submitted request and its answers."""

    def __init__(self, scheduler: Scheduler, steps: Steps, tensors: Tensors, is_streaming: bool = False) -> None:
        self.answers: list[Answer] = []
        self.is_cancelled = False
        request = parse_request(tensors, steps.config)
        self.job = Job(request, self.answers.append, is_streaming, lambda: self.is_cancelled)
        scheduler.add(self.job)
        self.sequences = self.job.sequences  # which it has until it is answered

    @property
    def tokens(self) -> list[int]:
        assert not isinstance(self.answers[-1], Failure), self.answers[-1]
        return generated(self.answers[-1].tensors)

    @property
    def count(self) -> int:
        return len(self.sequences[0].beams[0].tokens)


def run(scheduler: Scheduler) -> int:
    count = 0
    while not scheduler.is_idle:
        scheduler.step()
        count += 1
    return count


def test_what_is_answered_is_freed_without_a_search_for_garbage(steps: Steps) -> None:
    """Which takes 30 ms for some hundred requests, and all rows wait for it."""
    scheduler, freed = Scheduler(steps, 8), list[weakref.ref[Any]]()
    gc.collect()
    gc.disable()
    try:
        for tensors in (ask(prompts(5), 4, end_id=NEVER), ask(prompts(3, 8), 6, end_id=NEVER, beam_width=2)):
            for is_streaming, is_cancelled in ((True, False), (False, False), (True, True)):
                client = Client(scheduler, steps, tensors, is_streaming)
                freed += map(weakref.ref, (client.job, *client.sequences))
                scheduler.step()
                client.is_cancelled = is_cancelled
                run(scheduler)
                assert client.answers[-1].is_final
                del client.job, client.sequences
        Client(scheduler, steps, ask(prompts(4), 2))  # the sampler knows the last step's rows until the next one
        run(scheduler)
        assert len(freed) == 3 * (2 + 3) and not any(ref() for ref in freed)
    finally:
        gc.enable()


def many_requests(count: int) -> list[Tensors]:
    """All kinds, by chance."""
    generator = np.random.default_rng(3)
    requests = []
    for index in range(count):
        rows = prompts(*generator.integers(1, 14, generator.integers(1, 4)).tolist(), seed=index)
        scalars: dict[str, Any] = {"random_seed": index, "is_return_log_probs": bool(index % 3)}
        kind = index % 6
        if kind == 1:
            scalars |= {"runtime_top_k": 5, "temperature": 1.7}
        elif kind == 2:
            scalars |= {"runtime_top_p": 0.9, "top_p_decay": 0.8, "top_p_min": 0.3, "repetition_penalty": 1.3}
        elif kind == 3:
            scalars |= {"beam_width": 3, "beam_search_diversity_rate": 0.2}
        elif kind == 4:
            scalars |= {"presence_penalty": 0.8, "min_length": 6}
        elif kind == 5:
            stops = np.repeat(word_list([[5], [17, 3], [40]]), len(rows), 0)
            scalars |= {"runtime_top_k": 9, "stop_words_list": stops, "bad_words_list": stops[:, :, ::-1][:, :, :1] * 0}
            scalars["bad_words_list"][:, 1] = -1
        if index % 2 and kind != 3:
            scalars |= {"frequency_penalty": 0.4 * kind, "min_p": 0.02, "num_top_log_probs": index % 4, "end_id": 50}
        requests.append(ask(rows, generator.integers(0, 20, len(rows)), **scalars))
        if index % 4 == 1 and kind != 3:
            requests[-1]["logit_bias_ids"] = padded([[row, 40 + row] for row in range(len(rows))])
            requests[-1]["logit_bias_values"] = padded([[3.0, -9.0]] * len(rows), np.float32)
            requests[-1]["stop_token_ids"] = padded([[7 * row + 1] for row in range(len(rows))])
    return requests


@pytest.mark.parametrize(
    ("max_rows", "is_inflight", "pages", "steps_ahead"),
    [
        *((4, True, 0, True), (64, True, 90, False), (64, True, 9, True), (5, False, 0, False)),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((4, True, 0, False), (64, True, 90, True), (64, True, 9, False), (5, False, 0, True))
        ),
    ],
)
def test_requests_that_come_at_any_time_get_what_they_get_alone(
    engine: Engine, settings: Settings, steps: Steps, max_rows: int, is_inflight: bool, pages: int, steps_ahead: bool
) -> None:
    requests = many_requests(24)
    alone = [engine.generate([engine.parse(tensors)])[0] for tensors in requests]
    steps = paged_steps(settings, pages) if pages else steps
    scheduler = Scheduler(steps, max_rows, is_inflight=is_inflight, steps_ahead=steps_ahead)
    generator, clients = np.random.default_rng(9), []
    for tensors in requests:
        clients.append(Client(scheduler, steps, tensors))
        for _ in range(generator.integers(0, 5)):
            scheduler.step()
            assert len(scheduler._batch) <= max_rows
    run(scheduler)
    for client, expected in zip(clients, alone, strict=True):
        (answer,) = client.answers
        assert answer.is_final and answer.tensors and set(answer.tensors) == set(expected)
        for name in ("output_ids", "sequence_length", "response_input_lengths", "finish_reason"):
            np.testing.assert_array_equal(answer.tensors[name], expected[name])
        for name in set(expected) & {
            "cum_log_probs",
            "output_log_probs",
            "output_raw_log_probs",
            "output_top_log_probs",
        }:
            np.testing.assert_allclose(answer.tensors[name], expected[name], atol=1e-4)
    assert steps.cache.allocator.free == steps.cache.allocator.count and not steps.cache.page_tables.any()
    assert not pages or steps.cache.allocator.count == pages


def test_running_ahead_asks_for_a_step_before_the_last_ones_tokens_are_known(steps: Steps) -> None:
    """It runs no step that no request needs, where lengths alone say when a request ends."""
    scheduler = Scheduler(steps, 8, steps_ahead=True)
    streams = [Client(scheduler, steps, ask(prompts(4), count, end_id=NEVER), is_streaming=True) for count in (3, 6)]
    asked: list[int] = []
    while not scheduler.is_idle:
        scheduler.step()
        asked.append(len(scheduler._batch.pending))
        assert len(streams[1].answers) == streams[1].count
    assert asked == [1, 1, 1, 1, 1, 1, 0]
    assert [len(each.answers) for each in streams] == [3, 6] and streams[1].count == 6


def test_a_stream_whose_answers_wait_gets_no_more_of_them_but_the_last(steps: Steps) -> None:
    scheduler = Scheduler(steps, 8)
    alone, behind = (Client(scheduler, steps, ask(prompts(4), 9, end_id=NEVER), is_streaming=True) for _ in range(2))
    behind.job.is_behind = lambda: behind.count in (2, 3, 4, 9)
    run(scheduler)
    counts = [[len(generated(answer.tensors)) for answer in each.answers if answer.tensors] for each in (alone, behind)]
    assert counts == [list(range(1, 10)), [1, 5, 6, 7, 8, 9]]
    assert behind.answers[-1].is_final and behind.tokens == alone.tokens


def test_a_late_request_joins_at_the_next_step_and_leaves_when_it_is_done(steps: Steps) -> None:
    scheduler = Scheduler(steps, 8)
    long = Client(scheduler, steps, ask(prompts(4), 30, end_id=NEVER))
    for _ in range(5):
        scheduler.step()
    short = Client(scheduler, steps, ask(prompts(6), 3, end_id=NEVER))
    scheduler.step()
    assert (long.count, short.count) == (6, 1)
    scheduler.step()
    scheduler.step()
    assert len(short.answers) == 1 and short.answers[0].is_final and not long.answers
    assert run(scheduler) == 30 - 8 and long.count == 30


def joined_in_order(scheduler: Scheduler, clients: list[Client]) -> list[int]:
    """Run all, one row at a time; returns the clients in the order in which they had their first token."""
    found = list[int]()
    while not scheduler.is_idle:
        scheduler.step()
        found += [place for place, client in enumerate(clients) if client.count and place not in found]
    return found


def test_of_requests_that_arrive_in_one_step_those_with_the_most_tokens_join_first(steps: Steps) -> None:
    scheduler = Scheduler(steps, 1)
    clients = [Client(scheduler, steps, ask(prompts(3), 5, end_id=NEVER))]
    scheduler.step()
    clients += [Client(scheduler, steps, ask(prompts(3), count, end_id=NEVER)) for count in (2, 4, 3, 4)]
    scheduler.step()
    clients += [Client(scheduler, steps, ask(prompts(3), 9, end_id=NEVER))]  # asks for more, but came later
    assert joined_in_order(scheduler, clients) == [0, 2, 4, 3, 1, 5]


def test_the_rows_of_a_request_that_waits_stay_together_and_one_that_is_cancelled_leaves_the_order(
    steps: Steps,
) -> None:
    scheduler = Scheduler(steps, 1)
    clients = [
        Client(scheduler, steps, ask(lines, count, end_id=NEVER)) for lines, count in ((prompts(3), 2), (prompts(3), 4))
    ]
    clients += [
        Client(scheduler, steps, ask(prompts(3, 4), 3, end_id=NEVER)),
        Client(scheduler, steps, ask(prompts(3), 6)),
    ]
    clients[-1].is_cancelled = True
    scheduler.step()
    waiting = [(each.job, each.row) for each in scheduler._waiting]
    assert waiting == [(clients[2].job, 0), (clients[2].job, 1), (clients[0].job, 0)]
    run(scheduler)
    assert [getattr(client.answers[-1], "problem", None) for client in clients] == [None, None, None, "cancelled"]


def test_requests_that_arrive_with_one_of_a_session_keep_their_order(steps: Steps) -> None:
    scheduler = Scheduler(steps, 1)
    begins = ask(prompts(3), 2, end_id=NEVER) | {"START": np.ones(1, np.int32)}
    begins["session_len"] = np.full((1, 1), 40, np.uint32)
    scheduler.add(Job(parse_request(begins, steps.config), lambda answer: None, session=7))
    later = Client(scheduler, steps, ask(prompts(3), 5, end_id=NEVER))
    scheduler.step()
    assert [each.job for each in scheduler._waiting] == [later.job]
    run(scheduler)


def test_a_static_batch_keeps_the_next_request_waiting(steps: Steps) -> None:
    scheduler = Scheduler(steps, 8, is_inflight=False)
    long = Client(scheduler, steps, ask(prompts(4), 10, end_id=NEVER))
    scheduler.step()
    short = Client(scheduler, steps, ask(prompts(6), 3, end_id=NEVER))
    for _ in range(9):
        scheduler.step()
    assert long.answers and not short.count
    assert run(scheduler) == 3 and len(short.tokens) == 3


def test_a_request_may_have_more_rows_than_a_batch(engine: Engine, steps: Steps) -> None:
    tensors = ask(prompts(3, 9, 5, 7, 2), 6)
    scheduler = Scheduler(steps, 2)
    client = Client(scheduler, steps, tensors)
    run(scheduler)
    assert client.answers[0].tensors
    expected = engine.generate([engine.parse(tensors)])[0]["output_ids"]
    np.testing.assert_array_equal(client.answers[0].tensors["output_ids"], expected)


def test_streaming_gives_the_output_so_far_after_every_token(engine: Engine, steps: Steps) -> None:
    tensors = ask(prompts(5), 12, end_id=NEVER, is_return_log_probs=True)
    scheduler = Scheduler(steps, 4)
    client = Client(scheduler, steps, tensors, is_streaming=True)
    run(scheduler)
    final = engine.generate([engine.parse(tensors)])[0]
    whole = generated(final)
    assert [answer.is_final for answer in client.answers] == [False] * 11 + [True]
    for count, answer in enumerate(client.answers, 1):
        assert answer.tensors and generated(answer.tensors) == whole[:count]
        assert answer.tensors["output_ids"].shape == final["output_ids"].shape
        assert set(answer.tensors["output_ids"][0, 0, 5 + count :].tolist()) <= {NEVER}
        np.testing.assert_allclose(
            answer.tensors["output_log_probs"][0, 0, :count], final["output_log_probs"][0, 0, :count]
        )


@pytest.mark.parametrize("is_streaming", [True, False])
def test_cancelling_stops_within_one_token(steps: Steps, is_streaming: bool) -> None:
    scheduler = Scheduler(steps, 8)
    other = Client(scheduler, steps, ask(prompts(4), 20, end_id=NEVER))
    client = Client(scheduler, steps, ask(prompts(5, 6), 30, end_id=NEVER), is_streaming)
    waiting = Client(scheduler, steps, ask(prompts(*[3] * 9), 5, end_id=NEVER))
    for _ in range(4):
        scheduler.step()
    client.is_cancelled = waiting.is_cancelled = True
    scheduler.step()
    for each in (client, waiting):
        last = each.answers[-1]
        assert isinstance(last, Failure) and last.code == "CANCELLED"
    assert client.count == 4 and len(client.answers) == (5 if is_streaming else 1)
    assert [sequence.job for sequence in scheduler._batch] == [other.job]
    run(scheduler)
    assert other.count == 20 and len(client.answers) == (5 if is_streaming else 1)


def test_the_cache_stays_within_its_budget_and_a_request_waits_for_room(settings: Settings) -> None:
    token_bytes = 3 * 2 * 32 * 4  # layers, k and v, hidden, fp32
    steps, _ = load_steps(replace(settings, kv_cache_bytes=3 * 32 * token_bytes), CPU)  # one page is unowned
    scheduler = Scheduler(steps, 64)
    first = Client(scheduler, steps, ask(prompts(10), 10, end_id=NEVER))
    second = Client(scheduler, steps, ask(prompts(5), 12, end_id=NEVER))
    third = Client(scheduler, steps, ask(prompts(2), 3, end_id=NEVER))
    too_long = Client(scheduler, steps, ask(prompts(5, 11), [20, 30], beam_width=2))
    assert too_long.answers[0].code == "INVALID_ARG"
    assert f"row 1 needs {128 * token_bytes} bytes of KV cache: 2 x 41 tokens" in str(too_long.answers[0].problem)
    assert f"there are {64 * token_bytes}" in str(too_long.answers[0].problem)
    wide = Client(scheduler, steps, ask(prompts(5), 6, beam_width=4))
    assert "4 x 11 tokens" in str(wide.answers[0].problem)
    scheduler.step()
    assert (first.count, second.count, third.count) == (1, 1, 0)  # three are too many
    while third.count == 0:
        scheduler.step()
        assert sum(block.numel() * 4 for block in steps.cache.kv) <= 96 * token_bytes
    assert first.answers and second.count == 11 and not second.answers
    run(scheduler)
    assert [len(each.tokens) for each in (first, second, third)] == [10, 12, 3]


@ALSO_A_LLAMA
def test_a_request_whose_context_fails_fails_alone(
    engine: Engine, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = steps.network.extend

    def explode(rows: Rows, *rest: Any) -> Any:
        if (rows.ids == 77).any():
            raise RuntimeError("out of memory")
        return extend(rows, *rest)

    monkeypatch.setattr(steps.network, "extend", explode)
    scheduler = Scheduler(steps, 8)
    tensors = [ask([[8, 9]], 9), ask([[1, 77, 2], [3, 4]], 9), ask([[5, 6, 7]], 4)]
    early = Client(scheduler, steps, tensors[0])
    scheduler.step()
    bad, good = (Client(scheduler, steps, each) for each in tensors[1:])
    run(scheduler)
    assert "out of memory" in str(bad.answers[0].problem) and bad.answers[0].code == "INTERNAL"
    for client, each in ((early, tensors[0]), (good, tensors[2])):
        assert client.tokens == generated(engine.generate([engine.parse(each)])[0])


def test_a_client_that_fails_to_take_its_answer_disturbs_no_other(engine: Engine, steps: Steps) -> None:
    def refuse(_: object = None) -> bool:
        raise ConnectionError("gone")

    scheduler = Scheduler(steps, 8)
    tensors = ask(prompts(4), 9, end_id=NEVER)
    request = parse_request(tensors, steps.config)
    scheduler.add(Job(request, refuse, is_streaming=True))
    scheduler.add(Job(request, refuse, is_cancelled=refuse))
    good = Client(scheduler, steps, tensors)
    scheduler.step()
    assert [sequence.job for sequence in scheduler._batch] == [good.job]
    run(scheduler)
    assert good.tokens == generated(engine.generate([engine.parse(tensors)])[0])


@ALSO_A_LLAMA
@pytest.mark.parametrize("is_inflight", [True, False])
def test_a_step_that_fails_because_of_one_request_fails_that_request_alone(
    engine: Engine, steps: Steps, monkeypatch: pytest.MonkeyPatch, is_inflight: bool
) -> None:
    tensors = [ask(prompts(4 + each, 3), 9, end_id=NEVER) for each in range(4)]
    alone = engine.generate([engine.parse(each) for each in tensors])
    decode, sizes = steps.network.decode, []

    def explode(ids: Any, *rest: Any) -> Any:
        if any(sequence.job is bad.job and sequence.count == 5 for sequence in scheduler._batch):
            sizes.append(len(ids))
            raise RuntimeError("out of memory")
        return decode(ids, *rest)

    monkeypatch.setattr(steps.network, "decode", explode)
    scheduler = Scheduler(steps, 8, is_inflight=is_inflight)
    clients = [Client(scheduler, steps, each, is_streaming=place == 2) for place, each in enumerate(tensors)]
    bad = clients[1]
    run(scheduler)
    assert sizes == [8, 1]
    assert "out of memory" in str(bad.answers[0].problem) and bad.answers[0].code == "INTERNAL"
    for place in (0, 2, 3):
        found = clients[place].answers[-1].tensors
        assert found, clients[place].answers[-1].problem
        np.testing.assert_array_equal(found["output_ids"], alone[place]["output_ids"])
    counts = [int(each.tensors["sequence_length"].sum()) for each in clients[2].answers if each.tensors]
    assert counts == sorted(set(counts)) and counts[:5] == [11, 13, 15, 17, 19]  # no token is streamed twice


@ALSO_A_LLAMA
def test_a_step_that_fails_once_is_taken_again(engine: Engine, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(steps, 8)
    tensors = [ask([[8, 9], [1, 2, 3]], 9), ask(prompts(4), 6, runtime_top_k=5, random_seed=3)]
    clients = [Client(scheduler, steps, each) for each in tensors]
    scheduler.step()
    with monkeypatch.context() as patch:
        patch.setattr(steps.network, "decode", lambda *_: 1 / 0)
        scheduler.step()
    late = Client(scheduler, steps, ask(prompts(5), 3))
    run(scheduler)
    for client, each in zip((*clients, late), (*tensors, ask(prompts(5), 3)), strict=True):
        found = client.answers[-1].tensors
        assert found, client.answers[-1].problem
        np.testing.assert_array_equal(found["output_ids"], engine.generate([engine.parse(each)])[0]["output_ids"])


def test_a_step_that_always_fails_answers_all_in_it_and_the_next_request_is_served(
    engine: Engine, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(steps, 8)
    tensors = ask(prompts(4), 9)
    clients = [Client(scheduler, steps, tensors) for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(steps.network, "decode", lambda *_: 1 / 0)
        run(scheduler)
    assert all("division" in str(client.answers[0].problem) for client in clients) and scheduler.is_idle
    after = Client(scheduler, steps, tensors)
    run(scheduler)
    assert after.tokens == generated(engine.generate([engine.parse(tensors)])[0])


def test_the_thread_survives_an_unexpected_error(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(settings, CPU)
    request = engine.parse(ask(prompts(4), 5))
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler._waiting, "admit", lambda: 1 / 0)
        with pytest.raises(EngineError, match="generation failed: division"):
            engine.generate([request])
    assert engine.generate([request])
    engine.close()


def test_giving_up_answers_every_request_of_the_batch(steps: Steps) -> None:
    scheduler = Scheduler(steps, 8)
    clients = [Client(scheduler, steps, ask(prompts(4 + each), 20, end_id=NEVER)) for each in range(4)]
    scheduler.step()
    scheduler.give_up("the end")
    assert [client.answers[-1].problem for client in clients] == ["the end"] * 4 and scheduler.is_idle


def test_many_threads_submit_at_once(engine: Engine) -> None:
    requests = many_requests(12)
    expected = [engine.generate([engine.parse(tensors)])[0]["output_ids"] for tensors in requests]
    found: dict[int, np.ndarray[Any, Any]] = {}

    def submit(index: int) -> None:
        found[index] = engine.generate([engine.parse(requests[index])])[0]["output_ids"]

    threads = [threading.Thread(target=submit, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    for index, ids in enumerate(expected):
        np.testing.assert_array_equal(found[index], ids)


def test_closing_answers_what_is_under_way(settings: Settings) -> None:
    engine = open_engine(settings, CPU)
    answers: list[Answer] = []
    begun, is_closing = threading.Event(), threading.Event()

    def take(answer: Answer) -> None:
        answers.append(answer)
        begun.set()
        assert is_closing.wait(240)  # the engine's thread takes no step meanwhile

    request = engine.parse(ask(prompts(4), 40, end_id=NEVER))
    engine.submit(request, take, is_streaming=True)
    assert begun.wait(240)
    waiting: list[Answer] = []
    engine.submit(request, waiting.append)
    closer = threading.Thread(target=engine.close)
    closer.start()
    while not engine._is_closed:
        time.sleep(0.01)
    is_closing.set()
    closer.join(240)
    engine.close()
    assert [(answer.is_final, answer.problem) for answer in waiting] == [(True, "the engine was closed")]
    with pytest.raises(EngineError, match="closed"):
        engine.submit(request, take)
    assert [(answer.is_final, getattr(answer, "problem", None)) for answer in answers] == [
        (False, None),
        (True, "the engine was closed"),
    ]
    assert answers[0].tensors and len(generated(answers[0].tensors)) == 1
