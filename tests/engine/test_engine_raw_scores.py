"""Log-probabilities under the model, of tokens and of the most probable ones, against Hugging Face's forward pass."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, VOCABULARY, Tensors, ask, generated, padded, prompts, tiny_gpt2
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from transformers import GPT2LMHeadModel

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.errors import RequestError
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.scheduling import contexts
from backends.fastertransformer.engine.settings import Settings

NEVER = 4000
RAW = ("output_raw_log_probs", "output_top_log_probs", "output_top_ids")
# What changes the logits that a token is drawn from, and must not change its raw scores.
DRAWN: dict[str, Any] = {"runtime_top_k": 9, "temperature": 2.5, "frequency_penalty": 0.5, "random_seed": 3}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT2LMHeadModel, Engine]:
    model, settings = tiny_gpt2(tmp_path_factory.mktemp("gpt2"))
    return model, open_engine(settings, CPU)


def answer(engine: Engine, tensors: Tensors) -> Tensors:
    return engine.generate([engine.parse(tensors)])[0]


def log_probs_of(model: GPT2LMHeadModel, line: list[int]) -> torch.Tensor:
    """Of each place's next token, [T, V]."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([line])).logits[0].log_softmax(-1)
    return found


def assert_scores_are(
    log_probs: torch.Tensor, tokens: list[int], own: Any, tops: Any = None, ids: Any = None, wanted: int = 0
) -> None:
    """Compare what an answer holds of some places with all log-probabilities there, [n, V]."""
    at = torch.tensor(tokens)[:, None]
    np.testing.assert_allclose(own, log_probs.gather(1, at)[:, 0], atol=1e-4)
    if wanted:
        best = log_probs.topk(wanted, dim=-1)
        np.testing.assert_allclose(tops[:, :wanted], best.values, atol=1e-4)
        # Of nearly equal numbers either may come first; each token has the number beside it.
        named = torch.from_numpy(ids[:, :wanted].astype(np.int64))
        np.testing.assert_allclose(tops[:, :wanted], log_probs.gather(1, named), atol=1e-4)
        assert all(len(set(row)) == wanted for row in named.tolist())
        assert not tops[:, wanted:].any() and not ids[:, wanted:].any()


def test_each_row_gets_the_scores_that_it_asks_for(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    model, engine = opened
    lines, counts, wanted = prompts(9, 1, 5, 4, 7), [6, 11, 3, 8, 5], [3, 0, 20, 1, 0]
    asked = [False, True, False, True, False]  # the last row asks for nothing
    scalars = {"num_top_log_probs": wanted, "is_return_raw_log_probs": asked, "end_id": NEVER}
    scalars |= {"runtime_top_k": [1, 9, 0, 5, 1], "runtime_top_p": [0, 0, 0.9, 0, 0], "temperature": [1, 2, 3, 0.5, 1]}
    outputs = answer(engine, ask(lines, counts, **scalars))
    assert {name: (outputs[name].dtype.name, outputs[name].shape) for name in RAW} == {
        "output_raw_log_probs": ("float32", (5, 1, 11)),
        "output_top_log_probs": ("float32", (5, 1, 11, 20)),
        "output_top_ids": ("uint32", (5, 1, 11, 20)),
    }
    own, tops, ids = (outputs[name][:, 0] for name in RAW)
    for row, (line, count) in enumerate(zip(lines, counts, strict=True)):
        if row < 4:
            tokens = generated(outputs, row)
            there = log_probs_of(model, [*line, *tokens])[len(line) - 1 : -1]
            assert_scores_are(there, tokens, own[row, :count], tops[row, :count], ids[row, :count], wanted[row])
        behind = count if row < 4 else 0
        assert not own[row, behind:].any() and not tops[row, behind:].any() and not ids[row, behind:].any()


def test_bias_penalties_and_temperature_change_tokens_and_not_their_scores(
    opened: tuple[GPT2LMHeadModel, Engine],
) -> None:
    model, engine = opened
    (line,) = prompts(6)
    bias = {"logit_bias_ids": padded([[7]]), "logit_bias_values": padded([[9.0]], np.float32)}
    outputs = answer(engine, ask([line], 12, num_top_log_probs=4, end_id=NEVER, **DRAWN) | bias)
    tokens = generated(outputs)
    assert tokens != generated(answer(engine, ask([line], 12, end_id=NEVER)))
    own, tops, ids = (outputs[name][0, 0] for name in RAW)
    assert_scores_are(log_probs_of(model, [*line, *tokens])[len(line) - 1 : -1], tokens, own, tops, ids, 4)


def test_scores_are_only_given_to_a_request_that_asks_for_them(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    engine, lines = opened[1], prompts(5, 3)
    assert not {*RAW} & answer(engine, ask(lines, 2)).keys()
    assert {*RAW} & answer(engine, ask(lines, 2, is_return_raw_log_probs=True)).keys() == {"output_raw_log_probs"}
    assert answer(engine, ask(lines, 0, num_top_log_probs=2))["output_top_log_probs"].shape == (2, 1, 0, 2)


def test_scores_do_not_change_tokens_nor_fastertransformers_log_probabilities(
    opened: tuple[GPT2LMHeadModel, Engine],
) -> None:
    engine, lines = opened[1], prompts(5, 3, 8)
    for told in ({}, DRAWN):
        plain = answer(engine, ask(lines, 9, is_return_log_probs=True, **told))
        scored = answer(engine, ask(lines, 9, is_return_log_probs=True, num_top_log_probs=5, **told))
        for name, array in plain.items():
            np.testing.assert_array_equal(scored[name], array)


def stream(engine: Engine, tensors: Tensors) -> list[Tensors]:
    """All answers to a request that streams."""
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    engine.submit(engine.parse(tensors), answers.put, is_streaming=True)
    found: list[Answer] = []
    while not (found and found[-1].is_final):
        found.append(answers.get(timeout=180))
    assert not isinstance(found[-1], Failure), found[-1]
    return [dict(each.tensors) for each in found]


def test_a_streams_answers_hold_the_scores_so_far(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    engine, lines, counts = opened[1], prompts(4, 6), [7, 3]
    tensors = ask(lines, counts, num_top_log_probs=[2, 3], num_context_top_log_probs=2, end_id=NEVER, **DRAWN)
    whole, streamed = answer(engine, tensors), stream(engine, tensors)
    assert len(streamed) == 7
    for each in streamed:
        lengths = each["sequence_length"][:, 0] - each["response_input_lengths"][:, 0]
        assert each["output_raw_log_probs"].shape == (2, 1, lengths.max())
        for row, length in enumerate(lengths):
            for name in RAW:
                np.testing.assert_array_equal(each[name][row, 0, :length], whole[name][row, 0, :length])
        for name in ("context_top_log_probs", "context_top_ids"):
            np.testing.assert_array_equal(each[name], whole[name])


@pytest.mark.parametrize("block", [contexts._LOGITS_BYTES, 4 * VOCABULARY * 3])
def test_a_prompts_tokens_have_the_most_probable_ones_beside_them(
    opened: tuple[GPT2LMHeadModel, Engine], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = opened
    monkeypatch.setattr(contexts, "_LOGITS_BYTES", block)  # blocks of 3 tokens too
    lines, wanted, asked = prompts(9, 1, 20, 4, 6), [3, 2, 0, 20, 0], [False, False, True, False, False]
    tensors = ask(lines, [0, 2, 1, 3, 1], num_context_top_log_probs=wanted, is_return_context_log_probs=asked, **DRAWN)
    outputs = answer(engine, tensors)
    own, tops, ids = (outputs[f"context_{name}"] for name in ("log_probs", "top_log_probs", "top_ids"))
    assert tops.shape == ids.shape == (5, 20, 20) and (tops.dtype, ids.dtype) == (np.float32, np.uint32)
    for row, (line, count) in enumerate(zip(lines, wanted, strict=True)):
        if row < 4:
            places = slice(1, len(line))
            there = log_probs_of(model, line)[:-1]
            assert_scores_are(there, line[1:], own[row, places], tops[row, places], ids[row, places], count)
            if count:
                np.testing.assert_array_equal(ids[row, :, 0], outputs["context_argmax_ids"][row])
        behind = len(line) if row < 4 else 0
        assert not own[row, 0] and not tops[row, 0].any() and not ids[row, 0].any()
        assert not own[row, behind:].any() and not tops[row, behind:].any() and not ids[row, behind:].any()


def test_a_vocabulary_of_fewer_tokens_gives_all_of_them(tmp_path: Path) -> None:
    model = random_gpt2(vocab_size=12)
    engine = open_engine(Settings(write_shards(model, tmp_path, 1), 1, 1, "fp32", cpu_threads=1), CPU)
    tensors = ask([[1, 2, 3]], 4, num_top_log_probs=20, num_context_top_log_probs=20, end_id=NEVER)
    outputs = answer(engine, tensors)
    for name, places in (("output_top_ids", (0, 0)), ("context_top_ids", (0, slice(1, None)))):
        assert (np.sort(outputs[name][places]) == np.arange(12)).all()
    np.testing.assert_allclose(np.exp(outputs["output_top_log_probs"]).sum(-1), 1, atol=1e-5)


def test_rows_that_score_their_prompt_do_not_take_it_from_the_prefix_cache(tmp_path: Path) -> None:
    model = random_gpt2(n_positions=256)
    engine = open_engine(Settings(write_shards(model, tmp_path, 1), 1, 1, "fp32", cpu_threads=1), CPU)
    (line,) = prompts(100)
    answer(engine, ask([line], 2))  # from now on its pages are known
    for _ in range(2):
        outputs = answer(engine, ask([line], 2, num_context_top_log_probs=2))
        own, tops, ids = (outputs[f"context_{name}"][0, 1:] for name in ("log_probs", "top_log_probs", "top_ids"))
        assert_scores_are(log_probs_of(model, line)[:-1], line[1:], own, tops, ids, 2)


@pytest.mark.parametrize(
    ("scalars", "words"),
    [
        ({"num_top_log_probs": 21}, "num_top_log_probs is 21 in row 0; it must be at most 20"),
        ({"num_context_top_log_probs": [0, 21]}, "num_context_top_log_probs is 21 in row 1; it must be at most 20"),
        ({"num_top_log_probs": 1, "beam_width": 2}, "num_top_log_probs is 1 in row 0; it must be 0, or left out, with"),
        (
            {"is_return_raw_log_probs": [False, True], "beam_width": 2},
            "is_return_raw_log_probs is True in row 1; it must be False, or left out, with beam_width 2: a beam search",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_with_its_range(
    opened: tuple[GPT2LMHeadModel, Engine], scalars: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        opened[1].parse(ask(prompts(4, 2), 3, **scalars))


def test_beams_score_their_prompt(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    model, engine = opened
    (line,) = prompts(8)
    outputs = answer(engine, ask([line], 4, beam_width=3, num_context_top_log_probs=2, num_top_log_probs=0))
    own, tops, ids = (outputs[f"context_{name}"][0, 1:] for name in ("log_probs", "top_log_probs", "top_ids"))
    assert_scores_are(log_probs_of(model, line)[:-1], line[1:], own, tops, ids, 2)
