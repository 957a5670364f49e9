"""Why a row has ended, and what else ends one: stop_token_ids, ignore_eos.

The numbers are those of TensorRT-LLM's executor::FinishReason.
"""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
from support.engines.asking import CPU, VOCABULARY, Tensors, ask, generated, padded, prompts, tiny_gpt2, word_list

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.errors import RequestError
from backends.fastertransformer.engine.rows.answer import Answer

NOT_FINISHED, END_ID, STOP_WORDS, LENGTH = range(4)
NEVER, COUNT = 4000, 12


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return open_engine(tiny_gpt2(tmp_path_factory.mktemp("gpt2"))[1], CPU)


def answer(engine: Engine, tensors: Tensors) -> Tensors:
    return engine.generate([engine.parse(tensors)])[0]


def free_tokens(engine: Engine, lines: list[list[int]]) -> list[list[int]]:
    """What rows generate that nothing ends: drawn, so that few tokens repeat."""
    outputs = answer(engine, ask(lines, COUNT, end_id=NEVER, **DRAWN))
    return [generated(outputs, row) for row in range(len(lines))]


DRAWN: dict[str, Any] = {"runtime_top_k": 60, "temperature": 3.0, "random_seed": 5}


def test_each_row_says_what_has_ended_it(engine: Engine) -> None:
    lines = prompts(5, 5, 5, 5, 5)
    free = free_tokens(engine, lines)
    end_ids = [free[0][3], NEVER, NEVER, NEVER, free[4][2]]
    tensors = ask(lines, [COUNT, COUNT, COUNT, 4, COUNT], end_id=end_ids, ignore_eos=[False] * 4 + [True], **DRAWN)
    tensors["stop_token_ids"] = padded([[], [95, free[1][5]], [], [], []])
    nothing = np.array([[[0, 0], [-1, -1]]], np.int32)
    tensors["stop_words_list"] = np.concatenate([nothing, nothing, word_list([free[2][4:6]]), nothing, nothing])
    outputs = answer(engine, tensors)
    assert outputs["finish_reason"].dtype == np.int32
    assert outputs["finish_reason"].tolist() == [[END_ID], [END_ID], [STOP_WORDS], [LENGTH], [LENGTH]]
    lengths = [
        free[0].index(end_ids[0]) + 1,
        min(free[1].index(token) + 1 for token in (95, free[1][5]) if token in free[1]),
        6,
        4,
        COUNT,
    ]
    assert [generated(outputs, row) for row in range(5)] == [
        tokens[:length] for tokens, length in zip(free, lengths, strict=True)
    ]
    assert outputs["output_ids"][4, 0, -1] == free[4][-1]  # ignore_eos: the whole output
    assert (outputs["output_ids"][0, 0, 5 + lengths[0] :] == end_ids[0]).all()


def test_an_answer_to_a_row_that_goes_on_says_so(engine: Engine) -> None:
    lines, counts = prompts(4, 7), [6, 2]
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    engine.submit(engine.parse(ask(lines, counts, end_id=NEVER)), answers.put, is_streaming=True)
    reasons = []
    for _ in range(max(counts)):
        tensors = answers.get(timeout=180).tensors
        assert tensors
        reasons.append(tensors["finish_reason"][:, 0].tolist())
    assert reasons == [[NOT_FINISHED] * 2, *[[NOT_FINISHED, LENGTH]] * 4, [LENGTH] * 2]


def test_no_output_ends_by_its_length(engine: Engine) -> None:
    assert answer(engine, ask(prompts(4), 0))["finish_reason"].tolist() == [[LENGTH]]


def test_each_beam_says_what_has_ended_it(engine: Engine) -> None:
    (line,) = prompts(6)
    outputs = answer(engine, ask([line], COUNT, end_id=NEVER, beam_width=4))
    assert outputs["finish_reason"].tolist() == [[LENGTH] * 4]
    end_id = generated(outputs)[2]
    outputs = answer(engine, ask([line], COUNT, end_id=end_id, beam_width=4))
    ends = [generated(outputs, 0, beam)[-1] == end_id for beam in range(4)]
    assert any(ends)
    assert outputs["finish_reason"][0].tolist() == [END_ID if end else LENGTH for end in ends]
    ignored = answer(engine, ask([line], COUNT, end_id=end_id, beam_width=4, ignore_eos=True))
    assert ignored["finish_reason"].tolist() == [[LENGTH] * 4]


def test_stop_tokens_come_not_before_min_length(engine: Engine) -> None:
    lines = prompts(5, 5)
    stops = sorted({*free_tokens(engine, lines)[0][:3]})
    tensors = ask(lines, COUNT, end_id=NEVER, min_length=[8, 0], **DRAWN) | {"stop_token_ids": padded([stops, stops])}
    outputs = answer(engine, tensors)
    tokens = generated(outputs)
    assert len(tokens) >= 8 and not {*tokens[:8]} & {*stops}
    assert answer(engine, tensors | {"min_length": np.zeros((2, 1), np.int32)})["sequence_length"][0, 0] == 6


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        (
            "stop_token_ids",
            [[3], [VOCABULARY]],
            "stop_token_ids holds 97 in row 1; it must be 0 to 96, or -1 for padding",
        ),
        ("stop_token_ids", [[-2], [3]], "stop_token_ids holds -2 in row 0; it must be 0 to 96, or -1 for padding"),
        ("logit_bias_ids", [[3, 97], [3]], "logit_bias_ids holds 97 in row 0; it must be 0 to 96"),
        ("logit_bias_ids", [[3, 4], [5, 5]], "logit_bias_ids holds token 5 twice in row 1; once is legal"),
        ("logit_bias_values", [[1, np.nan], [2, 3]], "logit_bias_values holds a number in row 0 that is not finite"),
        (
            "logit_bias_values",
            [[1], [2]],
            r"ids has shape \[2, 2\], logit_bias_values \[2, 1\]; send one shape",
        ),
        ("logit_bias_values", None, "logit_bias_ids: logit_bias_ids and logit_bias_values come together; send both"),
    ],
)
def test_a_list_that_is_wrong_is_refused_by_name(engine: Engine, name: str, rows: Any, words: str) -> None:
    tensors = ask(prompts(4, 2), 3) | {"logit_bias_ids": padded([[3, 4], [3, 4]])}
    tensors["logit_bias_values"] = padded([[1, 2], [1, 2]], np.float32)
    if rows is None:
        del tensors[name]
    else:
        tensors[name] = padded(rows, tensors[name].dtype if name in tensors else np.int32)
    with pytest.raises(RequestError, match=words):
        engine.parse(tensors)


@pytest.mark.parametrize(
    "name", ["frequency_penalty", "output_presence_penalty", "min_p", "stop_token_ids", "logit_bias_ids"]
)
def test_what_a_beam_search_does_not_apply_is_refused(engine: Engine, name: str) -> None:
    lines = prompts(4, 2)
    neutral = ask(lines, 3, beam_width=2, frequency_penalty=0, output_presence_penalty=0, min_p=0, num_top_log_probs=0)
    neutral |= dict.fromkeys(("stop_token_ids", "logit_bias_ids"), padded([[-1], [-1]]))
    neutral["logit_bias_values"] = np.zeros((2, 1), np.float32)
    assert len(engine.parse(neutral).rows) == 2
    spoilt = padded([[1], [-1]]) if neutral[name].dtype == np.int32 else np.array([[0.5], [0]], np.float32)
    with pytest.raises(RequestError, match=f"{name}.* a beam search does not apply it"):
        engine.parse(neutral | {name: spoilt})
