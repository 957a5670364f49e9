"""Bad and stop words against Hugging Face's processor and against a search over the tokens of a free generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from transformers import GPT2LMHeadModel, NoBadWordsLogitsProcessor

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.settings import Settings

CPU = torch.device("cpu")
END, VOCABULARY, OUTPUT = 96, 97, 24
Words = list[list[int]]


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    return random_gpt2()


@pytest.fixture(scope="module")
def engine(gpt2: GPT2LMHeadModel, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return open_engine(Settings(write_shards(gpt2, tmp_path_factory.mktemp("gpt2")), 1, 1, "fp32", cpu_threads=1), CPU)


def prompts(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(11)
    return [generator.integers(0, END, length).tolist() for length in lengths]


def word_lists(rows: Sequence[Words]) -> np.ndarray:
    """The layout of FasterTransformer's GPT guide, [B, 2, n]."""
    width = max([1, *(sum(map(len, words)) for words in rows)])
    lists = np.zeros((len(rows), 2, width), np.int32)
    lists[:, 1] = -1
    for row, words in enumerate(rows):
        flat = [token for word in words for token in word]
        lists[row, 0, : len(flat)] = flat
        lists[row, 1, : len(words)] = np.cumsum([len(word) for word in words])
    return lists


def generate(engine: Engine, rows: list[list[int]], output: int = OUTPUT, **more: Any) -> list[list[int]]:
    outputs = answer(engine, rows, output, **more)
    ends = outputs["sequence_length"][:, 0]
    return [ids[len(row) : end].tolist() for row, ids, end in zip(rows, outputs["output_ids"][:, 0], ends, strict=True)]


def answer(engine: Engine, rows: list[list[int]], output: int, **more: Any) -> dict[str, np.ndarray]:
    ids = np.zeros((len(rows), max(map(len, rows))), np.uint32)
    for row, prompt in enumerate(rows):
        ids[row, : len(prompt)] = prompt
    tensors = {
        "input_ids": ids,
        "input_lengths": np.array([[len(row)] for row in rows], np.uint32),
        "request_output_len": np.full((len(rows), 1), output, np.uint32),
    }
    return engine.generate([engine.parse(tensors | more)])[0]


def greedy_by_hugging_face(model: GPT2LMHeadModel, prompt: list[int], bad_words: Words) -> tuple[list[int], float]:
    """Tokens, and the sum of their log-probabilities among what is not banned."""
    processor = NoBadWordsLogitsProcessor(bad_words) if bad_words else lambda ids, scores: scores
    ids, total = torch.tensor([prompt]), 0.0
    for _ in range(OUTPUT):
        with torch.no_grad():
            scores = processor(ids, model(ids).logits[:, -1])
        token = int(scores.argmax())
        total += float(scores.log_softmax(-1)[0, token])
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        if token == END:
            break
    return ids[0, len(prompt) :].tolist(), total


def test_bad_words_are_hugging_faces_in_a_mixed_batch(engine: Engine, gpt2: GPT2LMHeadModel) -> None:
    rows = prompts(7, 3, 12, 5, 4)
    free = generate(engine, rows)
    bad: list[Words] = [
        [],
        [[free[1][0]], [free[1][2]]],  # single tokens
        [[rows[2][-1], free[2][0]], free[2][3:5], free[2][6:9]],  # one that begins in the prompt, longer ones
        [free[3][:4], [free[3][1], 1000]],  # a token that the vocabulary has not
        [[0]],
    ]
    outputs = answer(engine, rows, OUTPUT, bad_words_list=word_lists(bad), is_return_log_probs=np.ones((5, 1), bool))
    got = generate(engine, rows, bad_words_list=word_lists(bad))
    for row, words in enumerate(bad):
        known = [word for word in words if max(word) < VOCABULARY]
        tokens, log_prob = greedy_by_hugging_face(gpt2, rows[row], known)
        assert got[row] == tokens
        np.testing.assert_allclose(outputs["cum_log_probs"][row, 0], log_prob, atol=2e-4)
    assert got[0] == free[0]
    assert all(ours != theirs for ours, theirs in zip(got[1:4], free[1:4], strict=True))


def test_a_bad_word_never_comes_when_sampling(engine: Engine) -> None:
    rows = prompts(6) * 8
    scalars = {
        "runtime_top_k": np.full((8, 1), 5, np.uint32),
        "temperature": np.full((8, 1), 3, np.float32),
        "random_seed": np.arange(8, dtype=np.uint64)[:, None],
        "end_id": np.full((8, 1), 4000, np.uint32),
    }
    free = generate(engine, rows, **scalars)
    bad = [[tokens[0]] for tokens in free] + [tokens[4:6] for tokens in free]
    sampled = generate(engine, rows, **scalars, bad_words_list=word_lists([bad] * 8))
    for prompt, tokens in zip(rows, sampled, strict=True):
        whole = prompt + tokens
        assert len(tokens) == OUTPUT
        for word in bad:
            starts = range(len(prompt) - len(word) + 1, len(whole) - len(word) + 1)
            assert all(whole[start : start + len(word)] != word for start in starts)


def first_stop(prompt: list[int], tokens: list[int], words: Words) -> list[int]:
    """Cut behind the first token that completes a word, by search."""
    for count in range(1, len(tokens) + 1):
        whole = prompt + tokens[:count]
        if any(whole[-len(word) :] == word for word in words):
            return tokens[:count]
    return tokens


def test_a_row_ends_behind_its_first_stop_word(engine: Engine) -> None:
    rows = prompts(7, 3, 12, 5, 6)
    free = generate(engine, rows)
    stop: list[Words] = [
        [],
        [[free[1][4]]],
        [free[2][3:6], free[2][5:8]],
        [[rows[3][-2], rows[3][-1], free[3][0]]],  # begins in the prompt
        [rows[4][-2:], rows[4][-1:], [1000]],  # stands in the prompt already: that ends nothing
    ]
    lists = word_lists(stop)
    got = generate(engine, rows, stop_words_list=lists)
    assert got == [first_stop(*each) for each in zip(rows, free, stop, strict=True)]
    assert [len(tokens) for tokens in got[1:4]] != [len(tokens) for tokens in free[1:4]] and len(got[3]) == 1
    for row in range(len(rows)):  # and no row's words are another's
        assert generate(engine, rows[row : row + 1], stop_words_list=lists[row : row + 1]) == got[row : row + 1]
    ids = answer(engine, rows, OUTPUT, stop_words_list=lists)["output_ids"][3, 0]
    assert set(ids[len(rows[3]) + 1 :].tolist()) == {END}


def test_requests_with_lists_of_different_widths_run_as_one_batch(engine: Engine) -> None:
    rows = prompts(7, 3)
    free = generate(engine, rows)
    requests = []
    for row, words in enumerate(([[free[0][2]]], [free[1][1:3], free[1][4:8]])):
        tensors = {
            "input_ids": np.array([rows[row]], np.uint32),
            "input_lengths": np.array([[len(rows[row])]], np.uint32),
            "request_output_len": np.array([[OUTPUT]], np.uint32),
            "stop_words_list": word_lists([words]),
        }
        requests.append(engine.parse(tensors))
    plain = {name: tensors[name] for name in ("input_ids", "input_lengths", "request_output_len")}
    lengths = [int(each["sequence_length"][0, 0]) for each in engine.generate([*requests, engine.parse(plain)])]
    assert lengths == [7 + free[0].index(free[0][2]) + 1, 3 + 3, 3 + len(free[1])]


@pytest.mark.parametrize("empty", [[[0], [-1]], [[0, 0], [-1, -1]], [[], []]])
def test_an_empty_list_changes_nothing(engine: Engine, empty: list[list[int]]) -> None:
    rows = prompts(5)
    lists = np.array([empty], np.int32)
    assert generate(engine, rows, bad_words_list=lists, stop_words_list=lists) == generate(engine, rows)


def test_a_word_without_tokens_is_what_it_is_in_fastertransformers_kernels(engine: Engine) -> None:
    rows = prompts(5)
    (free,) = generate(engine, rows)
    lists = np.array([[[94], [0]]], np.int32)  # as in FasterTransformer's sample_request_single.json
    assert generate(engine, rows, bad_words_list=lists) == [free]
    assert generate(engine, rows, stop_words_list=lists) == [free[:1]]


def test_banning_every_token_is_banning_none(engine: Engine) -> None:
    rows = prompts(5)
    everything = word_lists([[[token] for token in range(VOCABULARY)]])
    assert generate(engine, rows, bad_words_list=everything) == generate(engine, rows)
