"""Requests: what is accepted, what is refused, and by which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backends.fastertransformer.engine.errors import RequestError
from backends.fastertransformer.engine.model.config import ModelConfig
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.request.schema import SCALARS, Scalar

CONFIG = ModelConfig(
    head_num=2, size_per_head=4, inter_size=8, num_layer=1, vocab_size=100, max_pos_seq_len=20, start_id=3, end_id=7
)
EMPTY_LIST = np.tile(np.array([[0], [-1]], np.int32), (2, 1, 1))


def tensors(**changes: Any) -> dict[str, np.ndarray]:
    base = {
        "input_ids": np.array([[1, 2, 3, 4], [5, 6, 0, 0]], np.uint32),
        "input_lengths": np.array([[4], [2]], np.uint32),
        "request_output_len": np.array([[5], [6]], np.uint32),
    }
    return {name: value for name, value in (base | changes).items() if value is not None}


def column(value: float, dtype: Any) -> np.ndarray:
    return np.full((2, 1), value, dtype)


def words(ends: list[int]) -> np.ndarray:
    """The same list in both rows: tokens 5, 6, ... and these ends."""
    return np.tile(np.array([range(5, 5 + len(ends)), ends], np.int32), (2, 1, 1))


def test_what_is_not_sent_has_fastertransformers_default() -> None:
    request = parse_request(tensors(), CONFIG)
    expected = {"end_id": 7, "top_k": 1, "top_p": 1, "is_sampled": False, "temperature": 1, "random_seed": 0}
    expected |= {"repetition_penalty": 1, "presence_penalty": 0, "min_length": 0, "is_return_log_probs": False}
    expected |= {"len_penalty": 0, "beam_search_diversity_rate": 0, "beam_width": 1, "top_p_decay": 1}
    for name, value in expected.items():
        assert [getattr(row.sampling, name) for row in request.rows] == [value, value], name
    empty = parse_request(tensors(input_ids=np.zeros((2, 0), np.uint32), input_lengths=column(0, np.uint32)), CONFIG)
    assert [row.context.ids.tolist() for row in empty.rows] == [[3], [3]]  # start_id


def test_reshaped_scalars_are_the_same_as_columns() -> None:
    flat = {
        name: array.reshape(2)
        for name, array in tensors(temperature=column(0.5, np.float32)).items()
        if "ids" not in name
    }
    request = parse_request(tensors() | flat, CONFIG)
    assert [row.sampling.temperature for row in request.rows] == [0.5, 0.5]
    assert [len(row.shown) for row in request.rows] == [4, 2]


def test_a_seed_may_have_the_type_that_fastertransformers_first_stores_declare() -> None:
    for seed, dtype in ((7, np.int32), (7, np.uint64)):
        rows = parse_request(tensors(random_seed=column(seed, dtype)), CONFIG).rows
        assert [row.sampling.random_seed for row in rows] == [7, 7]


def test_the_neutral_values_that_fastertransformers_clients_send_are_accepted() -> None:
    neutral = {
        "beam_width": column(1, np.uint32),
        "beam_search_diversity_rate": column(0, np.float32),
        "len_penalty": column(1, np.float32),
        "is_return_context_embeddings": column(False, np.bool_),
        "stop_words_list": EMPTY_LIST,
        "bad_words_list": np.tile(np.array([[0, 0], [-1, -1]], np.int32), (2, 1, 1)),
        "request_prompt_embedding": np.zeros((2, 0, 8), np.float16),
        "request_prompt_lengths": column(0, np.uint32),
        "request_prompt_type": column(0, np.uint32),
        "top_p_decay": column(1, np.float32),
        "top_p_min": column(1e-6, np.float32),
        "top_p_reset_ids": column(0xFFFFFFFF, np.uint32),
    }
    assert len(parse_request(tensors(**neutral), CONFIG).rows) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_lengths": None}, "missing input: input_lengths"),
        (
            {"runtime_topk": column(1, np.uint32)},
            r"'runtime_topk' of shape \[2, 1\], did .* 'runtime_top_k'",
        ),
        ({"START": column(1, np.int32)}, r"START is int32 of shape \[2, 1\], expected one whole number"),
        ({"END": np.array([1.0])}, r"END is float64 of shape \[1\], expected one whole number"),
        ({"nonsense": column(1, np.uint32)}, r"unknown input 'nonsense' of shape \[2, 1\]; known are END, START, "),
        ({"min_length": column(1, np.int64)}, "min_length has type int64, expected int32 or uint32"),
        ({"beam_width": column(65, np.uint32)}, "beam_width is 65 in row 0; it must be at most 64"),
        ({"beam_width": np.array([[2], [3]], np.uint32)}, "beam_width is 3 in row 1; it must be the same"),
        ({"len_penalty": column(np.inf, np.float32)}, "len_penalty is inf"),
        (
            {"repetition_penalty": column(1, np.float32), "presence_penalty": column(0, np.float32)},
            "repetition_penalty and presence_penalty exclude each other",
        ),
        ({"input_ids": np.zeros((2, 4), np.int64)}, "input_ids has type int64, expected uint32"),
        ({"input_ids": np.zeros((2, 4, 1), np.uint32)}, r"input_ids has shape \[2, 4, 1\], expected \[batch, n\]"),
        ({"temperature": column(1, np.float64)}, "temperature has type float64, expected float32"),
        ({"temperature": np.ones((3, 1), np.float32)}, r"temperature has shape \[3, 1\], expected \[2, 1\]"),
        ({"beam_width": np.ones((2, 2), np.uint32)}, r"beam_width has shape \[2, 2\], expected \[2, 1\]"),
        ({"beam_width": np.ones((2, 1), np.int32)}, "beam_width has type int32, expected uint32"),
        ({"stop_words_list": np.zeros((2, 3, 1), np.int32)}, r"stop_words_list has shape \[2, 3, 1\], .*\[2, 2, n\]"),
        ({"bad_words_list": np.zeros((2, 2), np.int32)}, r"bad_words_list has shape \[2, 2\], expected \[2, 2, n\]"),
        ({"bad_words_list": np.zeros((3, 2, 1), np.int32)}, r"bad_words_list has shape \[3, 2, 1\], .*\[2, 2, n\]"),
        ({"bad_words_list": np.zeros((2, 2, 1), np.int64)}, "bad_words_list has type int64, expected int32"),
        ({"bad_words_list": words([3, 1])}, r"ends \[3, 1\] in row 0, shape \[2, 2, 2\]; expected \[2, 2, n\]"),
        ({"bad_words_list": words([2, 1])}, r"bad_words_list has ends \[2, 1\]"),
        ({"stop_words_list": words([-1, 1])}, r"stop_words_list has ends \[-1, 1\]"),
        ({"input_lengths": np.array([[4], [5]], np.uint32)}, "input_lengths is 5 in row 1; it must be 1 to 4"),
        ({"input_lengths": np.array([[0], [2]], np.uint32)}, "input_lengths is 0 in row 0"),
        (
            {"input_ids": np.array([[1, 2, 3, 100], [5, 6, 0, 0]], np.uint32)},
            "input_ids holds 100 in row 0; .* 100",
        ),
        ({"runtime_top_p": column(1.5, np.float32)}, "runtime_top_p is 1.5"),
        ({"runtime_top_p": column(np.nan, np.float32)}, "runtime_top_p is nan"),
        ({"temperature": column(-1, np.float32)}, "temperature is -1.0"),
        ({"is_return_context_cum_log_probs": column(True, np.bool_)}, "it must be false without is_return_log_probs"),
        ({"repetition_penalty": column(0, np.float32)}, "repetition_penalty is 0.0"),
        (
            {"request_output_len": column(17, np.uint32)},
            "input_lengths 4 .* 17 = 21 in row 0 exceeds max_pos_seq_len 20",
        ),
    ],
)
def test_a_malformed_request_is_refused_with_name_and_numbers(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_request(tensors(**changes), CONFIG)


def test_padding_may_hold_anything_and_the_longest_that_fits_is_accepted() -> None:
    ids = np.array([[1, 2, 3, 4], [5, 6, 999, 999]], np.uint32)
    assert len(parse_request(tensors(input_ids=ids, request_output_len=column(16, np.uint32)), CONFIG).rows) == 2


@pytest.mark.parametrize("name", sorted(SCALARS))
def test_one_row_is_read_as_each_of_two_is(name: str) -> None:
    rule = SCALARS[name]
    numbers = (0, 1, 2, 64, 65, -1, 0.5, -0.5, 1e-30, 2**31, 2**32, 2**63, np.inf, -np.inf, np.nan)
    for dtype in (*rule.dtypes, np.dtype(rule.dtypes[0]).newbyteorder(), np.float64, np.int8):
        for number in numbers:
            with np.errstate(all="ignore"):
                values = np.array([number, number], np.float64).astype(dtype)
            for shape in ((1,), (1, 1)):
                assert said(rule, name, values[:1].reshape(shape), 1) == said(rule, name, values, 2)
    for shape in ((), (1, 1, 1), (1, 2), (2, 1)):
        assert isinstance(said(rule, name, np.zeros(shape, rule.dtypes[0]), 1), str)


def said(rule: Scalar, name: str, array: np.ndarray[Any, Any], batch: int) -> Any:
    """The first row's value with its type, or what is wrong."""
    try:
        found = rule.read(name, array, batch)
    except RequestError as error:
        return str(error)
    assert found.shape == (batch,)
    return found[0].tobytes(), found.dtype
