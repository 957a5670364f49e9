"""Beam search against Hugging Face where the definitions agree, and against FasterTransformer's algorithm in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, ask, generated, prompts, tiny_gpt2, word_list
from transformers import GPT2LMHeadModel

from backends.fastertransformer.engine.engine import Engine, open_engine

NEVER = 4000
Path = tuple[float, list[int], bool]  # score, tokens, whether it has ended


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT2LMHeadModel, Engine]:
    model, settings = tiny_gpt2(tmp_path_factory.mktemp("gpt2"))
    return model, open_engine(settings, CPU)


@pytest.mark.parametrize("width", [2, 3, 5])
def test_beams_that_never_end_are_hugging_faces(opened: tuple[GPT2LMHeadModel, Engine], width: int) -> None:
    model, engine = opened
    lines = prompts(6, 2, 9)
    tensors = ask(lines, [9, 12, 5], beam_width=width, end_id=NEVER, is_return_log_probs=True)
    outputs = engine.generate([engine.parse(tensors)])[0]
    assert outputs["output_ids"].shape == (3, width, 9 + 12) and outputs["output_log_probs"].shape == (3, width, 12)
    for row, (line, count) in enumerate(zip(lines, (9, 12, 5), strict=True)):
        ids = torch.tensor([line])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for beam in range(width):
            assert generated(outputs, row, beam) == expected.sequences[beam, len(line) :].tolist()
        np.testing.assert_allclose(outputs["cum_log_probs"][row], expected.sequences_scores.numpy(), atol=1e-4)
        gains = outputs["output_log_probs"][row]
        np.testing.assert_allclose(gains.sum(-1), outputs["cum_log_probs"][row], atol=1e-4)
        assert not gains[:, count:].any()


def fastertransformers_search(model: GPT2LMHeadModel, line: list[int], count: int, told: dict[str, Any]) -> list[Path]:
    """online_softmax_beamsearch_kernels.cu without beam_hyps, and update_kernel; one candidate after another."""
    width, end_id = told["beam_width"], told["end_id"]
    beams: list[Path] = [(0.0, [], False)] + [(-1e20, [], False)] * (width - 1)
    for _ in range(count):
        length = len(line) + len(beams[0][1]) - beams[0][2]
        candidates = []
        for score, tokens, has_ended in beams:
            if has_ended:
                candidates.append((score / length ** told["len_penalty"], score, tokens, True))
                continue
            with torch.no_grad():
                logits = model(torch.tensor([line + tokens])).logits[0, -1].double().numpy()
            if told.get("temperature", 1) != 1:
                logits = logits / (told["temperature"] + 1e-6)
            seen = sorted(set(line + tokens))
            penalty = told.get("repetition_penalty", 1)
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
            if len(tokens) < told.get("min_length", 0):
                logits[end_id] = -np.inf
            log_probs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            for place, token in enumerate(np.argsort(-log_probs)[: 2 * width]):
                total = score + log_probs[token]
                rank = total / length ** told["len_penalty"] + told["beam_search_diversity_rate"] * (place % width)
                candidates.append((rank, total, [*tokens, int(token)], int(token) == end_id))
        candidates.sort(key=lambda each: -each[0])
        beams = [candidate[1:] for candidate in candidates[:width]]
        if all(has_ended for _, _, has_ended in beams):
            break
    return beams


CASES: list[dict[str, Any]] = [
    {},
    {"beam_search_diversity_rate": 0.7},
    {"beam_search_diversity_rate": 0.7, "len_penalty": 1.0},
    {"len_penalty": 2.0},
    {"temperature": 2.0, "repetition_penalty": 1.4},
    {"min_length": 8},
]


# More beams meet every case of fewer.
@pytest.mark.in_ci(when=lambda at: at.width == 4 or at.case == 0)
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("width", [2, 4])
def test_beams_that_end_are_fastertransformers(opened: tuple[GPT2LMHeadModel, Engine], case: int, width: int) -> None:
    model, engine = opened
    told = {"beam_width": width, "beam_search_diversity_rate": 0.0, "len_penalty": 0.0} | CASES[case]
    ended = 0
    for line in prompts(5, 8, 3, seed=case):
        free = fastertransformers_search(model, line, 12, told | {"end_id": NEVER, "min_length": 0})
        told["end_id"] = free[0][1][9 if told.get("min_length") else 2]  # what the best beam says
        expected = fastertransformers_search(model, line, 12, told)
        outputs = engine.generate([engine.parse(ask([line], 12, **told, is_return_log_probs=True))])[0]
        ended += sum(has_ended for _, _, has_ended in expected)
        for beam, (score, tokens, _) in enumerate(expected):
            assert generated(outputs, 0, beam) == tokens
            assert outputs["cum_log_probs"][0, beam] == pytest.approx(score, abs=2e-3)
    assert ended or told["beam_search_diversity_rate"]  # which pushes ended beams out


def test_a_diverse_search_differs_and_the_penalty_weighs_it(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    model, engine = opened
    line, found = prompts(5)[0], []
    base = {"beam_width": 4, "beam_search_diversity_rate": 0.0, "len_penalty": 0.0, "end_id": NEVER}
    for case in ({}, {"beam_search_diversity_rate": 0.7}, {"beam_search_diversity_rate": 0.7, "len_penalty": 1.0}):
        outputs = engine.generate([engine.parse(ask([line], 12, **(base | case)))])[0]
        found.append([generated(outputs, 0, beam) for beam in range(4)])
        assert found[-1] == [tokens for _, tokens, _ in fastertransformers_search(model, line, 12, base | case)]
    assert found[0] != found[1] != found[2] != found[0]


def test_a_beam_never_holds_a_bad_word_and_ends_behind_a_stop_word(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    _, engine = opened
    line = prompts(6)[0]
    free = engine.generate([engine.parse(ask([line], 10, beam_width=3, end_id=NEVER))])[0]
    best = generated(free)
    bad = [best[2:4], [best[6]]]
    outputs = engine.generate(
        [engine.parse(ask([line], 10, beam_width=3, end_id=NEVER, bad_words_list=word_list(bad)))]
    )[0]
    for beam in range(3):
        whole = line + generated(outputs, 0, beam)
        for word in bad:
            starts = range(len(line) - len(word) + 1, len(whole) - len(word) + 1)
            assert all(whole[start : start + len(word)] != word for start in starts)
    first = generated(engine.generate([engine.parse(ask([line], 1))])[0])
    stops = [[line[-1], *first]]  # the most probable first token completes it, and no longer beam is as likely
    outputs = engine.generate(
        [engine.parse(ask([line], 10, beam_width=3, end_id=NEVER, stop_words_list=word_list(stops)))]
    )[0]
    lines = [generated(outputs, 0, beam) for beam in range(3)]
    assert lines[0] == first
    for tokens in lines:
        whole = line + tokens
        ends = [end for end in range(len(line) + 1, len(whole) + 1) if whole[end - 2 : end] == stops[0]]
        assert not ends or ends == [len(whole)]


def test_every_candidate_ended_or_the_vocabulary_smaller_than_the_beams(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    model, engine = opened
    line = prompts(4)[0]
    outputs = engine.generate([engine.parse(ask([line], 1, beam_width=64, end_id=NEVER, is_return_log_probs=True))])[0]
    with torch.no_grad():
        best = model(torch.tensor([line])).logits[0, -1].log_softmax(-1).topk(64)
    assert [generated(outputs, 0, beam)[0] for beam in range(64)] == best.indices.tolist()
    np.testing.assert_allclose(outputs["cum_log_probs"][0], best.values.numpy(), atol=1e-4)
