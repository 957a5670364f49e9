"""The engine against Hugging Face GPT-2 over the same weights."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, END, Tensors, ask, prompts
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from transformers import GPT2LMHeadModel

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.scheduling import contexts, prefill_pass
from backends.fastertransformer.engine.scheduling.tuning import TUNING
from backends.fastertransformer.engine.settings import Settings

LENGTHS = (7, 1, 12, 3, 7)
OUTPUTS = (10, 4, 20, 1, 10)


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    return random_gpt2()


@pytest.fixture(scope="module")
def engine_settings(gpt2: GPT2LMHeadModel, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(write_shards(gpt2, tmp_path_factory.mktemp("gpt2")), 1, 1, "fp32", cpu_threads=1)


@pytest.fixture(scope="module")
def engine(engine_settings: Settings) -> Engine:
    return open_engine(engine_settings, CPU)


def answer(engine: Engine, tensors: Tensors) -> Tensors:
    return engine.generate([engine.parse(tensors)])[0]


def generated_rows(outputs: Tensors) -> list[list[int]]:
    starts, ends = outputs["response_input_lengths"][:, 0], outputs["sequence_length"][:, 0]
    return [ids[start:end].tolist() for ids, start, end in zip(outputs["output_ids"][:, 0], starts, ends, strict=True)]


def greedy_by_hugging_face(model: GPT2LMHeadModel, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    result = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=END
    )
    return [int(token) for token in result[0, len(prompt) :]]


def log_probs_by_hugging_face(model: GPT2LMHeadModel, sequence: list[int]) -> np.ndarray:
    """[len - 1]: of each token from the second on, given what precedes it."""
    with torch.no_grad():
        log_probs = model(torch.tensor([sequence])).logits[0].log_softmax(-1)
    return log_probs[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0].numpy()


# The output layer is cut alike whoever else has it.
@pytest.mark.in_ci(when=lambda at: at.tensor_para_size == 2 or at.is_tied)
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("tensor_para_size", [1, 2, 4])
def test_greedy_tokens_and_log_probs_are_hugging_faces_in_a_mixed_batch(
    tensor_para_size: int, is_tied: bool, tmp_path: Path
) -> None:
    model = random_gpt2(seed=tensor_para_size, tie_word_embeddings=is_tied)
    shards = write_shards(model, tmp_path, tensor_para_size)
    engine = open_engine(Settings(shards, tensor_para_size, 1, "fp32", cpu_threads=1), CPU)
    rows = prompts(*LENGTHS)
    for scope in ({}, {"is_return_context_cum_log_probs": True}):
        # Greedy by a tiny top_p, so that output_log_probs are the model's own probabilities.
        outputs = answer(engine, ask(rows, OUTPUTS, runtime_top_p=1e-7, is_return_log_probs=True, **scope))
        for row, (prompt, tokens) in enumerate(zip(rows, generated_rows(outputs), strict=True)):
            assert tokens == greedy_by_hugging_face(model, prompt, OUTPUTS[row])
            log_probs = log_probs_by_hugging_face(model, prompt + tokens)
            first = 0 if scope else len(prompt) - 1
            np.testing.assert_allclose(outputs["cum_log_probs"][row, 0], log_probs[first:].sum(), atol=2e-4)
            reported = outputs["output_log_probs"][row, 0]
            np.testing.assert_allclose(reported[: len(tokens)], log_probs[len(prompt) - 1 :], atol=1e-4)
            assert not reported[len(tokens) :].any()


def test_a_greedy_row_reports_zero_given_its_one_candidate(engine: Engine, gpt2: GPT2LMHeadModel) -> None:
    outputs = answer(engine, ask(prompts(5), 6, is_return_log_probs=True))
    (tokens,) = generated_rows(outputs)
    expected = log_probs_by_hugging_face(gpt2, prompts(5)[0] + tokens)[4:].sum()
    np.testing.assert_allclose(outputs["cum_log_probs"], [[expected]], atol=1e-4)
    assert not outputs["output_log_probs"].any()


def test_the_layout_is_fastertransformers(engine: Engine, gpt2: GPT2LMHeadModel) -> None:
    rows = prompts(*LENGTHS)
    outputs = answer(engine, ask(rows, OUTPUTS))
    assert {name: (array.dtype.name, array.shape) for name, array in outputs.items()} == {
        "output_ids": ("uint32", (5, 1, 12 + 20)),
        "sequence_length": ("uint32", (5, 1)),
        "response_input_lengths": ("int32", (5, 1)),
        "finish_reason": ("int32", (5, 1)),  # this engine's own
    }
    for row, prompt in enumerate(rows):
        line = prompt + greedy_by_hugging_face(gpt2, prompt, OUTPUTS[row])
        assert outputs["output_ids"][row, 0].tolist() == line + [END] * (32 - len(line))
        assert outputs["sequence_length"][row, 0] == len(line)


def test_each_row_stops_at_its_own_end_id(engine: Engine) -> None:
    (free,) = generated_rows(answer(engine, ask(prompts(6), 20, end_id=4000)))
    assert len(free) == 20  # an end_id outside the vocabulary never comes
    ends = [free[0], free[9], 4000]
    rows = generated_rows(answer(engine, ask(prompts(6) * 3, 20, end_id=ends)))
    assert rows == [free[:1], free[: free.index(free[9]) + 1], free]
    outputs = answer(engine, ask(prompts(6), 20, end_id=free[9]))
    assert set(outputs["output_ids"][0, 0, 6 + len(rows[1]) :].tolist()) <= {free[9]}


def test_no_output_is_an_answer_too(engine: Engine, gpt2: GPT2LMHeadModel) -> None:
    rows = prompts(4, 6)
    tensors = ask(rows, [0, 3], is_return_log_probs=True, is_return_context_cum_log_probs=True)
    outputs = answer(engine, tensors)
    assert outputs["sequence_length"].tolist() == [[4], [9]]
    expected = log_probs_by_hugging_face(gpt2, rows[0]).sum()
    np.testing.assert_allclose(outputs["cum_log_probs"][0, 0], expected, atol=1e-4)
    alone = answer(engine, ask(rows[:1], 0))
    assert alone["output_ids"].tolist() == [[rows[0]]]


def test_an_empty_input_starts_from_start_id_and_hides_it(engine: Engine, gpt2: GPT2LMHeadModel) -> None:
    tensors = ask([[], []], 5, start_id=[0, 17])
    outputs = answer(engine, tensors)
    assert outputs["output_ids"].shape == (2, 1, 5)
    assert generated_rows(outputs) == [greedy_by_hugging_face(gpt2, [start], 5) for start in (0, 17)]


def test_a_row_does_not_depend_on_what_else_is_in_the_batch(engine: Engine, engine_settings: Settings) -> None:
    rows = prompts(*LENGTHS)
    scalars: dict[str, list[Any]] = {
        "runtime_top_k": [0, 8, 0, 40, 5],
        "runtime_top_p": [0.0, 0.0, 0.9, 0.7, 0.95],
        "temperature": [1.0, 0.7, 1.5, 1.0, 2.0],
        "repetition_penalty": [1.0, 1.0, 1.2, 3.0, 0.9],
        "random_seed": [0, 1, 2, 3, 2**63],
    }
    together = generated_rows(answer(engine, ask(rows, OUTPUTS, **scalars)))
    for row in range(len(rows)):
        own = {name: values[row] for name, values in scalars.items()}
        alone = generated_rows(answer(engine, ask(rows[row : row + 1], OUTPUTS[row], **own)))
        assert alone == together[row : row + 1]
    requests = [
        engine.parse(ask([rows[row]], OUTPUTS[row], **{name: values[row] for name, values in scalars.items()}))
        for row in range(len(rows))
    ]
    for max_rows, is_inflight in ((1, True), (2, True), (3, False), (1024, True)):
        settings = replace(engine_settings, has_inflight_batching=is_inflight)
        answers = open_engine(settings, CPU, max_rows=max_rows).generate(requests)
        assert [generated_rows(outputs)[0] for outputs in answers] == together
        assert [outputs["output_ids"].shape[2] for outputs in answers] == [
            length + count for length, count in zip(LENGTHS, OUTPUTS, strict=True)
        ]


def test_seeds_reproduce_and_differ(engine: Engine) -> None:
    rows = prompts(6) * 4
    tensors = ask(rows, 20, runtime_top_p=1.0, temperature=2.0, random_seed=[1, 2, 1, 3], end_id=4000)
    first, second = (generated_rows(answer(engine, tensors)) for _ in range(2))
    assert first == second
    assert first[0] == first[2]
    assert first[0] != first[1] != first[3]


def test_repetition_penalty_follows_hugging_face_through_a_generation(engine: Engine, gpt2: GPT2LMHeadModel) -> None:
    rows = prompts(3, 9)
    penalised = generated_rows(answer(engine, ask(rows, 15, repetition_penalty=1.6)))
    for prompt, tokens in zip(rows, penalised, strict=True):
        ids = torch.tensor([prompt])
        expected = gpt2.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=15,
            do_sample=False,
            repetition_penalty=1.6,
            pad_token_id=END,
        )
        assert tokens == expected[0, len(prompt) :].tolist()


def test_small_passes_give_the_same(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = {"is_return_log_probs": True, "is_return_context_cum_log_probs": True}
    tensors = ask(prompts(*LENGTHS), OUTPUTS, **scope)
    expected = answer(engine, tensors)
    monkeypatch.setattr(prefill_pass, "TUNING", replace(TUNING, pass_tokens=9))
    monkeypatch.setattr(contexts, "_LOGITS_BYTES", 4 * 97 * 2)
    outputs = answer(engine, tensors)
    assert generated_rows(outputs) == generated_rows(expected)
    np.testing.assert_allclose(outputs["cum_log_probs"], expected["cum_log_probs"], atol=1e-4)


@pytest.mark.parametrize("weight_data_type", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("data_type", "tolerance"), [("fp32", 1e-3), ("fp16", 1e-2), ("bf16", 0.3)])
def test_every_pair_of_data_types_stays_near_fp32(
    gpt2: GPT2LMHeadModel, weight_data_type: str, data_type: str, tolerance: float, tmp_path: Path
) -> None:
    shards = write_shards(gpt2, tmp_path, 2, weight_data_type)
    engine = open_engine(Settings(shards, 2, 1, data_type, cpu_threads=1), CPU)
    rounded = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[weight_data_type]
    reference = random_gpt2()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(rounded))
    rows = prompts(8, 11)
    outputs = answer(engine, ask(rows, 0, is_return_log_probs=True, is_return_context_cum_log_probs=True))
    for row, prompt in enumerate(rows):
        expected = log_probs_by_hugging_face(reference, prompt)
        assert abs(outputs["cum_log_probs"][row, 0] - expected.sum()) < tolerance * len(prompt)
    if data_type == "fp16":
        assert "fp16, arithmetic in fp32" in engine.description


def test_what_the_last_batch_left_in_the_cache_does_not_matter(engine_settings: Settings) -> None:
    engine = open_engine(replace(engine_settings, kv_cache_bytes=1 << 26), CPU)  # all of which is written to
    tensors = ask(prompts(*LENGTHS), OUTPUTS)
    expected = generated_rows(answer(engine, tensors))
    with torch.inference_mode():
        for block in engine._steps.cache.kv:
            block.fill_(1e4)
    assert generated_rows(answer(engine, tensors)) == expected


@pytest.mark.usefixtures("unfreezing")
def test_a_served_model_is_no_work_for_the_garbage_collector(engine_settings: Settings) -> None:
    engine = open_engine(engine_settings, CPU)
    assert gc.get_freeze_count() > 10_000  # torch alone has more objects
    assert not gc.is_tracked(engine.config) or all(each is not engine.config for each in gc.get_objects())
    engine.close()
    assert gc.get_freeze_count() == 0
