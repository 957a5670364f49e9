"""Numbers that overflow fail the request they belong to, and no other request, now or later."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, Tensors, ask, generated, prompts, tiny_gpt2, word_list
from support.shards.llama_shards import settings_of

from backends.fastertransformer.engine.cache.kv_cache import KvCache
from backends.fastertransformer.engine.cache.sizing import CacheShape, Entry
from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.rows.answer import FAILED, Answer

NEVER = 4000  # an end_id outside the vocabulary
BROKEN = 118  # a token of the Llama that is in no prompt here, and in no answer to one
SAMPLED = {"runtime_top_k": 5, "random_seed": 3}


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Engines of two families; one row of the Llama's embedding is not finite, as a damaged checkpoint's may be."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gpt2":
        return open_engine(tiny_gpt2(folder)[1], CPU)
    settings = settings_of(request.param, folder)[1]
    file = settings.checkpoint / "model.wte.weight.bin"
    table = np.fromfile(file, np.float32).reshape(-1, 64)
    table[BROKEN] = np.inf
    table.tofile(file)
    return open_engine(settings, CPU)


def overflowing(engine: Engine, **scalars: Any) -> Tensors:
    """A legal request whose first norm is not finite, for which a GPT's embeddings are large enough.

    An RMS norm divides by the square root of infinity and gives zeros, so a Llama's token has a broken embedding.
    """
    (row,) = prompts(20)
    if engine.config.family == "llama":
        return ask([[*row[:7], BROKEN, *row[7:]]], 10, end_id=NEVER, **scalars)
    given = np.full((1, 3, 32), 3e38, np.float32)
    told = {"request_prompt_lengths": 3, "request_prompt_type": 1, "request_prompt_embedding": given}
    return ask([row], 10, end_id=NEVER, **told, **scalars)


def answers(engine: Engine, requests: list[Tensors]) -> list[Answer]:
    arrived: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
    for index, tensors in enumerate(requests):
        engine.submit(engine.parse(tensors), lambda answer, index=index: arrived.put((index, answer)))  # type: ignore[misc]
    found = dict(arrived.get(timeout=180) for _ in requests)
    return [found[index] for index in range(len(requests))]


# A neighbour with a penalty takes the sampler of rows that are sampled.
@pytest.mark.in_ci(when=lambda at: not at.neighbour or at.kind is SAMPLED)
@pytest.mark.parametrize("kind", [{}, SAMPLED, {"runtime_top_p": 0.9}, {"beam_width": 3}])
@pytest.mark.parametrize("neighbour", [{}, {"repetition_penalty": 1.3}])
def test_it_fails_alone_and_leaves_nothing_behind(engine: Engine, kind: Any, neighbour: Any) -> None:
    others = [ask(prompts(length), 20, end_id=NEVER, **neighbour) for length in (6, 8, 3)]
    alone = [generated(engine.generate([engine.parse(tensors)])[0]) for tensors in others]
    first, lost, *more = answers(engine, [others[0], overflowing(engine, **kind), *others[1:]])
    assert lost.code == FAILED and lost.problem and "the network's numbers overflow in row 0" in lost.problem
    together = answers(engine, others)  # in the slots that it had
    for found in ([first, *more], together):
        assert [generated(answer.tensors or {}) for answer in found] == alone


def test_all_rows_of_a_request_are_lost_together(engine: Engine) -> None:
    tensors = overflowing(engine, **SAMPLED)
    tensors = {name: np.repeat(array, 2, axis=0) for name, array in tensors.items()}
    if "request_prompt_lengths" in tensors:
        tensors["request_prompt_lengths"][0] = 0  # row 0 is sound
    tensors["input_ids"][0, tensors["input_ids"][0] == BROKEN] = 5
    (answer,) = answers(engine, [tensors])
    assert answer.code == FAILED and answer.problem and "in row 1" in answer.problem


def test_a_choice_among_nothing_is_still_a_token(engine: Engine) -> None:
    vocabulary = engine.config.vocab_size
    everything = word_list([[token] for token in range(vocabulary) if token != 96])
    mine = ask(prompts(5), 6, end_id=96, min_length=6, bad_words_list=everything, **SAMPLED)
    other = ask(prompts(7), 12, end_id=NEVER, repetition_penalty=1.2)
    alone = generated(engine.generate([engine.parse(other)])[0])
    first, second = answers(engine, [mine, other])
    assert first.tensors and (first.tensors["output_ids"] < vocabulary).all()
    assert generated(second.tensors or {}) == alone


def test_a_wiped_slot_is_as_a_new_one() -> None:
    cache = KvCache(CacheShape((Entry(2, 4),) * 2, torch.float32, has_cross=True), CPU, 1 << 20, 8)
    rows = [cache.allocator.take(8, source=8) for _ in range(4)]
    cache.allocate(0, rows)
    for block in cache.kv:
        block.fill_(float("nan"))
    cache.clear(np.array([page for row in (rows[1], rows[3]) for page in (*row.pages, *row.source)]))
    for table in (cache.page_tables, cache.source_page_tables):
        for block in cache.kv:
            assert (block[:, table[[1, 3], 0]] == 0).all() and block[:, table[[0, 2], 0]].isnan().all()
