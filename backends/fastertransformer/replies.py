"""One thread sends all answers to Triton, and polls which clients have disconnected.

``execute`` only opens a reply and returns, so the next requests enter while this one is computed; its answers are sent
later through Triton's response sender, which non-decoupled models may use too (seen with Triton 2.51).

One thread owns all senders. Sending takes 0.04 to 0.3 ms and polling a client 0.08 to 0.25 ms (measured, Triton 2.51),
for which the engine's steps must not wait. A sender must not be polled once its final answer is sent: Triton has freed
the memory that it would read. (With several threads that send and another that polls, tritonserver died under the load
of ``benchmarks.serving.under_load``.) Requests take turns. If tokens are generated faster than Triton sends them, an
answer that has waited for long is skipped: the newest one holds all its tokens. While answers to other requests wait
this is so much earlier, and the engine does not make more of them, for each answer takes Python's lock from its steps.
The empty response that ends a stream takes a turn of its own: where many streams end in one step, their last tokens do
not wait for it.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .direct.reply import DirectReply
from .engine.rows.answer import CANCELLED, Answer, Failure, Tensors

_NOTHING = Tensors({})  # of the response that only says that there are no more
_TEXT_START = "text_start"
_LONGEST_NAME = 128  # characters of a request's name that are logged
_MAX_REPLY_AGE_S = 0.1  # an older answer that is followed by another is dropped
_MAX_REPLY_AGE_BUSY_S = 5e-3  # older partial answers are dropped while other requests' answers wait
_ENTRIES_PER_REQUEST = 2  # one answer and one poll
_FIRST_PAUSE_S = 5e-3  # before a client is polled for the first time: its context is run then
_LEAST_PAUSE_S = 10e-3  # between two polls of one client
_POLL_DELAY_S = 10e-3  # by which a poll that is due is delayed if an answer is to be sent
_POLL_SHARE = 0.2  # of the thread's time, at most


class Reply:
    """The answers to one request; any thread may call its methods, which return at once.

    Args:
        request: Triton's.
        announce: is called when an answer is to be sent (false), and when the client is to be polled (true).
        deadline: of time.monotonic, after which the request is cancelled.
        is_crowded: returns whether answers to other requests wait.
    """

    def __init__(
        self,
        request: Any,
        announce: Callable[[Reply, bool], None],
        deadline: float = math.inf,
        is_crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name: str = request.request_id()  # the client's, of any length and content; empty: it gave none
        self.is_cancelled = False  # whether the client has disconnected or cancelled the request
        self.sender = request.get_response_sender()  # must not be used once ``sent`` is set
        self.wanted = frozenset(request.requested_output_names())
        self.waiting: deque[tuple[float, Answer]] = deque()  # and when each came
        self.opened, self.sent = time.monotonic(), threading.Event()
        self.last_lengths: npt.NDArray[Any] | None = None  # sequence_length of the last answer, [B, beam]
        self._announce, self._deadline, self._lock, self._calls = announce, deadline, threading.Lock(), 0
        self._is_crowded = is_crowded

    def has_gone(self) -> bool:
        """Return whether the client has disconnected; the engine calls it between its steps.

        The client is polled from the second call on: before the first step this would only wake a thread that competes
        with the engine's, and no request can be cancelled in that step.
        """
        self._calls += 1
        if self._calls == 2:
            self._announce(self, True)
        return self.is_cancelled or self.has_expired

    def is_behind(self) -> bool:
        """Return whether an answer has waited for long, as answers to other requests do; the engine calls it.

        Another answer would only replace it, and what comes later has all its tokens.
        """
        with self._lock:
            came = self.waiting[0][0] if self.waiting else math.inf
        return time.monotonic() - came > _MAX_REPLY_AGE_BUSY_S and self._is_crowded()

    @property
    def has_expired(self) -> bool:
        """Whether the request's time limit is exceeded."""
        return time.monotonic() > self._deadline

    def send(self, answer: Answer) -> None:
        """Send one answer; a decoupled model may send several."""
        with self._lock:
            is_first = not self.waiting
            self.waiting.append((time.monotonic(), answer))
        if is_first:
            self._announce(self, False)

    def pop(self) -> Answer:
        """Return the next answer to be sent; if another one is waiting, announce that.

        Answers that have waited for long are skipped for the newest one.
        """
        longest_wait_s = _MAX_REPLY_AGE_BUSY_S if self._is_crowded() else _MAX_REPLY_AGE_S
        with self._lock:
            came, answer = self.waiting.popleft()
            if self.waiting and time.monotonic() - came > longest_wait_s:
                _, answer = self.waiting.pop()
                self.waiting.clear()
            has_more = bool(self.waiting)
        if has_more:
            self._announce(self, False)
        return answer


class _Failed(NamedTuple):
    """A request that did not come through Triton and has failed."""

    name: str
    failure: Failure


class Replies:
    """The thread that sends answers and polls clients.

    Args:
        triton: the module triton_python_backend_utils.
        output_types: numpy type of each output in config.pbtxt.
        has_axis: whether outputs get a first axis of length 1, as models with sequence batching have it.
        labels: of the metrics.
        is_decoupled: whether a request has several answers. An empty response then follows the last one: pytriton's
            client expects a final response without content.
        limit_s: seconds after which a request is cancelled; 0: never.
    """

    def __init__(
        self,
        triton: Any,
        output_types: Mapping[str, Any],
        has_axis: bool,
        labels: Mapping[str, str],
        is_decoupled: bool = False,
        limit_s: float = 0.0,
    ) -> None:
        self._triton, self._output_types, self._has_axis = triton, output_types, has_axis
        self._is_decoupled, self._limit_s = is_decoupled, limit_s or math.inf
        # Triton's own nv_inference_request_failure{reason="CANCELED"} stays 0 for decoupled models (2.51).
        # Its nv_inference_request_duration_us ends where execute returns, long before the answer.
        counters = {
            "slipway_request_cancelled": "Requests given up because their client went away or cancelled them",
            "slipway_request_duration_us": "Time from execute to the final answer of requests that succeeded",
        }
        self._families: list[Any] | None = [
            triton.MetricFamily(name=name, description=meaning, kind=triton.MetricFamily.COUNTER)
            for name, meaning in counters.items()
        ]
        self._cancelled, self._duration_us = (family.Metric(labels=dict(labels)) for family in self._families)
        # Replies with an answer to send (false), and replies whose clients are to be polled (true).
        self._ready: queue.SimpleQueue[tuple[Reply, bool] | _Failed | None] = queue.SimpleQueue()
        self._polled: deque[Reply] = deque()  # used by the thread alone; the next one to be polled is the first
        self._thread = threading.Thread(target=self._run, name="replies", daemon=True)
        self._thread.start()

    def open(self, request: Any) -> Reply:
        """Open the reply to a request."""
        return Reply(
            request,
            announce=lambda *entry: self._ready.put(entry),
            deadline=time.monotonic() + self._limit_s,
            is_crowded=lambda: self._ready.qsize() > _ENTRIES_PER_REQUEST,
        )

    def close(self) -> None:
        """End the thread, once every final answer is sent, and free the metrics.

        A metric is in shared memory of Triton's stub, where it is cleared when Python frees it. When the interpreter
        ends, that memory is unmapped before: the stub would end by SIGSEGV (Triton 2.51).
        """
        self._ready.put(None)
        self._thread.join()
        self._cancelled = self._duration_us = self._families = None

    def _run(self) -> None:
        next_poll = 0.0
        while True:
            pause = max(0.0, next_poll + _POLL_DELAY_S - time.monotonic()) if self._polled else None
            try:
                item = self._ready.get(timeout=pause)
            except queue.Empty:
                next_poll = self._poll_next()
                continue
            if item is None:
                if self._ready.empty():
                    return
                self._ready.put(None)  # what ends a stream is queued when its last answer is sent
                continue
            was_polling = bool(self._polled)
            try:
                self._take(item)
            except Exception as error:  # of this request alone: the thread goes on
                self._triton.Logger.log_error(f"a request was not answered: {error!r}")
            if self._polled and not was_polling:
                next_poll = time.monotonic() + _FIRST_PAUSE_S
            delay = 0.0 if self._ready.empty() else _POLL_DELAY_S
            if self._polled and time.monotonic() >= next_poll + delay:
                next_poll = self._poll_next()

    def _take(self, item: tuple[Reply, bool] | _Failed) -> None:
        if isinstance(item, _Failed):
            self._note_failure(*item)
            return
        reply, is_new = item
        if not is_new:
            self._send_next(reply)
        elif not reply.sent.is_set():
            self._polled.append(reply)

    def _poll_next(self) -> float:
        """Poll one client; returns the time of the next poll."""
        start, reply = time.monotonic(), self._polled[0]
        with suppress(Exception):  # what cannot be polled stays until it is answered
            reply.is_cancelled = reply.is_cancelled or bool(reply.sender.is_cancelled())
        self._polled.rotate(-1)
        now = time.monotonic()
        return now + max((now - start) / _POLL_SHARE, _LEAST_PAUSE_S / len(self._polled))

    def _send_next(self, reply: Reply) -> None:
        answer = reply.pop()
        is_last, has_failed = answer.is_final, isinstance(answer, Failure)
        ends_empty = is_last and self._is_decoupled and answer is not _NOTHING and not has_failed
        is_final = is_last and not ends_empty
        try:
            self._send(reply, answer, is_final)
        except Exception as error:  # whatever Triton raises concerns this request alone
            self._triton.Logger.log_error(f"an answer could not be sent: {error}")
            reply.is_cancelled = True
        if is_last:
            with suppress(ValueError):  # answered before it was polled
                self._polled.remove(reply)
        if ends_empty:  # after the answers to others that wait
            reply.send(_NOTHING)
        if is_final:
            if not has_failed and not reply.is_cancelled:
                self._duration_us.increment((time.monotonic() - reply.opened) * 1e6)
            reply.sent.set()

    def note_end(self, reply: DirectReply, answer: Answer) -> None:
        """Count and log the failure of a request that did not come through Triton; any thread may call it.

        The thread does it: two threads that change one metric crash tritonserver (Triton 2.51).
        """
        if isinstance(answer, Failure):
            self._ready.put(_Failed(reply.name, answer))

    def _note_failure(self, name: str, failure: Failure) -> None:
        if failure.code == CANCELLED:
            self._cancelled.increment(1)
        else:
            what = f"{failure.code}: {failure.logged or failure.problem}"
            self._triton.Logger.log_warn(f"request {name[:_LONGEST_NAME]!r}: {what}")

    def _send(self, reply: Reply, answer: Answer, is_final: bool) -> None:
        flags = self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0
        if answer is _NOTHING:
            reply.sender.send(flags=flags)
            return
        match answer:
            case Failure(problem, code):
                self._note_failure(reply.name, answer)
                error = self._triton.TritonError(problem, getattr(self._triton.TritonError, code))
                response = self._triton.InferenceResponse(output_tensors=[], error=error)
            case Tensors(tensors):
                response = self._response(reply, tensors)
        reply.sender.send(response, flags=flags)

    def _response(self, reply: Reply, tensors: Mapping[str, npt.NDArray[Any]]) -> Any:
        outputs = []
        if _TEXT_START in reply.wanted:
            tensors = {**tensors, _TEXT_START: _text_start(reply, tensors)}
        for name, array in tensors.items():
            if name in reply.wanted:
                typed = np.asarray(array, self._output_types.get(name, array.dtype))
                outputs.append(self._triton.Tensor(name, typed[None] if self._has_axis else typed))
        return self._triton.InferenceResponse(output_tensors=outputs)


def _text_start(reply: Reply, tensors: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Give, [B, beam], the number of tokens before the first one that the previous answer did not have.

    In the first answer this is the input's length, if the input is shown. With several beams it is so in every answer,
    for an answer's beams need not continue those of the previous one.
    """
    lengths = np.asarray(tensors["sequence_length"])
    start = reply.last_lengths
    if start is None or lengths.shape[-1] > 1:
        start = np.asarray(tensors.get("response_input_lengths", np.zeros_like(lengths)))
    reply.last_lengths = lengths.copy()
    return np.broadcast_to(np.asarray(start, np.int32), lengths.shape)
