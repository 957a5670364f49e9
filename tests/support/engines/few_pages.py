"""A scheduler over a cache of few pages, whose memory is spoiled as soon as no row has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from backends.fastertransformer.engine.cache.page_allocator import PageAllocator
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.steps.steps import Steps
from support.engines.asking import Tensors, generated


class Served:
    """A scheduler whose cache has few pages, and the most that were in use."""

    def __init__(self, steps: Steps, **ways: Any) -> None:
        self.steps, self.allocator, self.most_used = steps, steps.cache.allocator, 0
        self.scheduler = Scheduler(steps, 32, **ways)

    def submit(self, tensors: Tensors, session: str | None = None) -> list[Answer]:
        answers: list[Answer] = []
        self.scheduler.add(Job(parse_request(tensors, self.steps.config), answers.append, session=session))
        return answers

    def run(self) -> None:
        while not self.scheduler.is_idle:
            self.scheduler.step()
            self.most_used = max(self.most_used, self.allocator.count - self.allocator.free)

    def say(self, tensors: Tensors, session: str | None = None) -> list[int]:
        answers = self.submit(tensors, session)
        self.run()
        assert not isinstance(answers[-1], Failure), answers[-1]
        return generated(answers[-1].tensors)


@contextmanager
def spoiled(steps: Steps) -> Iterator[None]:
    """Fill pages with NaN as soon as they are free and not known."""
    free = PageAllocator._release

    def spoil(allocator: PageAllocator, pages: list[int]) -> None:
        given = [page for page in pages if page]
        free(allocator, pages)
        lost = [page for page in given if page not in allocator.prefixes._known]
        # A draft model always goes on, on half a page, where torch multiplies what follows by 0.
        drafting = steps.cache.beside if steps.network.ops.can_capture else ()
        for memory in (*steps.cache.kv, *steps.cache.outputs, *drafting):
            memory[:, lost] = float("nan")

    with patch.object(PageAllocator, "_release", spoil):
        yield
