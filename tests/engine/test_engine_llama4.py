"""Llama 4 against transformers: chunks of the text, norms without weights, a temperature, experts' scores before them.

Positions pass the ends of several chunks, which lie within pages, at their ends, and beyond some.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import ask, generated
from support.engines.few_pages import Served, spoiled
from support.engines.hub_served import check_served, opened
from support.engines.network_runs import decode_logits, mixed_logits, open_network
from support.engines.paged_steps import paged_steps
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.llama_models import VOCAB, save

from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.settings import Settings

POSITIONS = 256


def lines_of(*lengths: int, seed: int = 7) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCAB, length).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama4", {"attention_chunk_size": 48, "num_experts_per_tok": 2}),
        ("llama4", {"moe_layers": [], "no_rope_layers": [0] * 4, "layer_types": ["full_attention"] * 4}),  # C's layers
        pytest.param("llama4", {}, marks=pytest.mark.long),
        pytest.param("llama4_plain", {}, marks=pytest.mark.long),
        pytest.param("llama4_scout", {}, marks=pytest.mark.long),
        pytest.param("llama4", {"attention_chunk_size": 64}, marks=pytest.mark.long),
    ],
)
def test_chunks_and_steps_give_the_logits_of_a_whole_pass(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = save(name, tmp_path, max_position_embeddings=POSITIONS, **changes)
    network, ids = open_network(tmp_path, 1, "Llama"), torch.tensor(lines_of(150, 150, 150))
    with torch.no_grad():
        expected = model(ids).logits
    for cuts in ([[149], [20], [64]], [[1, 2, 140], [64, 128, 149], [47, 49, 97]]):
        for row, found in enumerate(mixed_logits(network, ids, cuts)):
            assert (found - expected[row, : len(found)]).abs().max() < 1e-4
    assert (decode_logits(network, ids, 120) - expected[:, 120:]).abs().max() < 1e-4


def test_a_server_gives_transformers_tokens_alone_and_over_two_ranks(tmp_path: Path) -> None:
    """Gates and what they multiply lie in halves of one array, of each of which a rank has a slice."""
    model = save("llama4", tmp_path, max_position_embeddings=POSITIONS, attention_chunk_size=40)
    for ranks in (1, 2):
        engine = opened(tmp_path, ranks)
        check_served(engine, model, longest=150)
        check_served(engine, model, longest=150)  # its beginning is known
        engine.close()


def test_rows_that_come_go_and_are_set_back_get_what_transformers_gives_each(tmp_path: Path) -> None:
    model = save("llama4", tmp_path, max_position_embeddings=POSITIONS, attention_chunk_size=40)
    steps = paged_steps(Settings(tmp_path, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22), pages=14)
    scheduler, answers = Scheduler(steps, 8, steps_ahead=True, chunk_tokens=16), list[list[Answer]]()
    lines = lines_of(*np.random.default_rng(3).integers(1, 90, 10))
    lines[5] = [*lines[2], *lines[5][:9]]
    for place, line in enumerate(lines):
        answers.append([])
        scheduler.add(Job(parse_request(ask([line], 60, end_id=NEVER), steps.config), answers[-1].append))
        for _ in range(2 * (place % 3)):
            scheduler.step()
    while not scheduler.is_idle:
        scheduler.step()
    for line, (answer,) in zip(lines, answers, strict=True):
        assert not isinstance(answer, Failure), answer
        found = generated(answer.tensors)
        assert len(found) == 60 and found == argmaxes(model, line, found)
    assert scheduler.metrics.preemptions and steps.cache.allocator.free == 14


def test_a_step_reads_no_page_before_its_chunk(tmp_path: Path) -> None:
    """Where chunks end with pages, those before are not looked at, be there what may; layers that do not rotate do.

    Those that are further back than a chunk is long are given back, if all layers have chunks.
    """
    told = {"attention_chunk_size": 64, "max_position_embeddings": POSITIONS, "no_rope_layers": [1, 1, 1, 1]}
    model, pages = save("llama4", tmp_path, **told), 6
    served = Served(paged_steps(Settings(tmp_path, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22), pages))
    (line,) = lines_of(130)
    answers = served.submit(ask([line], 20, end_id=NEVER))
    served.scheduler.step()
    (row,) = next(iter(served.scheduler._batch)).reservation.rows
    assert row.pages[0] == 0 and all(row.pages[1:4])
    for block in served.steps.cache.kv:
        block[:, row.pages[:4]] = float("nan")
    served.run()
    assert not isinstance(answers[0], Failure), answers[0]
    found = generated(answers[0].tensors)
    assert len(found) == 20 and found == argmaxes(model, line, found)
    with spoiled(served.steps):
        (line,) = lines_of(200, seed=8)  # takes more pages in all than there are
        found = served.say(ask([line], 50, end_id=NEVER))
    assert found == argmaxes(model, line, found) and served.allocator.free == pages
