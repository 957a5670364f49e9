"""Answers leave in order, through one thread, and a client that has gone is noticed."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.servers.fake_pb_utils import FakePbUtils, FakeRequest, FakeSender

from backends.fastertransformer import replies as module
from backends.fastertransformer.engine.rows.answer import Failure, Tensors
from backends.fastertransformer.replies import Replies, Reply

IDS = np.array([[[1, 2, 3]]], np.int64)


@pytest.fixture
def replies() -> Iterator[Replies]:
    opened = Replies(FakePbUtils("pb_utils"), {"output_ids": np.int32}, has_axis=False, labels={})
    yield opened
    opened.close()
    assert not opened._thread.is_alive()


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def ask_twice(reply: Reply) -> None:
    """Ask as the engine does before its first and its second step."""
    assert [reply.has_gone(), reply.has_gone()] == [False, False]


def test_no_client_is_asked_before_the_second_step(replies: Replies) -> None:
    request = FakeRequest({})
    reply = replies.open(request)
    assert not reply.has_gone()
    time.sleep(0.05)
    assert not request.questions
    ask_twice(reply)
    wait_until(lambda: request.questions > 2)
    request.is_cancelled = True
    wait_until(reply.has_gone)
    reply.send(Tensors({}))
    reply.sent.wait()


def test_answers_arrive_in_order_and_only_the_last_is_final(replies: Replies) -> None:
    request = FakeRequest({})
    reply = replies.open(request)
    for count in range(1, 50):
        reply.send(Tensors({"output_ids": np.full((1, 1, count), count), "other": IDS}, count == 49))
    reply.sent.wait()
    assert [response.outputs["output_ids"].shape[-1] for response in request.responses] == list(range(1, 50))
    assert request.is_finished.is_set()
    assert {name for response in request.responses for name in response.outputs} == {"output_ids"}  # as asked for


def hold_sends(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[FakeRequest]]:
    """Let no answer pass before the event is set; the list tells whose passed, in order."""
    send, is_free, passed = FakeSender.send, threading.Event(), []

    def send_when_free(sender: FakeSender, response: Any = None, flags: int = 0) -> None:
        assert is_free.wait(240)
        passed.append(sender._request)
        send(sender, response, flags)

    monkeypatch.setattr(FakeSender, "send", send_when_free)
    return is_free, passed


def lengths_of(request: FakeRequest) -> list[int]:
    return [response.outputs["output_ids"].shape[-1] for response in request.responses]


@pytest.mark.parametrize(("longest_wait_s", "expected"), [(0.0, [1, 40]), (100.0, list(range(1, 41)))])
def test_what_has_waited_for_long_is_left_out_and_the_last_answer_is_not(
    replies: Replies, monkeypatch: pytest.MonkeyPatch, longest_wait_s: float, expected: list[int]
) -> None:
    monkeypatch.setattr(module, "_MAX_REPLY_AGE_S", longest_wait_s)
    request = FakeRequest({})
    is_free, _ = hold_sends(monkeypatch)
    reply = replies.open(request)
    reply.send(Tensors({"output_ids": np.zeros((1, 1, 1))}, False))
    wait_until(lambda: not reply.waiting)
    for count in range(2, 41):
        reply.send(Tensors({"output_ids": np.zeros((1, 1, count))}, count == 40))
    is_free.set()
    request.wait()
    assert lengths_of(request) == expected


def test_more_is_left_out_while_other_requests_wait(replies: Replies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_REPLY_AGE_BUSY_S", 0.0)
    monkeypatch.setattr(module, "_MAX_REPLY_AGE_S", 100.0)
    first, *requests = (FakeRequest({}) for _ in range(6))
    is_free, _ = hold_sends(monkeypatch)
    held = replies.open(first)
    held.send(Tensors({"output_ids": IDS}))
    wait_until(lambda: not held.waiting)
    opened = [replies.open(request) for request in requests]
    assert not any(reply.is_behind() for reply in opened)
    for reply in opened:
        for count in range(1, 41):
            reply.send(Tensors({"output_ids": np.zeros((1, 1, count))}, count == 40))
    assert not held.is_behind() and all(reply.is_behind() for reply in opened)
    is_free.set()
    for request in requests:
        request.wait()
    assert [lengths_of(request) for request in requests[:2]] == [[40], [40]]  # others wait
    assert lengths_of(requests[-1]) == list(range(1, 41))  # no other request waits


def test_a_stream_alone_is_not_behind(replies: Replies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_REPLY_AGE_BUSY_S", 0.0)
    is_free, _ = hold_sends(monkeypatch)
    reply = replies.open(FakeRequest({}))
    for count in range(1, 10):
        reply.has_gone()
        assert not reply.is_behind()
        reply.send(Tensors({"output_ids": np.zeros((1, 1, count))}, count == 9))
    is_free.set()
    reply.sent.wait()


def test_what_ends_a_stream_waits_for_the_last_tokens_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Replies(FakePbUtils("pb_utils"), {}, has_axis=False, labels={}, is_decoupled=True)
    is_free, passed = hold_sends(monkeypatch)
    requests = [FakeRequest({}) for _ in range(4)]
    held = [opened.open(request) for request in requests]
    for reply in held:
        reply.send(Tensors({"output_ids": IDS}))
    is_free.set()
    opened.close()  # even then all are ended
    assert passed == requests * 2
    assert all(request.ends_empty and request.is_finished.is_set() for request in requests)
    assert all(reply.sent.is_set() for reply in held)


def test_requests_take_turns(replies: Replies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_REPLY_AGE_S", 100.0)
    monkeypatch.setattr(module, "_MAX_REPLY_AGE_BUSY_S", 100.0)
    late = FakeRequest({})
    is_free, passed = hold_sends(monkeypatch)
    early = [FakeRequest({}) for _ in range(8)]
    for request in early:
        reply = replies.open(request)
        for count in range(1, 100):
            reply.send(Tensors({"output_ids": np.zeros((1, 1, count))}, count == 99))
    replies.open(late).send(Tensors({"output_ids": IDS}))
    is_free.set()
    for request in early:
        request.wait()
        assert lengths_of(request) == list(range(1, 100))
    assert passed.index(late) < 4 * len(early)  # of 99 each


def test_outputs_have_the_type_of_the_configuration(replies: Replies) -> None:
    request = FakeRequest({}, ("output_ids", "cum_log_probs"))
    replies.open(request).send(Tensors({"output_ids": IDS, "cum_log_probs": np.zeros((1, 1), np.float32)}))
    outputs = request.wait().outputs
    assert (outputs["output_ids"].dtype, outputs["cum_log_probs"].dtype) == (np.int32, np.float32)


def test_a_stateful_model_answers_with_one_axis_more() -> None:
    opened = Replies(FakePbUtils("pb_utils"), {}, has_axis=True, labels={})
    request = FakeRequest({})
    opened.open(request).send(Tensors({"output_ids": IDS}))
    assert request.wait().outputs["output_ids"].shape == (1, 1, 1, 3)
    opened.close()


def test_the_time_to_the_final_answer_is_counted_for_requests_that_succeed(replies: Replies) -> None:
    durations = FakePbUtils.MetricFamily.counts
    before = durations["slipway_request_duration_us"]
    failing, slow = replies.open(FakeRequest({})), replies.open(FakeRequest({}))
    failing.send(Failure("no"))
    slow.send(Tensors({"output_ids": IDS}, False))
    failing.sent.wait()
    assert durations["slipway_request_duration_us"] == before
    time.sleep(0.05)
    slow.send(Tensors({"output_ids": IDS}))
    slow.sent.wait()
    assert 50_000 <= durations["slipway_request_duration_us"] - before < 20e6


def test_a_failure_is_the_final_answer_and_is_logged_by_the_clients_name_for_it(replies: Replies) -> None:
    request = FakeRequest({}, name="order 66\nW1123 another line " + "x" * 200)
    replies.open(request).send(Failure("input_ids has no rows", "INVALID_ARG"))
    error = request.wait().error
    assert (error.text, error.code) == ("input_ids has no rows", FakePbUtils.TritonError.INVALID_ARG)
    line = FakePbUtils.Logger.lines[-1]
    assert line.startswith(r"request 'order 66\nW1123 another line xxx") and "x" * 128 not in line
    assert line.endswith("xxx': INVALID_ARG: input_ids has no rows")


def test_what_a_failure_quotes_of_the_request_is_not_logged(replies: Replies) -> None:
    request = FakeRequest({}, name="order 67")
    problem, logged = "the regular expression (my secret is wrong", "a regular expression is wrong"
    replies.open(request).send(Failure(problem, "INVALID_ARG", logged))
    error = request.wait().error
    assert error.text == "the regular expression (my secret is wrong"
    assert FakePbUtils.Logger.lines[-1] == "request 'order 67': INVALID_ARG: a regular expression is wrong"


def test_whatever_fails_in_the_thread_that_answers_others_are_answered(replies: Replies) -> None:
    asked: Any = SimpleNamespace(name=5)
    replies.note_end(asked, Failure("no", "INVALID_ARG"))
    unpolled = FakeRequest({})
    reply = replies.open(unpolled)
    reply.sender.is_cancelled = None  # not to be called
    ask_twice(reply)
    time.sleep(0.05)
    request = FakeRequest({})
    replies.open(request).send(Tensors({"output_ids": IDS}))
    assert request.wait().outputs["output_ids"].tolist() == IDS.tolist()
    reply.send(Tensors({"output_ids": IDS}))
    assert unpolled.wait().outputs["output_ids"].tolist() == IDS.tolist()


def test_a_client_that_has_gone_is_noticed_soon_among_many(replies: Replies) -> None:
    requests = [FakeRequest({}) for _ in range(64)]
    opened = [replies.open(request) for request in requests]
    for reply in opened:
        ask_twice(reply)
    wait_until(lambda: all(request.questions for request in requests))
    requests[40].is_cancelled = True
    start = time.monotonic()
    wait_until(lambda: opened[40].is_cancelled)
    assert time.monotonic() - start < 5
    assert [reply.is_cancelled for reply in opened].count(True) == 1
    for reply in opened:  # the fake fails the thread if it asks after a final answer
        reply.send(Tensors({}))
    for reply in opened:
        reply.sent.wait()


def test_no_client_is_asked_when_nothing_is_open(replies: Replies) -> None:
    request = FakeRequest({})
    reply = replies.open(request)
    ask_twice(reply)
    reply.send(Tensors({}))
    request.wait()
    asked = request.questions
    time.sleep(0.02)
    assert request.questions == asked


def test_a_client_whose_answer_came_before_it_was_watched_is_not_asked(replies: Replies) -> None:
    early, open_one = FakeRequest({}), FakeRequest({})
    reply = replies.open(early)
    reply.send(Tensors({}))
    early.wait()
    ask_twice(reply)
    other = replies.open(open_one)
    ask_twice(other)
    wait_until(lambda: open_one.questions > 2)
    assert not early.questions
    other.send(Tensors({}))
    other.sent.wait()


def test_an_answer_that_cannot_be_sent_concerns_its_request_alone(
    replies: Replies, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = FakeSender.send

    def fail_for_one(sender: FakeSender, response: Any, flags: int = 0) -> None:
        if sender._request is broken:
            raise RuntimeError("the shared memory is full")
        send(sender, response, flags)

    monkeypatch.setattr(FakeSender, "send", fail_for_one)
    broken, healthy = FakeRequest({}), FakeRequest({})
    reply = replies.open(broken)
    reply.send(Tensors({"output_ids": IDS}, False))
    wait_until(lambda: reply.is_cancelled)  # the engine stops working on it
    reply.send(Tensors({"output_ids": IDS}))
    replies.open(healthy).send(Tensors({"output_ids": IDS}))
    assert healthy.wait().error is None and not broken.responses
    assert "the shared memory is full" in FakePbUtils.Logger.lines[-1]


def test_the_metric_is_given_back_before_the_interpreter_ends() -> None:
    """Triton's stub frees a metric's shared memory before its interpreter ends; one that is freed later crashes it."""
    opened = Replies(FakePbUtils("pb_utils"), {}, has_axis=False, labels={})
    assert opened._families is not None
    freed = [*opened._families, opened._cancelled, opened._duration_us]
    metrics = [weakref.ref(metric) for metric in freed]
    freed.clear()
    opened.close()
    assert [metric() for metric in metrics] == [None] * 4
