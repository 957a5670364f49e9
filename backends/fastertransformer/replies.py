"""Everything that is said to Triton about requests in work, by threads of its own.

``execute`` only opens a reply and returns, so the next requests enter while this one is still being worked on; its
answers are sent later through Triton's response sender, which non-decoupled models may use too (seen with Triton 2.51).

Sending costs the sender's process 0.04 to 0.3 ms and asking whether a client has gone 0.08 to 0.25 ms (measured,
Triton 2.51), which the engine's steps shall not wait for. Most of that is waiting for Triton, so several threads send.
Requests take turns. Where tokens come faster than Triton takes them, an answer that has waited for long is left out:
the next one says all that it said.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Tensors = Mapping[str, npt.NDArray[Any]]

_SENDERS = 4
_LONGEST_WAIT_S = 0.1  # of an answer that is followed by another
_FIRST_PAUSE_S = 5e-3  # before a client is asked for the first time: contexts are run then
_LEAST_PAUSE_S = 2e-3  # between two questions whether the same client has gone
_SHARE_OF_QUESTIONS = 0.2  # of the asking thread's time, at most


class Reply:
    """The answers to one request; any thread may call its methods, which return at once.

    Attributes:
        is_cancelled: whether the client has gone or no longer wants an answer.
        sender: Triton's. It must not be asked any more once the final answer is sent: what it would look at is freed.
        asking: held while it is asked, and while the final answer is sent.
        wanted: outputs.
        waiting: when each answer came, it, and whether it is final.
        is_queued: whether a thread will look after what is waiting.
    """

    def __init__(self, request: Any, announce: Callable[[Reply], None]) -> None:
        self.is_cancelled = False
        self.sender = request.get_response_sender()
        self.asking = threading.Lock()
        self.wanted = frozenset(request.requested_output_names())
        self.waiting: deque[tuple[float, Any, bool]] = deque()
        self.is_queued = False
        self._announce, self._lock, self._is_sent = announce, threading.Lock(), threading.Event()

    def send(self, tensors: Tensors, is_final: bool) -> None:
        """Send one answer; a decoupled model may send several."""
        self._post(tensors, is_final)

    def fail(self, problem: str, code: str) -> None:
        """Send an error as the final answer.

        Args:
            problem: for the client.
            code: a name of pb_utils.TritonError: INVALID_ARG (HTTP 400), INTERNAL (500), CANCELLED (499).
        """
        self._post((problem, code), True)

    def _post(self, content: Any, is_final: bool) -> None:
        with self._lock:
            self.waiting.append((time.monotonic(), content, is_final))
            is_new, self.is_queued = not self.is_queued, True
        if is_new:
            self._announce(self)

    def take(self) -> tuple[Any, bool]:
        """Give what is to be sent next, and whether it is the last."""
        with self._lock:
            came, content, is_final = self.waiting.popleft()
            if self.waiting and time.monotonic() - came > _LONGEST_WAIT_S:
                _, content, is_final = self.waiting.pop()
                self.waiting.clear()
            return content, is_final

    def go_on(self) -> bool:
        """Say whether more is waiting; else the next answer is announced again."""
        with self._lock:
            self.is_queued = bool(self.waiting)
            return self.is_queued

    def wait(self) -> None:
        """Wait until the final answer is sent."""
        self._is_sent.wait()

    def mark_sent(self) -> None:
        """Let those go who wait."""
        self._is_sent.set()


class Replies:
    """The threads that send answers, and the one that asks whether clients have gone.

    Args:
        triton: the module triton_python_backend_utils.
        output_types: numpy type of each output in config.pbtxt.
        has_axis: outputs get a first axis of length 1, as models with sequence batching have it.
        labels: of the metric that counts the requests whose client went away before they were done.
    """

    def __init__(self, triton: Any, output_types: Mapping[str, Any], has_axis: bool, labels: Mapping[str, str]) -> None:
        self._triton, self._output_types, self._has_axis = triton, output_types, has_axis
        # Triton's own nv_inference_request_failure{reason="CANCELED"} stays 0 for decoupled models (2.51).
        self._family = triton.MetricFamily(
            name="slipway_request_cancelled",
            description="Requests given up because their client went away or cancelled them",
            kind=triton.MetricFamily.COUNTER,
        )
        self._cancelled = self._family.Metric(labels=dict(labels))
        self._ready: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()  # replies that have something to send
        self._open: deque[Reply] = deque()  # the one to be asked next in front
        self._is_open, self._is_closed = threading.Condition(), False
        threads = [threading.Thread(target=self._send_all, name=f"replies {n}", daemon=True) for n in range(_SENDERS)]
        self.threads = (*threads, threading.Thread(target=self._ask_all, name="questions", daemon=True))
        for thread in self.threads:
            thread.start()

    def open(self, request: Any) -> Reply:
        """Take over the answering of a request."""
        reply = Reply(request, self._ready.put)
        with self._is_open:
            self._open.append(reply)
            if len(self._open) == 1:
                self._is_open.notify()
        return reply

    def close(self) -> None:
        """End the threads, when Triton has had every final answer."""
        with self._is_open:
            self._is_closed = True
            self._is_open.notify()
        for _ in range(_SENDERS):
            self._ready.put(None)
        for thread in self.threads:
            thread.join()

    def _send_all(self) -> None:
        while reply := self._ready.get():
            content, is_final = reply.take()
            if is_final:
                with self._is_open:
                    self._open.remove(reply)
                with reply.asking:
                    self._send(reply, content, is_final)
                reply.mark_sent()
            else:
                self._send(reply, content, is_final)
                if reply.go_on():
                    self._ready.put(reply)

    def _ask_all(self) -> None:
        while True:
            with self._is_open:
                pause_s = 0.0
                while not self._open and not self._is_closed:
                    self._is_open.wait()
                    pause_s = _FIRST_PAUSE_S
                if self._is_closed:
                    return
            time.sleep(pause_s)
            time.sleep(self._ask_next())

    def _ask_next(self) -> float:
        """Ask for one reply whether its client has gone; give the pause until the next question."""
        with self._is_open:
            if not self._open:
                return 0.0
            reply, count = self._open[0], len(self._open)
            self._open.rotate(-1)
            reply.asking.acquire()  # as long as it is open
        start = time.monotonic()
        try:
            reply.is_cancelled = reply.is_cancelled or bool(reply.sender.is_cancelled())
        finally:
            reply.asking.release()
        return max((time.monotonic() - start) / _SHARE_OF_QUESTIONS, _LEAST_PAUSE_S / count)

    def _send(self, reply: Reply, content: Any, is_final: bool) -> None:
        final = self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            if isinstance(content, tuple) and content[1] == "CANCELLED":
                self._cancelled.increment(1)
            response = self._failure(*content) if isinstance(content, tuple) else self._response(reply, content)
            reply.sender.send(response, flags=final if is_final else 0)
        except Exception as error:  # whatever Triton raises concerns this request alone
            self._triton.Logger.log_error(f"an answer could not be sent: {error}")
            reply.is_cancelled = True

    def _response(self, reply: Reply, tensors: Tensors) -> Any:
        outputs = []
        for name, array in tensors.items():
            if name in reply.wanted:
                typed = np.asarray(array, self._output_types.get(name, array.dtype))
                outputs.append(self._triton.Tensor(name, typed[None] if self._has_axis else typed))
        return self._triton.InferenceResponse(output_tensors=outputs)

    def _failure(self, problem: str, code: str) -> Any:
        error = self._triton.TritonError(problem, getattr(self._triton.TritonError, code))
        return self._triton.InferenceResponse(output_tensors=[], error=error)
