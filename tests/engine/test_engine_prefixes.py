"""Prefix prompts of GPT-J and GPT-NeoX against Hugging Face with the same keys and values as its past."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, Tensors, ask, generated, tiny_gpt2
from support.shards.prefix_prompts import COUNT, FAMILIES, NEVER, PREFIXES, greedy, logits_behind, write
from support.shards.prompt_tasks import add_tasks
from support.tiny_models.huggingface_models import HIDDEN, VOCAB

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.errors import EngineError


def prompts(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(8, VOCAB, length).tolist() for length in lengths]


def asked(lines: list[list[int]], counts: Any, **told: Any) -> Tensors:
    return ask(lines, counts, end_id=NEVER, **told)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Engine]:
    model, settings = write("gptj", tmp_path_factory.mktemp("gptj"))
    return model, open_engine(settings, CPU)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_has_the_prefix_of_its_own_task(family: str, ranks: int, tmp_path: Path) -> None:
    model, settings = write(family, tmp_path, ranks)
    engine = open_engine(replace(settings, kv_cache_bytes=1 << 24), CPU)
    lines, tasks, counts = prompts(6, 1, 9, 4), [0, 2, 1, 2], [9, 7, 3, 9]
    asking = {"prompt_learning_task_name_ids": tasks, "is_return_log_probs": True}
    asking["is_return_context_cum_log_probs"] = True
    requests = [engine.parse(asked(lines, counts, **asking)), engine.parse(asked(lines[:1], COUNT))]
    outputs, without = engine.generate(requests)
    engine.close()
    for row, (line, task, count) in enumerate(zip(lines, tasks, counts, strict=True)):
        expected = greedy(model, line, PREFIXES[task], count)
        assert generated(outputs, row) == expected
        assert outputs["output_ids"][row, 0, : len(line)].tolist() == line
        whole = torch.tensor([*line, *expected])
        log_probs = logits_behind(model, whole.tolist(), PREFIXES[task]).log_softmax(-1)[:-1]
        total = float(log_probs.gather(1, whole[1:, None]).sum())
        assert outputs["cum_log_probs"][row, 0] == pytest.approx(total, abs=1e-3)
    assert outputs["response_input_lengths"][:, 0].tolist() == [6, 1, 9, 4]
    assert generated(without) == greedy(model, lines[0], PREFIXES[1])
    assert generated(without) != generated(outputs)[:COUNT]  # it matters


def test_beams_share_their_rows_prefix(opened: tuple[Any, Engine]) -> None:
    """Three beams: against all continuations of two tokens, of which a search this wide cannot lose the best."""
    model, engine = opened
    (line,), width = prompts(5), 40
    told = {"prompt_learning_task_name_ids": 0, "beam_width": width, "is_return_log_probs": True}
    outputs = engine.generate([engine.parse(asked([line], 2, **told))])[0]
    first = logits_behind(model, line, PREFIXES[0])[-1].log_softmax(-1)
    scores = torch.stack(
        [first[token] + logits_behind(model, [*line, token], PREFIXES[0])[-1].log_softmax(-1) for token in range(VOCAB)]
    )
    best = scores[first.topk(width).indices].max()
    token, following = divmod(int((scores == best).flatten().nonzero()[0]), VOCAB)
    assert generated(outputs) == [token, following]
    assert outputs["cum_log_probs"][0, 0] == pytest.approx(float(best), abs=1e-4)


def test_a_prefix_precedes_a_soft_prompt(opened: tuple[Any, Engine]) -> None:
    model, engine = opened
    (line,) = prompts(5)
    own = np.random.default_rng(4).normal(0, 0.5, (1, 3, HIDDEN)).astype(np.float32)
    told = {"request_prompt_embedding": own, "request_prompt_lengths": 3, "request_prompt_type": 1}
    outputs = engine.generate([engine.parse(asked([line], COUNT, prompt_learning_task_name_ids=2, **told))])[0]
    assert generated(outputs) == greedy(model, line, PREFIXES[2], embeddings=torch.from_numpy(own[0]))


def test_requests_in_flight_keep_their_prefixes(opened: tuple[Any, Engine]) -> None:
    model, engine = opened
    lines, tasks = prompts(4, 8, 2, 6, 3), [2, 0, 1, 0, 2]
    requests = [
        engine.parse(asked([line], 3 + 2 * index, prompt_learning_task_name_ids=task))
        for index, (line, task) in enumerate(zip(lines, tasks, strict=True))
    ]
    for index, outputs in enumerate(engine.generate(requests)):
        assert generated(outputs) == greedy(model, lines[index], PREFIXES[tasks[index]], 3 + 2 * index)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"prompt_learning_task_name_ids": 3}, "prompt_learning_task_name_ids is 3; the checkpoint has tasks 0 to 2"),
        (
            {
                "request_prompt_embedding": np.ones((1, 3, HIDDEN), np.float32),
                "request_prompt_lengths": 3,
                "request_prompt_type": 2,
            },
            "request_prompt_type is 2 in row 0; .* a prefix prompt comes from the checkpoint only",
        ),
    ],
)
def test_a_prefix_that_cannot_be_is_refused(opened: tuple[Any, Engine], told: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        opened[1].parse(asked(prompts(5), 4, **told))


def test_a_prefix_needs_an_input(opened: tuple[Any, Engine]) -> None:
    empty = asked([[1]], 4, prompt_learning_task_name_ids=0) | {"input_ids": np.zeros((1, 0), np.uint32)}
    with pytest.raises(EngineError, match="row 0 has no input: a prefix prompt must come with one"):
        opened[1].parse(empty)


def test_a_conversation_has_no_prefix(opened: tuple[Any, Engine]) -> None:
    tensors = asked(prompts(5), 4, prompt_learning_task_name_ids=0, session_len=20) | {"START": np.ones(1, np.int32)}
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    opened[1].submit(opened[1].parse(tensors), answers.put, session="talk")
    assert "prompts do not go with interactive generation" in answers.get().problem


def test_a_gpt_refuses_the_prefixes_that_fastertransformer_ignores_there(tmp_path: Path) -> None:
    _, settings = tiny_gpt2(tmp_path)
    add_tasks(settings, kind=2)
    engine = open_engine(settings, CPU)
    with pytest.raises(EngineError, match="prompt_learning_task_name_ids: .* reads and never uses in a gpt"):
        engine.parse(ask([[1]], 4, prompt_learning_task_name_ids=0))


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_prefix_that_is_not_whole_is_refused(is_gone: bool, tmp_path: Path) -> None:
    _, settings = write("gpt_neox", tmp_path, 2)
    file = settings.checkpoint / "model.prefix_prompt.intent.weight.1.bin"
    if is_gone:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(EngineError, match=r"intent.weight.1.bin: .* bytes, expected 768 for \[2, 2, 2, 3, 8\]"):
        open_engine(settings, CPU)


def test_a_prefix_is_rounded_as_weights_are(tmp_path: Path) -> None:
    _, settings = write("gptj", tmp_path)
    engine = open_engine(replace(settings, data_type="fp16"), CPU)
    kept = torch.stack(list(engine._steps.slots._prefixes[0])).numpy()
    np.testing.assert_array_equal(kept, PREFIXES[0].astype(np.float16))
