"""Long contexts in torch: no buffer grows with the square of the length, and cutting the queries changes no number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import ask, generated
from support.engines.network_runs import mixed_logits, open_network
from support.engines.paged_steps import paged_steps
from support.shards.llama_shards import served_of
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.llama_models import VOCAB
from torch.utils._python_dispatch import TorchDispatchMode

from backends.fastertransformer.engine.cache.page_allocator import pages_of
from backends.fastertransformer.engine.ops import cached_attention
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.settings import Settings

LENGTH = 4000


class _Largest(TorchDispatchMode):
    """Note the bytes of the largest memory that any operation takes: what it gives is not in what it is given."""

    size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {each.data_ptr() for each in _storages([*args, *(kwargs or {}).values()])}
        new = (each.nbytes() for each in _storages([found]) if each.data_ptr() not in given)
        self.size_bytes = max(self.size_bytes, *new, 0)
        return found


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage()
        elif isinstance(value, (tuple, list)):
            yield from _storages(value)


@contextmanager
def watched() -> Iterator[None]:
    """Fail if an operation takes more than half the bytes of a boolean mask of all tokens by all."""
    with _Largest() as largest:
        yield
    assert 0 < largest.size_bytes < LENGTH * LENGTH // 2


@pytest.mark.parametrize("name", [pytest.param("llama31", marks=pytest.mark.long), "mistral"])
def test_no_buffer_grows_with_the_square_of_the_length(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new prompt, then the same with more behind it, nearly all of which is found or nearly none."""
    monkeypatch.setattr(cached_attention, "_MOST_MASKED", 1 << 18)
    root, model = served_of(name, tmp_path, 1, max_position_embeddings=131072, num_hidden_layers=1)
    pages = pages_of(LENGTH) + 40
    steps = paged_steps(Settings(root, 1, 1, "fp32", 1, "Llama"), pages)
    steps.cache.allocator.prefixes._most_unused = pages
    scheduler = Scheduler(steps, 4)
    line = np.random.default_rng(1).integers(3, VOCAB, LENGTH).tolist()
    for place, prompt in enumerate((line[:40], line, [*line, 5, 6, 7])):
        answers: list[Answer] = []
        scheduler.add(Job(parse_request(ask([prompt], 3, end_id=NEVER), steps.config), answers.append))
        with watched():
            while not scheduler.is_idle:
                scheduler.step()
        assert not isinstance(answers[-1], Failure), answers[-1]
        found = generated(answers[-1].tensors)
        assert steps.cache.allocator.prefixes.found >= (0, 32, 3900)[place]
        assert found == argmaxes(model, prompt, found)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_queries_in_parts_give_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, _ = served_of(name, tmp_path, 1)
    network, ids = open_network(root, 1, "Llama"), torch.randint(3, VOCAB, (3, 20))
    cuts = [[4, 5, 17], [1, 11, 12], [6, 7, 19]]
    whole = mixed_logits(network, ids, cuts)
    monkeypatch.setattr(cached_attention, "_MOST_MASKED", 3 * 40 * 4)
    for ours, theirs in zip(mixed_logits(network, ids, cuts), whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
