"""Each sampling tensor in whole generations: Hugging Face's logits, and FasterTransformer's formulas in numpy.

The OpenAI API's formula of its penalties: mu[j] -> mu[j] - c[j] * frequency - float(c[j] > 0) * presence, where c[j] is
how often token j has been sampled before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, VOCABULARY, ask, generated, padded, prompts, tiny_gpt2
from support.shards.split_mix import split_mix
from transformers import GPT2LMHeadModel, MinPLogitsWarper

from backends.fastertransformer.engine.engine import Engine, open_engine

COUNT = 14
NEVER = 4000


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT2LMHeadModel, Engine]:
    model, settings = tiny_gpt2(tmp_path_factory.mktemp("gpt2"))
    return model, open_engine(settings, CPU)


def penalised(logits: np.ndarray[Any, Any], line: list[int], count: int, told: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Bias, OpenAI's penalties, and BaseSamplingLayer.cc: temperature, its own penalties, then minimum length."""
    for token, value in told.get("logit_bias", {}).items():
        logits[token] += value
    counts = np.bincount(line[len(line) - count :], minlength=VOCABULARY)
    logits = logits - counts * told.get("frequency_penalty", 0) - (counts > 0) * told.get("output_presence_penalty", 0)
    if told.get("temperature", 1) != 1:
        logits = logits / (told["temperature"] + 1e-6)
    seen = sorted(set(line))
    if "repetition_penalty" in told:
        old, penalty = logits[seen], told["repetition_penalty"]
        logits[seen] = np.where(old < 0, old * penalty, old / penalty)
    logits[seen] -= told.get("presence_penalty", 0)
    if count < told.get("min_length", 0):
        logits[[token for token in (told["end_id"], *told.get("stop_token_ids", ())) if token < VOCABULARY]] = -np.inf
    return logits


def above_min_p(logits: np.ndarray[Any, Any], min_p: float) -> np.ndarray[Any, Any]:
    warped = MinPLogitsWarper(min_p)(torch.zeros(1, 0, dtype=torch.long), torch.from_numpy(logits)[None])
    kept: np.ndarray[Any, Any] = warped[0].numpy()
    return kept


def draw(logits: np.ndarray[Any, Any], top_k: int, top_p: float, uniform: float) -> int:
    """The walk's distribution (see test_sampling), inverted in the order of the token ids."""
    probabilities = np.exp(logits - logits.max())
    order = np.argsort(-probabilities, kind="stable")[: top_k or None]
    kept = probabilities[order] / probabilities[order].sum()
    left, shares = top_p, np.zeros(len(logits))
    for token, probability in zip(order, kept, strict=True):
        shares[token] = min(probability, left)
        left = max(0.0, left - probability)
    cumulative = np.cumsum(shares / shares.sum())
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def generate(model: GPT2LMHeadModel, prompt: list[int], told: dict[str, Any]) -> tuple[list[int], float]:
    """The tokens of one row, and the sum of their log-probabilities."""
    line, total = list(prompt), 0.0
    top_k, first_p = int(told.get("runtime_top_k", 0)), float(told.get("runtime_top_p", 0))
    if not top_k and not first_p:
        top_k = 1
    first_p = first_p or 1.0
    top_p, numbers = first_p, split_mix(int(told.get("random_seed", 0)), COUNT)
    decay = told.get("top_p_decay", 1.0)
    least = told.get("top_p_min", 1e-6)
    for count in range(COUNT):
        with torch.no_grad():
            logits = model(torch.tensor([line])).logits[0, -1].double().numpy()
        logits = penalised(logits, line, count, told)
        token = draw(above_min_p(logits, told.get("min_p", 0.0)), top_k, top_p, numbers[count])
        total += float(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        line.append(token)
        if not top_k:  # sampling_topp_kernels.cu, computeToppDecay
            top_p = first_p if token == told.get("top_p_reset_ids", -1) else max(top_p * decay, least)
        if token in (told["end_id"], *told.get("stop_token_ids", ())):
            break
    return line[len(prompt) :], total


ROWS: list[dict[str, Any]] = [
    {},
    {"runtime_top_k": 7},
    {"runtime_top_p": 0.8},
    {"runtime_top_k": 12, "runtime_top_p": 0.6},
    {"runtime_top_k": 30, "temperature": 2.5},
    {"runtime_top_p": 1.0, "temperature": 0.4},
    {"runtime_top_k": 5, "repetition_penalty": 1.7},
    {"runtime_top_p": 0.95, "repetition_penalty": 0.6},
    {"runtime_top_p": 0.9, "top_p_decay": 0.6, "top_p_min": 0.2, "temperature": 2.0},
    {"runtime_top_p": 0.9, "top_p_decay": 0.3, "top_p_min": 0.01, "temperature": 3.0, "top_p_reset_ids": 47},
    {"runtime_top_k": 9, "runtime_top_p": 0.9, "top_p_decay": 0.1, "temperature": 2.0},  # top-k has no decay
    {"runtime_top_k": 50, "temperature": 3.0, "min_length": 9},
    {"min_length": 4},
    {"runtime_top_p": 1e-7},
    {"frequency_penalty": 0.6},
    {"runtime_top_k": 8, "frequency_penalty": -0.4, "output_presence_penalty": 1.1, "temperature": 1.8},
    {"runtime_top_p": 0.9, "output_presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"runtime_top_p": 1.0, "min_p": 0.3, "temperature": 2.0},
    {"runtime_top_k": 40, "runtime_top_p": 0.8, "min_p": 0.05, "temperature": 3.0},
    {"logit_bias": {5: 4.0, 90: -100.0, 17: 3.5}},
    {"runtime_top_p": 0.95, "logit_bias": {31: 6.0}, "frequency_penalty": 1.5, "temperature": 0.7},
    {"runtime_top_k": 50, "temperature": 3.0, "min_length": 9, "stop_token_ids": list(range(0, 90, 7))},
    {"runtime_top_k": 50, "temperature": 3.0, "stop_token_ids": list(range(0, 90, 7))},
]
LISTS = ("logit_bias", "stop_token_ids")


def told_rows(rows: list[dict[str, Any]], end_ids: list[int]) -> list[dict[str, Any]]:
    return [row | {"random_seed": 1000 + index, "end_id": end_ids[index]} for index, row in enumerate(rows)]


def as_request(lines: list[list[int]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    neutral = {
        "temperature": 1.0,
        "repetition_penalty": 1.0,
        "top_p_decay": 1.0,
        "top_p_min": 1e-6,
        "presence_penalty": 0,
    }
    neutral["top_p_reset_ids"] = 0xFFFFFFFF
    names = sorted({name for row in rows for name in row} - {*LISTS})
    scalars = {name: [row.get(name, neutral.get(name, 0)) for row in rows] for name in names}
    tensors = ask(lines, COUNT, **scalars, is_return_log_probs=True)
    if any(name in row for row in rows for name in LISTS):
        biases = [row.get("logit_bias", {}) for row in rows]
        tensors["logit_bias_ids"] = padded([list(bias) for bias in biases])
        tensors["logit_bias_values"] = padded([list(bias.values()) for bias in biases], np.float32)
        tensors["stop_token_ids"] = padded([row.get("stop_token_ids", ()) for row in rows])
    return tensors


def test_rows_with_parameters_of_their_own_get_what_numpy_draws(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    model, engine = opened
    lines = prompts(*[3 + row % 5 for row in range(len(ROWS))], seed=21)
    free = [
        generate(model, line, row | {"end_id": NEVER, "random_seed": 0})[0]
        for line, row in zip(lines, ROWS, strict=True)
    ]
    ends = [tokens[2] if "min_length" in row else NEVER for tokens, row in zip(free, ROWS, strict=True)]
    rows = told_rows(ROWS, ends)
    outputs = engine.generate([engine.parse(as_request(lines, rows))])[0]
    for index, (line, row) in enumerate(zip(lines, rows, strict=True)):
        tokens, log_prob = generate(model, line, row)
        assert generated(outputs, index) == tokens, row
        assert outputs["cum_log_probs"][index, 0] == pytest.approx(log_prob, abs=1e-3)


OF_ONE_KIND: dict[str, list[dict[str, Any]]] = {
    "drawn of all tokens": [{"runtime_top_p": 1.0, "temperature": warmth} for warmth in (0.5, 1.0, 2.0)],
    "nuclei that stay": [{"runtime_top_p": part, "temperature": 2.0} for part in (0.3, 0.6, 0.9)],
    "nuclei that grow to their least": [{"runtime_top_p": 0.1, "top_p_min": 0.8, "temperature": 2.0}],
    "nuclei that shrink": [{"runtime_top_p": 1.0, "top_p_decay": 0.5, "temperature": 2.0}],
    "of the largest": [{"runtime_top_k": largest, "temperature": 2.0} for largest in (4, 20)],
}


@pytest.mark.parametrize("rows", OF_ONE_KIND.values(), ids=OF_ONE_KIND)
def test_rows_of_one_kind_get_what_numpy_draws(
    opened: tuple[GPT2LMHeadModel, Engine], rows: list[dict[str, Any]]
) -> None:
    model, engine = opened
    lines, told = prompts(*[4] * len(rows), seed=5), told_rows(rows, [NEVER] * len(rows))
    outputs = engine.generate([engine.parse(as_request(lines, told))])[0]
    for index, (line, row) in enumerate(zip(lines, told, strict=True)):
        assert generated(outputs, index) == generate(model, line, row)[0], row


@pytest.mark.parametrize("penalty", [0.9, -0.5])
def test_presence_penalty_is_taken_off_what_has_occurred(
    opened: tuple[GPT2LMHeadModel, Engine], penalty: float
) -> None:
    model, engine = opened
    lines = prompts(4, 9, 6)
    rows = told_rows([{"presence_penalty": penalty * scale} for scale in (0, 1, 4)], [NEVER] * 3)
    outputs = engine.generate([engine.parse(as_request(lines, rows))])[0]
    for index, (line, row) in enumerate(zip(lines, rows, strict=True)):
        assert generated(outputs, index) == generate(model, line, row)[0]


def test_each_parameter_matters(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    """The engine's tokens change with each parameter, and to those that numpy draws."""
    model, engine = opened
    line = prompts(6)[0]
    base: dict[str, Any] = {"runtime_top_p": 0.9, "temperature": 3.0, "random_seed": 5, "end_id": NEVER}
    changes: list[dict[str, Any]] = [
        {"random_seed": 6},
        {"runtime_top_k": 3},
        {"runtime_top_p": 0.3},
        {"temperature": 1.0},
    ]
    changes += [{"repetition_penalty": 4.0}, {"presence_penalty": 6.0}, {"top_p_decay": 0.2}, {"min_p": 0.5}]
    changes += [{"frequency_penalty": 3.0}, {"output_presence_penalty": 5.0}, {"logit_bias": {7: 30.0}}]
    rows = [base, *(base | change for change in changes)]
    outputs = engine.generate([engine.parse(as_request([line], [row])) for row in rows])
    found = [generated(each) for each in outputs]
    assert found == [generate(model, line, row)[0] for row in rows]
    assert all(tokens != found[0] for tokens in found[1:])


def test_values_outside_their_range_become_fastertransformers(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    """set_topp_runtime_args: a top_p_decay outside (0, 1] is 1, a top_p_min outside (0, 1] is 0.5."""
    model, engine = opened
    lines = prompts(4, 4)
    sent = told_rows(
        [{"runtime_top_p": 0.2, "top_p_decay": 7.0}, {"runtime_top_p": 0.2, "top_p_min": 0.0}], [NEVER] * 2
    )
    meant = [sent[0] | {"top_p_decay": 1.0}, sent[1] | {"top_p_min": 0.5}]
    outputs = engine.generate([engine.parse(as_request(lines, [row | {"temperature": 3.0} for row in sent]))])[0]
    for index, (line, row) in enumerate(zip(lines, meant, strict=True)):
        assert generated(outputs, index) == generate(model, line, row | {"temperature": 3.0})[0]


def test_context_embeddings_are_the_sum_of_the_last_layers_states(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    model, engine = opened
    lines = prompts(7, 3, 1)
    states: list[torch.Tensor] = []
    hook = model.transformer.h[-1].register_forward_hook(
        lambda _module, _given, made: states.append(made[0] if isinstance(made, tuple) else made)
    )
    with torch.no_grad():
        for line in lines:
            model(torch.tensor([line]))
    hook.remove()
    tensors = ask(lines, 2, is_return_context_embeddings=[True, False, True], beam_width=2)
    outputs = engine.generate([engine.parse(tensors)])[0]
    assert outputs["context_embeddings"].shape == (3, 2, 32) and outputs["context_embeddings"].dtype == np.float32
    for row in (0, 2):
        expected = states[row].reshape(-1, 32).sum(0).numpy()
        np.testing.assert_allclose(outputs["context_embeddings"][row], np.stack([expected] * 2), rtol=1e-4, atol=1e-4)
    assert not outputs["context_embeddings"][1].any()
    assert "context_embeddings" not in engine.generate([engine.parse(ask(lines, 2))])[0]
