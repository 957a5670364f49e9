"""Encoder-decoders through the scheduler: FasterTransformer's T5 tensors against Hugging Face's generate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU
from support.engines.paged_steps import paged_steps
from support.engines.t5_requests import LONG, ask, by_hugging_face, cut, settings_of, sources
from support.shards.family_shards import write_family
from support.shards.random_t5 import random_t5
from transformers import T5EncoderModel

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler

COUNT = 10


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Engine]:
    model = random_t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    return model, open_engine(settings_of(write_family(model, tmp_path_factory.mktemp("t5"), 1)), CPU)


def test_greedy_tokens_are_hugging_faces_whatever_else_is_in_the_batch(opened: tuple[Any, Engine]) -> None:
    model, engine = opened
    rows, counts = sources(9, 4, 14, 1), [10, 3, 12, 7]
    outputs = engine.generate([engine.parse(ask(rows, counts, is_return_log_probs=True))])[0]
    assert {name: (array.dtype.name, array.shape) for name, array in outputs.items()} == {
        "output_ids": ("int32", (4, 1, 12)),
        "sequence_length": ("int32", (4, 1)),
        "finish_reason": ("int32", (4, 1)),
        "cum_log_probs": ("float32", (4, 1)),
        "output_log_probs": ("float32", (4, 1, 12)),
    }
    for row, (line, count) in enumerate(zip(rows, counts, strict=True)):
        found = by_hugging_face(model, line, count)
        expected = found.sequences[0, 1:].tolist()
        length = int(outputs["sequence_length"][row, 0])
        assert outputs["output_ids"][row, 0, :length].tolist() == expected
        assert not outputs["output_ids"][row, 0, length:].any()
        gains = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
        assert outputs["cum_log_probs"][row, 0] == pytest.approx(float(gains.sum()), abs=1e-3)


@pytest.mark.parametrize("len_penalty", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("width", [2, 4])
def test_beam_search_is_hugging_faces_with_early_stopping(
    opened: tuple[Any, Engine], width: int, len_penalty: float
) -> None:
    model, engine = opened
    ended = 0
    for line in sources(9, 4, 12):
        # An end_id that comes early in what the search finds without one.
        free = by_hugging_face(model, line, LONG, num_beams=width, eos_token_id=None).sequences[0, 1:].tolist()
        end_id = free[2]
        found = by_hugging_face(
            model,
            line,
            LONG,
            num_beams=width,
            num_return_sequences=width,
            early_stopping=True,
            length_penalty=len_penalty,
            eos_token_id=end_id,
            pad_token_id=0,
        )
        tensors = ask([line], LONG, beam_width=width, len_penalty=len_penalty, end_id=end_id, is_return_log_probs=True)
        outputs = engine.generate([engine.parse(tensors)])[0]
        for beam in range(width):
            tokens = outputs["output_ids"][0, beam, : outputs["sequence_length"][0, beam]].tolist()
            assert tokens == cut(found.sequences[beam, 1:].tolist(), end_id)
            ended += tokens[-1] == end_id
            score = outputs["cum_log_probs"][0, beam] / len(tokens) ** len_penalty
            assert score == pytest.approx(float(found.sequences_scores[beam]), abs=1e-3)
            gains = outputs["output_log_probs"][0, beam].sum()
            assert gains == pytest.approx(outputs["cum_log_probs"][0, beam], abs=1e-3)
    assert ended


def test_requests_that_come_at_any_time_get_what_they_get_alone(opened: tuple[Any, Engine], tmp_path: Path) -> None:
    model, engine = opened
    steps = paged_steps(settings_of(write_family(model, tmp_path, 1)))
    scheduler, generator = Scheduler(steps, 6), np.random.default_rng(1)
    jobs, answers = [], []
    for index in range(10):
        rows = sources(*generator.integers(1, 16, 1 + index % 2).tolist())
        scalars = [{}, {"beam_width": 3}, {"runtime_top_k": 6, "random_seed": index}][index % 3]
        tensors = ask(rows, int(generator.integers(1, 14)), **scalars, end_id=4000)
        found: list[Answer] = []
        scheduler.add(Job(parse_request(tensors, steps.config), found.append))
        jobs.append(tensors)
        answers.append(found)
        for _ in range(generator.integers(0, 4)):
            scheduler.step()
    while not scheduler.is_idle:
        scheduler.step()
    for tensors, found in zip(jobs, answers, strict=True):
        expected = engine.generate([engine.parse(tensors)])[0]["output_ids"]
        assert found[0].tensors
        np.testing.assert_array_equal(found[0].tensors["output_ids"], expected)
    assert steps.cache.allocator.free == steps.cache.allocator.count == 200


def test_ia3_tasks_are_a_rows_own(tmp_path: Path) -> None:
    """A vector of ones changes nothing, which Hugging Face shows; another changes the tokens of its rows alone."""
    model = random_t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    shards = write_family(model, tmp_path, 1)
    add_ia3(shards, model.config)
    engine = open_engine(settings_of(shards), CPU)
    rows = sources(8, 8, 5)
    lines = [rows[0], rows[0], rows[2]]
    plain = engine.generate([engine.parse(ask(lines, COUNT))])[0]["output_ids"]
    requests = [engine.parse(ask(lines[:2], COUNT, ia3_tasks=[0, 1])), engine.parse(ask(lines[2:], COUNT))]
    adapted, without = (outputs["output_ids"] for outputs in engine.generate(requests))
    np.testing.assert_array_equal(adapted[0], plain[0])
    np.testing.assert_array_equal(without[0], plain[2])
    assert adapted[1].tolist() != plain[1].tolist()
    with pytest.raises(EngineError, match="ia3_tasks is 2 in row 0; it must be 0 to 1"):
        engine.parse(ask(lines[:1], COUNT, ia3_tasks=2))


def add_ia3(shards: Path, config: Any) -> None:
    """Two tasks: all ones, and random numbers."""
    ini = shards / "config.ini"
    ini.write_text(ini.read_text().replace("[structure]", "[structure]\nia3_num_tasks = 2"))
    generator = np.random.default_rng(8)

    def put(name: str, width: int) -> None:
        table = np.ones((2, width), np.float32)
        table[1] = generator.uniform(0, 2, width)
        table.tofile(shards / name)

    inner = config.num_heads * config.d_kv
    for index in range(config.num_layers):
        for stack, kinds in (("encoder", ("SelfAttention",)), ("decoder", ("SelfAttention", "EncDecAttention"))):
            for place, kind in enumerate(kinds):
                for part in "kv":
                    put(f"{stack}.block.{index}.layer.{place}.{kind}.{part}.ia3.weight.0.bin", inner)
            put(f"{stack}.block.{index}.layer.{len(kinds)}.DenseReluDense.ia3.weight.0.bin", config.d_ff)


def test_an_encoder_alone_gives_its_hidden_states(tmp_path: Path) -> None:
    encoder = T5EncoderModel(random_t5().config).eval()
    engine = open_engine(settings_of(write_family(encoder, tmp_path, 1), "T5-Encoder"), CPU)
    rows = sources(7, 3, 12)
    outputs = engine.generate([engine.parse(ask(rows, None)), engine.parse(ask(rows[1:2], None))])
    assert set(outputs[0]) == {"output_hidden_state"}
    for row, line in enumerate(rows):
        with torch.no_grad():
            expected = encoder(torch.tensor([line])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(outputs[0]["output_hidden_state"][row, : len(line)], expected, atol=1e-4)
        assert not outputs[0]["output_hidden_state"][row, len(line) :].any()
    np.testing.assert_allclose(
        outputs[1]["output_hidden_state"][0], outputs[0]["output_hidden_state"][1, :3], atol=1e-5
    )
    with pytest.raises(EngineError, match=r"unknown input 'max_output_len' of shape \[3, 1\]"):
        engine.parse(ask(rows, 4))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_encoder_says_what_it_attends_to(ranks: int, tmp_path: Path) -> None:
    encoder = T5EncoderModel(random_t5().config).eval()
    encoder.set_attn_implementation("eager")  # the one that gives them
    settings = replace(settings_of(write_family(encoder, tmp_path, ranks), "T5-Encoder"), tensor_para_size=ranks)
    engine = open_engine(settings, CPU)
    rows = sources(7, 3, 12)
    tensors = ask(rows, None, is_return_attentions=[False, True, False])  # one row's wish is for all
    tensors["input_ids"] = np.pad(tensors["input_ids"], ((0, 0), (0, 3)))
    asking = engine.parse(tensors)
    outputs, without = engine.generate([asking, engine.parse(ask(rows[:1], None, is_return_attentions=False))])
    engine.close()
    assert set(without) == {"output_hidden_state"}
    found = outputs["output_attentions"]
    assert (found.dtype, found.shape) == (np.float32, (3, 2, 4, 15, 15))
    for row, line in enumerate(rows):
        with torch.no_grad():
            theirs = encoder(torch.tensor([line]), output_attentions=True)
        length = len(line)
        expected = torch.cat(theirs.attentions).numpy()  # [layers, heads, S, S]
        np.testing.assert_allclose(found[row, :, :, :length, :length], expected, atol=1e-5)
        assert not found[row, :, :, length:].any() and not found[row, :, :, :, length:].any()
        hidden = outputs["output_hidden_state"][row, :length]
        np.testing.assert_allclose(hidden, theirs.last_hidden_state[0].numpy(), atol=1e-4)
    assert outputs["output_hidden_state"].shape == (3, 15, 24)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ia3_tasks": np.zeros((1, 1), np.int32)}, "ia3_tasks: this checkpoint has no IA3 adapters"),
        ({"input_lengths": np.ones((1, 1), np.uint32)}, "unknown input 'input_lengths'"),
        ({"sequence_length": np.full((1, 1), 9, np.uint32)}, "sequence_length is 9 in row 0; it must be 1 to 5"),
        ({"max_output_len": np.full((1, 1), 20000, np.uint32)}, "max_output_len 20000 = 20000 in row 0 exceeds"),
        ({"start_id": np.full((1, 1), 5000, np.uint32)}, "start_id is 5000 in row 0; it must be below vocab_size"),
        ({"max_output_len": None}, "missing input: max_output_len"),
    ],
)
def test_a_malformed_request_is_refused_in_t5s_words(
    opened: tuple[Any, Engine], change: dict[str, Any], words: str
) -> None:
    tensors = {name: value for name, value in (ask(sources(5), 4) | change).items() if value is not None}
    with pytest.raises(EngineError, match=words):
        opened[1].parse(tensors)
