"""decoder_input_ids: what an encoder-decoder's decoder is made to begin with, against Hugging Face's T5."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, Tensors
from support.engines.t5_requests import LONG, ask, by_hugging_face, cut, settings_of, sources
from support.shards.family_shards import write_family
from support.shards.random_t5 import random_t5

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.request.schema import INPUT_SCHEMAS

ROWS, BEGUN, COUNTS = sources(9, 4, 14, 1), sources(6, 1, 0, 11), [5, 3, 12, 7]
KINDS = {
    "t5": {"feed_forward_proj": "relu"},
    "t5-v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


@pytest.fixture(scope="module", params=[("t5", 2), ("t5-v1.1", 1)], ids=str)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Engine]:
    kind, ranks = request.param
    model = random_t5(**KINDS[kind])
    settings = replace(settings_of(write_family(model, tmp_path_factory.mktemp("t5"), ranks)), tensor_para_size=ranks)
    return model, open_engine(settings, CPU)


def begin(rows: list[list[int]], begun: list[list[int]], output: Any, **scalars: Any) -> Tensors:
    ids = np.full((len(rows), max(map(len, begun))), 5, np.uint32)  # 5: padding that must not matter
    for row, line in enumerate(begun):
        ids[row, : len(line)] = line
    lengths = [len(line) for line in begun]
    return ask(rows, output, decoder_input_lengths=lengths, **scalars) | {"decoder_input_ids": ids}


def answer(engine: Engine, tensors: Tensors) -> Tensors:
    return engine.generate([engine.parse(tensors)])[0]


def theirs(model: Any, source: list[int], begun: list[int]) -> torch.Tensor:
    """Log probabilities of what comes in each place of the decoder behind its start token, [len(begun), V]."""
    given = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([[0, *begun]])}
    with torch.no_grad():
        return model(**given).logits[0, :-1].log_softmax(-1)


def test_every_token_is_scored_as_hugging_face_scores_it(opened: tuple[Any, Engine]) -> None:
    model, engine = opened
    outputs = answer(engine, begin(ROWS, BEGUN, 0, is_return_context_log_probs=[True, True, True, True]))
    found, best = outputs["context_log_probs"], outputs["context_argmax_ids"]
    assert found.shape == best.shape == (4, 11) and (found.dtype, best.dtype) == (np.float32, np.uint32)
    assert outputs["output_ids"].shape == (4, 1, 11)
    for row, (source, begun) in enumerate(zip(ROWS, BEGUN, strict=True)):
        expected = theirs(model, source, begun)
        log_probs = expected[torch.arange(len(begun)), torch.tensor(begun, dtype=torch.long)]
        np.testing.assert_allclose(found[row, : len(begun)], log_probs, atol=1e-4)
        assert best[row, : len(begun)].tolist() == expected.argmax(-1).tolist()
        assert not found[row, len(begun) :].any() and not best[row, len(begun) :].any()
        assert outputs["sequence_length"][row, 0] == len(begun)


def test_the_most_probable_tokens_are_hugging_faces_in_each_place(opened: tuple[Any, Engine]) -> None:
    model, engine = opened
    outputs = answer(engine, begin(ROWS, BEGUN, COUNTS, num_context_top_log_probs=4, num_top_log_probs=2))
    for row, (source, begun) in enumerate(zip(ROWS, BEGUN, strict=True)):
        length = int(outputs["sequence_length"][row, 0])
        tokens = outputs["output_ids"][row, 0, :length].tolist()
        log_probs = theirs(model, source, tokens)
        best = log_probs[: len(begun)].topk(4, dim=-1)
        np.testing.assert_allclose(outputs["context_top_log_probs"][row, : len(begun)], best.values, atol=1e-4)
        best, own = log_probs[len(begun) :].topk(2, dim=-1), log_probs[range(length), tokens][len(begun) :]
        np.testing.assert_allclose(outputs["output_raw_log_probs"][row, 0, : len(own)], own, atol=1e-4)
        np.testing.assert_allclose(outputs["output_top_log_probs"][row, 0, : len(own)], best.values, atol=1e-4)
        np.testing.assert_array_equal(outputs["output_top_ids"][row, 0, : len(own), 0], tokens[len(begun) :])


def test_generation_goes_on_behind_them_as_hugging_faces_does(opened: tuple[Any, Engine]) -> None:
    model, engine = opened
    wanted = {"is_return_log_probs": True, "is_return_context_cum_log_probs": [True, False, True, True]}
    outputs = answer(engine, begin(ROWS, BEGUN, COUNTS, **wanted))
    assert outputs["output_ids"].shape == (4, 1, 11 + 12)
    for row, (source, begun, count) in enumerate(zip(ROWS, BEGUN, COUNTS, strict=True)):
        found = by_hugging_face(model, source, count, decoder_input_ids=torch.tensor([[0, *begun]]))
        length = int(outputs["sequence_length"][row, 0])
        assert outputs["output_ids"][row, 0, :length].tolist() == found.sequences[0, 1:].tolist()
        assert not outputs["output_ids"][row, 0, length:].any()
        gains = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
        expected = float(gains.sum())
        if row != 1:
            log_probs = theirs(model, source, begun)
            expected += float(log_probs[torch.arange(len(begun)), torch.tensor(begun, dtype=torch.long)].sum())
        assert outputs["cum_log_probs"][row, 0] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("len_penalty", [0.0, 1.0])
def test_beams_begin_with_them_as_hugging_faces_do(opened: tuple[Any, Engine], len_penalty: float) -> None:
    """Hugging Face's length of a beam is that of what it generated, too."""
    model, engine = opened
    for source, begun in zip(ROWS, [*BEGUN[:2], *BEGUN[3:]], strict=False):
        how = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": len_penalty, "early_stopping": True}
        how |= {"decoder_input_ids": torch.tensor([[0, *begun]]), "pad_token_id": 0}
        end_id = by_hugging_face(model, source, LONG, **how | {"eos_token_id": None}).sequences[0, 3 + len(begun)]
        found = by_hugging_face(model, source, LONG, **how | {"eos_token_id": int(end_id)})
        asked = {"beam_width": 3, "len_penalty": len_penalty, "end_id": int(end_id)}
        scored = {"is_return_log_probs": True, "is_return_context_log_probs": True}
        outputs = answer(engine, begin([source], [begun], LONG, **asked, **scored))
        for beam in range(3):
            length = outputs["sequence_length"][0, beam]
            tokens = outputs["output_ids"][0, beam, :length].tolist()
            expected = found.sequences[beam, 1:].tolist()
            assert tokens == begun + cut(expected[len(begun) :], int(end_id))
            score = outputs["cum_log_probs"][0, beam] / (length - len(begun)) ** len_penalty
            assert score == pytest.approx(float(found.sequences_scores[beam]), abs=1e-3)
        row = theirs(model, source, begun)[torch.arange(len(begun)), torch.tensor(begun)]
        np.testing.assert_allclose(outputs["context_log_probs"][0], row, atol=1e-4)


def test_a_row_is_the_same_alone_and_among_rows_without_any(opened: tuple[Any, Engine]) -> None:
    engine = opened[1]
    plain = answer(engine, ask(ROWS, 6))
    requests = [engine.parse(begin(ROWS, [[], BEGUN[0], [], []], 6)), engine.parse(ask(ROWS[:2], 6))]
    mixed, beside = engine.generate(requests)
    alone = answer(engine, begin(ROWS[1:2], [BEGUN[0]], 6))
    np.testing.assert_array_equal(mixed["output_ids"][1], alone["output_ids"][0])
    np.testing.assert_array_equal(mixed["output_ids"][[0, 2, 3], :, :6], plain["output_ids"][[0, 2, 3]])
    np.testing.assert_array_equal(beside["output_ids"], plain["output_ids"][:2])


def test_a_penalty_and_a_stop_word_see_them(opened: tuple[Any, Engine]) -> None:
    engine, (source, begun) = opened[1], (ROWS[0], BEGUN[0])
    free = answer(engine, begin([source], [begun], 4))["output_ids"][0, 0, len(begun) :].tolist()
    stop = {"stop_words_list": np.array([[[begun[-1], free[0]], [2, -1]]], np.int32)}
    assert answer(engine, begin([source], [begun], 4) | stop)["sequence_length"].tolist() == [[len(begun) + 1]]
    presence = {"presence_penalty": np.array([[1e4]], np.float32)}
    penalised = answer(engine, begin([source], [[*begun, free[0]]], 1) | presence)["output_ids"][0, 0]
    assert penalised[-1] not in (*begun, free[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder_input_lengths": None}, "decoder_input_ids and decoder_input_lengths come together"),
        ({"decoder_input_ids": None}, "decoder_input_ids and decoder_input_lengths come together"),
        (
            {"decoder_input_lengths": np.array([[7]], np.uint32)},
            "decoder_input_lengths is 7 in row 0; it must be at mo",
        ),
        ({"decoder_input_ids": np.full((1, 6), 5000, np.uint32)}, "decoder_input_ids' largest is 5000 in row 0; it mu"),
        ({"decoder_input_ids": np.zeros((2, 6), np.uint32)}, r"has shape \[2, 6\], expected \[1, n\]"),
        ({"decoder_input_ids": np.zeros((1, 6), np.int64)}, "decoder_input_ids has type int64, expected uint32"),
    ],
)
def test_malformed_ones_are_refused(opened: tuple[Any, Engine], change: dict[str, Any], words: str) -> None:
    tensors = begin(ROWS[:1], BEGUN[:1], 4) | change
    with pytest.raises(EngineError, match=words):
        opened[1].parse({name: value for name, value in tensors.items() if value is not None})


def test_they_take_positions(tmp_path: Path) -> None:
    """A decoder with learned positions has as many as config.ini says."""
    from backends.fastertransformer.engine.model.config import ModelConfig, Stack
    from backends.fastertransformer.engine.request.parse import parse_request

    sizes = {"head_num": 2, "size_per_head": 4, "inter_size": 8, "num_layer": 1}
    config = ModelConfig(
        **sizes, vocab_size=100, max_pos_seq_len=12, start_id=0, end_id=1, family="t5", encoder=Stack(**sizes)
    )
    parse_request(begin(ROWS[:1], BEGUN[:1], 6), config)
    with pytest.raises(EngineError, match=r"or max_output_len 7 \+ decoder_input_lengths 6 = 13 in row 0 exceeds"):
        parse_request(begin(ROWS[:1], BEGUN[:1], 7), config)


def test_other_families_have_no_such_input() -> None:
    having = {name for name, vocabulary in INPUT_SCHEMAS.items() if "decoder_input_ids" in vocabulary.names}
    assert having == {"t5"} and "is_return_context_embeddings" not in INPUT_SCHEMAS["t5"].names
