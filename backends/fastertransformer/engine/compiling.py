"""Requests whose grammars are still to be compiled, off the engine's thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .errors import EngineError, RequestError, UnavailableError
from .grammar.compiled import Grammars
from .grammar.trials import GoneError
from .request.guides import Guide
from .rows.answer import CANCELLED, INVALID, UNAVAILABLE, Failure
from .rows.sequence import Job

_log = logging.getLogger(__name__)
_AT_A_TIME = 16  # threads, most of which wait for trials
_MOST_WAITING, _MOST_S = 256, 10.0  # requests, and since a request came
CLOSED = "the engine was closed"


class Compiling:
    """The requests, and the threads that wait for their grammars.

    Args:
        grammars: of the model.
        put: takes a request whose grammars are compiled.
    """

    def __init__(self, grammars: Grammars, put: Callable[[Job], None]) -> None:
        self._grammars, self._put = grammars, put
        self._pool = ThreadPoolExecutor(_AT_A_TIME, "grammars")
        self._waiting, self._lock, self._is_closed = 0, threading.Lock(), False
        # Before there are rows that would wait for it. If it fails, the requests that need it are told so.
        with ThreadPoolExecutor(1, "vocabulary") as preparing:
            preparing.submit(grammars.prepare)

    def submit(self, job: Job) -> None:
        """Compile a request's grammars, or refuse it, and return at once.

        Raises:
            EngineError: this was closed.
        """
        try:
            if found := self._grammars.find_rows(_guides(job)):
                job.grammars = found
                self._put(job)
                return
        except RequestError as error:
            _refuse(job, error)
            return
        with self._lock:
            if self._is_closed:
                raise EngineError(CLOSED)
            is_full = self._waiting >= _MOST_WAITING
            self._waiting += not is_full
        if is_full:
            problem = f"the grammars of {_MOST_WAITING} requests are to be compiled already: send it again later"
            job.answer(Failure(problem, UNAVAILABLE))
        else:
            self._pool.submit(self._compile, job)

    def close(self) -> None:
        """End what is being compiled: its requests are answered before this returns."""
        with self._lock:
            self._is_closed = True
        self._grammars.close()
        self._pool.shutdown()

    def _compile(self, job: Job) -> None:
        """Compile the grammars of a request, and pass it on."""
        try:
            wait_s = job.submitted_s + _MOST_S - time.monotonic()
            if self._is_closed:
                raise EngineError(CLOSED)
            if not _is_wanted(job):
                raise GoneError
            job.grammars = self._grammars.compile_rows(_guides(job), lambda: _is_wanted(job), wait_s)
        except RequestError as error:
            _refuse(job, error)
        except UnavailableError as error:
            job.answer(Failure(str(error), UNAVAILABLE))
        except GoneError:
            job.answer(Failure("cancelled", CANCELLED))
        except EngineError as error:
            job.answer(Failure(CLOSED if self._is_closed else str(error)))
        except BaseException:  # a failure inside the library is no Exception
            _log.exception("compiling a grammar failed")
            job.answer(Failure("compiling the grammar failed"))
        else:
            self._put(job)
        finally:
            with self._lock:
                self._waiting -= 1


def _guides(job: Job) -> list[Guide | None]:
    return [row.sampling.guide for row in job.request.rows]


def _refuse(job: Job, error: RequestError) -> None:
    job.answer(Failure(str(error), INVALID, logged=getattr(error, "logged", "")))


def _is_wanted(job: Job) -> bool:
    return job.is_cancelled is None or not job.is_cancelled()
