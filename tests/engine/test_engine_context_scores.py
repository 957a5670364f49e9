"""is_return_context_log_probs: each token of the input, scored in one pass, against Hugging Face's forward pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, Tensors, ask, prompts, tiny_gpt2
from transformers import GPT2LMHeadModel

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.scheduling import contexts

WANTED = {"is_return_context_log_probs": True}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT2LMHeadModel, Engine]:
    model, settings = tiny_gpt2(tmp_path_factory.mktemp("gpt2"))
    return model, open_engine(settings, CPU)


def scores(model: GPT2LMHeadModel, line: list[int], embeddings: torch.Tensor | None = None) -> tuple[list, list]:
    """Log probability and most probable token at each place but the first."""
    given = {"input_ids": torch.tensor([line])} if embeddings is None else {"inputs_embeds": embeddings[None]}
    with torch.no_grad():
        rows = model(**given).logits[0].log_softmax(-1)[-len(line) : -1]
    return [float(row[token]) for row, token in zip(rows, line[1:], strict=True)], rows.argmax(-1).tolist()


def answer(engine: Engine, tensors: Tensors) -> Tensors:
    return engine.generate([engine.parse(tensors)])[0]


@pytest.mark.parametrize("block", [contexts._LOGITS_BYTES, 4 * 97 * 3])
def test_every_token_is_scored_as_hugging_face_scores_it(
    opened: tuple[GPT2LMHeadModel, Engine], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = opened
    monkeypatch.setattr(contexts, "_LOGITS_BYTES", block)  # blocks of 3 tokens too
    lines = prompts(9, 1, 20, 4)
    outputs = answer(engine, ask(lines, [0, 2, 1, 3], is_return_context_log_probs=[True, True, True, False]))
    assert outputs["context_log_probs"].shape == outputs["context_argmax_ids"].shape == (4, 20)
    assert (outputs["context_log_probs"].dtype, outputs["context_argmax_ids"].dtype) == (np.float32, np.uint32)
    for row, line in enumerate(lines[:3]):
        log_probs, best = scores(model, line)
        np.testing.assert_allclose(outputs["context_log_probs"][row, : len(line)], [0.0, *log_probs], atol=1e-4)
        assert outputs["context_argmax_ids"][row, : len(line)].tolist() == [0, *best]
        assert not outputs["context_log_probs"][row, len(line) :].any()
    assert not outputs["context_log_probs"][3].any() and not outputs["context_argmax_ids"][3].any()


def test_no_request_gets_scores_that_it_did_not_ask_for(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    assert not {"context_log_probs", "context_argmax_ids"} & answer(opened[1], ask(prompts(5), 1)).keys()


def test_temperature_and_penalty_change_nothing(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    engine, lines = opened[1], prompts(8)
    plain = answer(engine, ask(lines, 1, **WANTED))
    told = answer(engine, ask(lines, 1, temperature=3.0, repetition_penalty=2.0, runtime_top_k=5, **WANTED))
    np.testing.assert_array_equal(plain["context_log_probs"], told["context_log_probs"])


def test_behind_a_soft_prompt_the_first_token_is_scored_too(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    model, engine = opened
    (line,), length = prompts(6), 3
    prompt = np.random.default_rng(1).normal(size=(1, length, 32)).astype(np.float32)
    tensors = ask([line], 1, request_prompt_embedding=prompt, request_prompt_lengths=length, request_prompt_type=1)
    outputs = answer(engine, tensors | ask([line], 1, **WANTED))
    embeddings = torch.cat((torch.from_numpy(prompt[0]), model.transformer.wte(torch.tensor(line))))
    with torch.no_grad():
        rows = model(inputs_embeds=embeddings[None]).logits[0].log_softmax(-1)[length - 1 : -1]
    expected = [float(row[token]) for row, token in zip(rows, line, strict=True)]
    np.testing.assert_allclose(outputs["context_log_probs"][0], expected, atol=1e-4)
    assert outputs["context_argmax_ids"][0].tolist() == rows.argmax(-1).tolist()


def test_an_empty_input_has_no_scores(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    tensors = ask([[1]], 2, **WANTED) | {"input_ids": np.zeros((1, 0), np.uint32)}
    tensors["input_lengths"] = np.zeros((1, 1), np.uint32)
    assert answer(opened[1], tensors)["context_log_probs"].shape == (1, 0)
