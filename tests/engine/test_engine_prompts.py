"""Soft prompts and p/prompt tuning against Hugging Face's generation from given embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, END, ask, generated, prompts, tiny_gpt2
from support.shards.prompt_tasks import HIDDEN, START, TABLES, add_tasks
from transformers import GPT2LMHeadModel

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.errors import EngineError

COUNT = 9


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT2LMHeadModel, Engine]:
    model, settings = tiny_gpt2(tmp_path_factory.mktemp("gpt2"))
    add_tasks(settings)
    return model, open_engine(settings, CPU)


def greedy(model: GPT2LMHeadModel, embeddings: torch.Tensor) -> list[int]:
    """Continue [T, hidden], positions added by the model."""
    tokens: list[int] = []
    for _ in range(COUNT):
        with torch.no_grad():
            tokens.append(int(model(inputs_embeds=embeddings[None]).logits[0, -1].argmax()))
        if tokens[-1] == END:
            break
        embeddings = torch.cat((embeddings, model.transformer.wte.weight[tokens[-1:]].detach()))
    return tokens


def embedded(model: GPT2LMHeadModel, line: list[int], table: np.ndarray[Any, Any] | None = None) -> torch.Tensor:
    wte = model.transformer.wte.weight.detach()
    return torch.stack([wte[token] if token < START else torch.from_numpy(table[token - START]) for token in line])  # type: ignore[index]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_soft_prompt_stands_in_front_and_is_not_shown(opened: tuple[GPT2LMHeadModel, Engine], dtype: Any) -> None:
    model, engine = opened
    lines = prompts(5, 3, 7)
    given = np.random.default_rng(1).normal(0, 0.5, (3, 4, HIDDEN)).astype(dtype)
    lengths = [4, 2, 0]
    tensors = ask(lines, COUNT, request_prompt_lengths=lengths, request_prompt_type=1, request_prompt_embedding=given)
    outputs = engine.generate([engine.parse(tensors)])[0]
    assert outputs["output_ids"].shape == (3, 1, 7 + COUNT)
    assert outputs["response_input_lengths"][:, 0].tolist() == [5, 3, 7]
    for row, line in enumerate(lines):
        prompt = torch.from_numpy(given[row, : lengths[row]].astype(np.float32))
        assert generated(outputs, row) == greedy(model, torch.cat((prompt, embedded(model, line))))
        assert outputs["output_ids"][row, 0, : len(line)].tolist() == line
    without = engine.generate([engine.parse(ask(lines, COUNT))])[0]
    assert generated(without, 0) != generated(outputs, 0) and generated(without, 2) == generated(outputs, 2)


def test_tasks_prompts_come_from_the_checkpoint_where_virtual_tokens_stand(
    opened: tuple[GPT2LMHeadModel, Engine],
) -> None:
    model, engine = opened
    first, second, third = prompts(5, 4, 6)
    lines = [
        [START, START + 1, *first, START + 2, START + 3],
        [*second[:2], *range(START, START + 6), *second[2:]],
        third,
    ]
    outputs = engine.generate([engine.parse(ask(lines, COUNT, prompt_learning_task_name_ids=[0, 1, 1]))])[0]
    for row, (line, task) in enumerate(zip(lines, (0, 1, 1), strict=True)):
        real = [token for token in line if token < START]
        assert outputs["response_input_lengths"][row, 0] == len(real)
        assert outputs["output_ids"][row, 0, : len(real)].tolist() == real
        assert generated(outputs, row) == greedy(model, embedded(model, line, TABLES[task]))
    assert outputs["output_ids"].shape[2] == 6 + COUNT  # the longest real input
    other = engine.generate([engine.parse(ask(lines[:1], COUNT, prompt_learning_task_name_ids=1))])[0]
    assert generated(other) != generated(outputs)


def test_a_requests_own_table_takes_the_tasks_place(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    model, engine = opened
    own = np.random.default_rng(4).normal(0, 0.5, (1, 3, HIDDEN)).astype(np.float32)
    line = [START, *prompts(5)[0], START + 2]
    told = {"request_prompt_embedding": own, "request_prompt_lengths": 3, "request_prompt_type": 3}
    for more in ({}, {"prompt_learning_task_name_ids": 1}):
        outputs = engine.generate([engine.parse(ask([line], COUNT, **told, **more))])[0]
        assert generated(outputs) == greedy(model, embedded(model, line, own[0]))


def test_prompts_work_with_beams_and_penalties(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    model, engine = opened
    line = [START, *prompts(5)[0], START + 1]
    told = {"prompt_learning_task_name_ids": 0, "end_id": 4000, "is_return_log_probs": True}
    plain, beams = (
        engine.generate([engine.parse(ask([line], 1, **told, **more))])[0] for more in ({}, {"beam_width": 3})
    )
    with torch.no_grad():
        log_probs = model(inputs_embeds=embedded(model, line, TABLES[0])[None]).logits[0, -1].log_softmax(-1)
    assert [generated(beams, 0, beam)[0] for beam in range(3)] == log_probs.topk(3).indices.tolist()
    assert plain["cum_log_probs"][0, 0] == pytest.approx(float(log_probs.max()), abs=1e-4)


PROMPT = np.ones((1, 3, HIDDEN), np.float32)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"prompt_learning_task_name_ids": 2}, "prompt_learning_task_name_ids is 2; the checkpoint has tasks 0 to 1"),
        ({"request_prompt_embedding": PROMPT}, "needs request_prompt_lengths and request_prompt_type too"),
        (
            {"request_prompt_embedding": PROMPT[:, :, :8], "request_prompt_lengths": 1, "request_prompt_type": 1},
            r"request_prompt_embedding has shape \[1, 3, 8\], expected \[1, n, 32\]",
        ),
        (
            {"request_prompt_embedding": PROMPT, "request_prompt_lengths": 4, "request_prompt_type": 1},
            "request_prompt_lengths is 4 in row 0; it must be at most 3",
        ),
        (
            {"request_prompt_embedding": PROMPT * np.nan, "request_prompt_lengths": 3, "request_prompt_type": 1},
            "request_prompt_embedding holds a number in row 0 that is not finite",
        ),
        # Nothing is to be applied, and yet it must be what it says it is.
        (
            {"request_prompt_embedding": PROMPT.astype(np.int64) * 0},
            "request_prompt_embedding has type int64, expected float32 or float16",
        ),
        ({"request_prompt_lengths": PROMPT * 0}, "request_prompt_lengths has type float32, expected uint32"),
        (
            {"request_prompt_type": PROMPT.astype(np.uint32) * 0},
            r"request_prompt_type has shape \[1, 3, 32\], expected \[1, 1\]",
        ),
        (
            {"request_prompt_embedding": PROMPT, "request_prompt_lengths": 3, "request_prompt_type": 2},
            "request_prompt_type is 2 in row 0; it must be 0, 1",
        ),
        (
            {"request_prompt_embedding": PROMPT, "request_prompt_lengths": 3, "request_prompt_type": 1, "output": 43},
            "input_lengths 8 .* 43 = 51 .* exceeds max_pos_seq_len 48",
        ),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(
    opened: tuple[GPT2LMHeadModel, Engine], told: dict[str, Any], words: str
) -> None:
    told = dict(told)
    with pytest.raises(EngineError, match=words):
        opened[1].parse(ask(prompts(5), told.pop("output", 4), **told))


def test_a_virtual_token_without_a_row_is_refused(opened: tuple[GPT2LMHeadModel, Engine]) -> None:
    with pytest.raises(EngineError, match="input_ids holds 101; the prompt's ids are 97 \\+ 0 to 3"):
        opened[1].parse(ask([[1, START + 4]], 4, prompt_learning_task_name_ids=0))
    with pytest.raises(EngineError, match="input_ids holds 97 in row 0; the vocabulary has 97 tokens"):
        opened[1].parse(ask([[1, START]], 4))


@pytest.mark.parametrize("harm", ["gone", "short", "type"])
def test_a_table_that_is_not_whole_is_refused(tmp_path: Path, harm: str) -> None:
    _, settings = tiny_gpt2(tmp_path)
    shards = add_tasks(settings, kind=1 if harm == "type" else 3)
    table = shards / "model.prompt_table.intent.weight.bin"
    if harm == "gone":
        table.unlink()
    elif harm == "short":
        table.write_bytes(table.read_bytes()[:-4])
    else:
        engine = open_engine(settings, CPU)
        with pytest.raises(EngineError, match="prompt_learning_task_name_ids: this checkpoint's config.ini has no"):
            engine.parse(ask([[1]], 4, prompt_learning_task_name_ids=0))
        return
    with pytest.raises(EngineError, match=r"prompt_table.intent.weight.bin: .* bytes, expected 768 for \[6, 32\]"):
        open_engine(settings, CPU)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_tables_have_the_type_of_the_weights(tmp_path: Path, dtype: str) -> None:
    _, settings = tiny_gpt2(tmp_path, dtype=dtype)
    shards = add_tasks(settings, "<f2")
    if dtype == "bf16":
        for name, table in zip(("squad", "intent"), TABLES, strict=True):
            bits = torch.from_numpy(table).bfloat16().view(torch.int16).numpy()
            bits.tofile(shards / f"model.prompt_table.{name}.weight.bin")
    engine = open_engine(settings, CPU)
    assert engine._prompts
    for ours, table in zip(engine._prompts, TABLES, strict=True):
        np.testing.assert_allclose(ours, table, rtol=1e-2)
