"""Every tensor of a request, spoilt in every way: it is refused by its name, or accepted for a reason written here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.fastertransformer.engine.errors import RequestError
from backends.fastertransformer.engine.model.config import ModelConfig, Stack
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.request.schema import INPUT_SCHEMAS, InputSchema

SIZES: dict[str, int] = {"head_num": 2, "size_per_head": 4, "inter_size": 8, "num_layer": 1}
CONFIG = ModelConfig(**SIZES, vocab_size=100, max_pos_seq_len=20, start_id=3, end_id=7)
T5 = replace(CONFIG, family="t5", encoder=Stack(**SIZES), ia3_num_tasks=2)
CONFIGS = {
    config.family: config for config in (CONFIG, replace(CONFIG, family="llama"), T5, replace(T5, family="t5-encoder"))
}
Tensors = dict[str, np.ndarray]
INPUT: Tensors = {
    "input_ids": np.array([[1, 2, 3, 4], [5, 6, 0, 0]], np.uint32),
    "input_lengths": np.array([[4], [2]], np.uint32),
    "request_output_len": np.array([[5], [6]], np.uint32),
}
WORDS = np.array([[[5], [1]]] * 2, np.int32)
BEGINNING: Tensors = {
    "decoder_input_ids": np.array([[1, 2], [3, 0]], np.uint32),
    "decoder_input_lengths": np.array([[2], [1]], np.uint32),
}
BIAS: Tensors = {
    "logit_bias_ids": np.array([[5], [6]], np.int32),
    "logit_bias_values": np.array([[0.5], [-1]], np.float32),
}
GUIDES: Tensors = {
    "guided_decoding_guide_type": np.array([[b"regex"], [b""]], object),
    "guided_decoding_guide": np.array([[b"a+"], [b""]], object),
}
EXAMPLES: Tensors = {
    **INPUT,
    "sequence_length": INPUT["input_lengths"],
    "max_output_len": INPUT["request_output_len"],
    "stop_words_list": WORDS,
    "bad_words_list": WORDS,
    "request_prompt_embedding": np.zeros((2, 1, 8), np.float32),
    "ia3_tasks": np.array([[1], [0]], np.int32),
    **BEGINNING,
    **BIAS,
    "stop_token_ids": np.array([[5, -1], [6, 7]], np.int32),
    **GUIDES,
    "lora_name": np.array([[b"a"], [b""]], object),
    "START": np.array([1], np.int32),
    "END": np.array([1], np.int32),
}
# What a client may send although it looks spoilt, with the reason.
ZERO_MEANS_NONE = {"beam_width", "runtime_top_k", "random_seed", "min_length", "session_len", "memory_len", "input_ids"}
ZERO_MEANS_NONE |= {"request_output_len", "request_prompt_lengths", "request_prompt_type", "START", "END"}
ZERO_MEANS_NONE |= {"end_id", "start_id", "top_p_reset_ids", "bad_words_list", "stop_words_list"}
ZERO_MEANS_NONE |= {"max_output_len", "ia3_tasks", "max_speculative_tokens", *BEGINNING}
ZERO_MEANS_NONE |= {"num_top_log_probs", "num_context_top_log_probs", "stop_token_ids", *BIAS}
ANY_NUMBER = {"beam_search_diversity_rate", "len_penalty", "presence_penalty", "top_p_decay", "top_p_min"}
ANY_NUMBER |= {"frequency_penalty", "output_presence_penalty", "logit_bias_values"}
FROM_0_ON = {"temperature", "repetition_penalty"}
ANY_COUNT = {"min_length", "random_seed", "runtime_top_k", "session_len", "memory_len"}
NEVER_COMES = {"end_id", "start_id", "top_p_reset_ids"}  # a token beyond the vocabulary
LISTS = {"bad_words_list", "stop_words_list"}
TOKENS = {"stop_token_ids", "logit_bias_ids"}
FLAGS = {"START", "END"}  # one whole number of any shape; all but 0 is true
ACCEPTED = {
    **dict.fromkeys(((name, "zeros") for name in ZERO_MEANS_NONE), "0 is none, token 0 or task 0"),
    **dict.fromkeys(((name, what) for name in ANY_NUMBER for what in ("-1", "3e+38", "-3e+38")), "FasterTransformer's"),
    **{(name, "3e+38"): "the limit is none" for name in FROM_0_ON},
    **dict.fromkeys(((name, what) for name in ANY_COUNT for what in ("largest", "hundreds")), "more than there are"),
    **dict.fromkeys(((name, what) for name in NEVER_COMES for what in ("largest", "hundreds")), "it never comes"),
    **dict.fromkeys(((name, what) for name in FLAGS for what in ("rank", "no axis", "fewer rows")), "one number"),
    **dict.fromkeys(((name, what) for name in FLAGS for what in ("largest", "hundreds", "-1", "least")), "true"),
    ("max_speculative_tokens", "-1"): "as deployed",
    ("input_ids", "no columns"): "a row without input starts from start_id",
    **dict.fromkeys(((name, what) for name in LISTS for what in ("no columns", "-1", "least")), "no words"),
    **dict.fromkeys(((name, "-1") for name in TOKENS), "padding"),
    ("stop_token_ids", "no columns"): "no tokens",
    ("guided_decoding_guide", "bytes"): "a regular expression",
}
# What means nothing to one family although it does to another.
REFUSED = {("t5", "start_id", what): "its decoder always begins with it" for what in ("largest", "hundreds")}


def request_of(family: str) -> Tensors:
    """What a request must have."""
    vocabulary = INPUT_SCHEMAS[family]
    return {name: EXAMPLES[name] for name in filter(None, ("input_ids", vocabulary.lengths, vocabulary.output))}


def spoilt(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Wrong types, shapes and values."""
    yield "type", np.zeros(array.shape, np.float64)
    yield "bytes", np.full(array.shape, b"x", object)
    yield "rank", array[..., None]
    yield "no axis", array.reshape(-1)[:1].reshape(())
    yield "more rows", np.concatenate([array, array[:1]])
    yield "fewer rows", array[:1]
    yield "no rows", array[:0]
    yield "no columns", array[..., :0]
    if array.dtype.kind == "f":
        values: dict[str, float] = {f"{value:g}": value for value in (np.nan, np.inf, -np.inf, -1, 3e38, -3e38)}
    elif array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        values = {"largest": limits.max, "hundreds": 100, "zeros": 0}
        values |= {"least": limits.min, "-1": -1} if array.dtype.kind == "i" else {}
    else:
        values = {}
    for what, value in values.items():
        yield what, np.full_like(array, value)


def example(name: str, vocabulary: InputSchema) -> np.ndarray:
    if name in EXAMPLES:
        return EXAMPLES[name]
    rule = vocabulary.scalars[name]
    return np.full((2, 1), 3 if rule.default is None else rule.default, rule.dtypes[0])


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in CONFIGS for name in sorted(INPUT_SCHEMAS[family].names)]
)
def test_a_spoilt_tensor_is_refused_by_its_name(family: str, name: str) -> None:
    company = next((group for group in (BEGINNING, BIAS, GUIDES) if name in group), {})
    request = request_of(family) | company
    surprises: list[str] = []
    for what, array in spoilt(example(name, INPUT_SCHEMAS[family])):
        is_meant = (name, what) in ACCEPTED and (family, name, what) not in REFUSED
        try:
            parse_request({**request, name: array}, CONFIGS[family])
            found = "" if is_meant else "accepted"
        except RequestError as error:
            found = "" if name in str(error) else f"not named: {error}"
            found = found or ("refused though it means something" if is_meant else "")
        if found:
            surprises.append(f"{what}: {found}")
    assert surprises == []


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"min_length": np.full((2, 1), -1, np.int32)}, "min_length is -1 in row 0; it must be at least 0"),
        ({"stop_words_list": np.array([[[-7], [1]]] * 2, np.int32)}, "stop_words_list holds -7 in row 0"),
        (
            {"input_ids": np.zeros((2, 0), np.uint32), "start_id": np.array([[3], [100]], np.uint32)},
            "start_id is 100 in row 1; it must be below vocab_size 100",
        ),
        (
            {"input_ids": np.zeros((3, 4), np.uint32)},
            r"input_lengths has shape \[2, 1\], expected \[3, 1\], as input_ids has 3 rows",
        ),
    ],
)
def test_the_words_say_what_is_wrong(tensors: Tensors, words: str) -> None:
    given: dict[str, Any] = {**INPUT, **tensors}
    if given["input_ids"].shape[1] == 0:
        given["input_lengths"] = np.zeros((2, 1), np.uint32)
    with pytest.raises(RequestError, match=words):
        parse_request(given, CONFIG)


def test_padding_behind_the_words_may_be_anything() -> None:
    padded = np.array([[[5, -1], [1, -1]]] * 2, np.int32)
    rows = parse_request({**INPUT, "stop_words_list": padded}, CONFIG).rows
    assert [bool(row.sampling.stop_words) for row in rows] == [True] * 2
