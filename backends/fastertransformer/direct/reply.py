"""The answers to one request of the socket, from the engine's thread to the one that writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ft_format.socket_messages import Asked, Kind, frame, pack, pack_tokens

from ..engine.request.parse import Request
from ..engine.rows.answer import Answer, Failure, Tensors, Tokens

_LONGEST_WAIT_S = 5e-3  # of an answer, before the engine makes no more of them for a while


@dataclass(frozen=True)
class Described:
    """A model's adapters; see AdapterWish.

    Attributes:
        adapters: by name their ``path`` and ``rank``.
    """

    adapters: Mapping[str, Mapping[str, str | int]]
    is_final: ClassVar[bool] = True


Sent = Answer | Described


class DirectReply:
    """The answers to one request; any thread may call its methods, which return at once.

    Args:
        announce: is called when an answer waits to be sent, and none has waited before.
        number: of the request on its connection.
        asked: what it says beside its tensors.
        deadline: of time.monotonic, after which it is cancelled.
    """

    def __init__(self, announce: Callable[[DirectReply], None], number: int, asked: Asked, deadline: float) -> None:
        self.asked, self.number, self.opened = asked, number, time.monotonic()
        self.name = asked.name
        self.is_cancelled = False
        self._announce, self._deadline, self._lock = announce, deadline, threading.Lock()
        self._newest: tuple[float, Sent] | None = None  # when the first of those not taken came
        self._sent = 0  # tokens, behind those that the client has already

    def wants_tokens_alone(self, request: Request) -> bool:
        """Return whether the generated tokens are all that the client wants of the answers to its request."""
        is_single = len(request.rows) == 1 and request.beam_width == 1
        return is_single and self.asked.shown == len(request.rows[0].shown)

    def has_gone(self) -> bool:
        """Return whether the client is gone or its time is over; the engine calls it between its steps."""
        return self.is_cancelled or self.has_expired

    @property
    def has_expired(self) -> bool:
        """Whether the request's time limit is exceeded."""
        return time.monotonic() > self._deadline

    def is_behind(self) -> bool:
        """Return whether an answer has waited for long; another one would only replace it."""
        newest = self._newest
        return newest is not None and time.monotonic() - newest[0] > _LONGEST_WAIT_S

    def send(self, answer: Sent) -> None:
        """Leave an answer to be sent."""
        with self._lock:
            before = self._newest
            self._newest = (time.monotonic() if before is None else before[0], answer)
        if before is None:
            self._announce(self)

    def take(self) -> Sent:
        """Return the answer that is to be sent."""
        with self._lock:
            assert self._newest is not None
            _, answer = self._newest
            self._newest = None
        return answer

    def write(self, answer: Sent) -> bytes:
        """Return the frame of an answer."""
        match answer:
            case Described(adapters):
                return frame(Kind.ADAPTERS, self.number, pack({"adapters": adapters}, {}))
            case Failure(problem, code):
                return frame(Kind.FAILURE, self.number, pack({"problem": problem, "code": code}, {}))
            case Tensors(tensors, is_final) if self.asked.shown is None:
                arrays = {name: tensors[name] for name in self.asked.outputs if name in tensors}
                return frame(Kind.LAST_ARRAYS if is_final else Kind.ARRAYS, self.number, pack({}, arrays))
        tokens = self._new_tokens(answer)
        self._sent += len(tokens)
        return frame(Kind.LAST_TOKENS if answer.is_final else Kind.TOKENS, self.number, pack_tokens(tokens))

    def _new_tokens(self, answer: Tensors | Tokens) -> Sequence[int]:
        if isinstance(answer, Tokens):
            return answer.ids[self._sent : answer.count]
        assert self.asked.shown is not None
        first, end = self.asked.shown + self._sent, int(answer.tensors["sequence_length"][0, 0])
        found: list[int] = answer.tensors["output_ids"][0, 0, first:end].tolist()
        return found
