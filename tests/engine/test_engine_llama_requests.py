"""Requests to an engine with a model of the Llama family, against transformers."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, Tensors, ask, generated, word_list
from support.shards import prefix_prompts as prefixes
from support.shards.llama_shards import WITH_SHARDS, served_of, settings_of
from support.shards.prompt_tasks import write_tasks
from support.tiny_models.greedy import NEVER, argmaxes, greedy
from support.tiny_models.llama_models import VOCAB

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.errors import EngineError, RequestError
from backends.fastertransformer.engine.ops import torch_attention
from backends.fastertransformer.engine.rows.answer import Failure
from backends.fastertransformer.engine.settings import Settings

COUNT = 18
START = VOCAB  # the first virtual token
WINDOW = 5  # of Mistral's layers, and of every second one of Gemma 2's
Opened = tuple[Any, Engine]


def prompts(*lengths: int, seed: int = 3) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCAB, length).tolist() for length in lengths]


@pytest.fixture(scope="module", params=["gemma2", "qwen3", "deepseek_v3"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    model, settings = settings_of(request.param, tmp_path_factory.mktemp(request.param))
    return model, open_engine(settings, CPU)


def answer(engine: Engine, tensors: Tensors) -> Tensors:
    return engine.generate([engine.parse(tensors)])[0]


@torch.no_grad()
def log_probs_of(model: Any, **given: Any) -> torch.Tensor:
    """[T, V] of one row."""
    rows: torch.Tensor = model(**given).logits[0].log_softmax(-1)
    return rows


@pytest.mark.parametrize("name", WITH_SHARDS)
def test_the_engine_gives_transformers_greedy_tokens_and_log_probabilities(name: str, tmp_path: Path) -> None:
    """Over shards of two ranks; test_engine_hub.py asks the same of directories."""
    model, settings = settings_of(name, tmp_path, 2)
    engine, lines = open_engine(settings, CPU), prompts(5, 1, 11)
    assert engine.description.startswith("Llama 2 layers, hidden 64, vocabulary ")
    told = {"end_id": NEVER, "is_return_log_probs": True, "is_return_context_log_probs": True}
    told["runtime_top_p"] = 1e-7  # greedy, with the model's own probabilities
    outputs = answer(engine, ask(lines, COUNT, **told))
    engine.close()
    for row, line in enumerate(lines):
        whole = greedy(model, line, COUNT)
        assert outputs["output_ids"][row, 0, : len(whole)].tolist() == whole
        known = log_probs_of(model, input_ids=torch.tensor([whole]))
        expected = known[:-1].gather(1, torch.tensor(whole)[1:, None])[:, 0].numpy()
        context = outputs["context_log_probs"][row, : len(line)]
        np.testing.assert_allclose(context, [0.0, *expected[: len(line) - 1]], atol=1e-4)
        np.testing.assert_allclose(outputs["output_log_probs"][row, 0], expected[len(line) - 1 :], atol=1e-4)


def test_beams_are_transformers(opened: Opened) -> None:
    model, engine = opened
    lines, counts, width = prompts(6, 2, 9), [9, 12, 5], 3
    outputs = answer(engine, ask(lines, counts, beam_width=width, end_id=NEVER, is_return_log_probs=True))
    for row, (line, count) in enumerate(zip(lines, counts, strict=True)):
        ids = torch.tensor([line])
        how = {"num_beams": width, "num_return_sequences": width, "do_sample": False, "length_penalty": 0.0}
        how |= {"eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **how)
        for beam in range(width):
            assert generated(outputs, row, beam) == expected.sequences[beam, len(line) :].tolist()
        np.testing.assert_allclose(outputs["cum_log_probs"][row], expected.sequences_scores.numpy(), atol=1e-4)


def test_a_row_ends_behind_a_stop_word_and_has_no_bad_word(opened: Opened) -> None:
    model, engine = opened
    (line,) = prompts(7)
    free = greedy(model, line, COUNT)[7:]
    stopped = answer(engine, ask([line], COUNT, end_id=NEVER, stop_words_list=word_list([free[6:8]])))
    end = next(place for place in range(2, COUNT + 1) if free[place - 2 : place] == free[6:8])
    assert generated(stopped) == free[:end]
    banned = answer(engine, ask([line], 1, end_id=NEVER, bad_words_list=word_list([free[:1]])))
    order = log_probs_of(model, input_ids=torch.tensor([line]))[-1].argsort(descending=True)
    assert generated(banned) == [int(order[1])]


def test_requests_together_get_what_they_get_alone(opened: Opened) -> None:
    _, engine = opened
    kinds: list[dict[str, Any]] = [
        {},
        {"runtime_top_k": 5, "temperature": 1.7},
        {"runtime_top_p": 0.9, "repetition_penalty": 1.3},
        {"beam_width": 3},
        {"presence_penalty": 0.8, "min_length": 6},
    ]
    requests = [
        ask(prompts(*lengths, seed=index), 9 + index, random_seed=index, is_return_log_probs=True, **kinds[index])
        for index, lengths in enumerate([(5, 12), (1,), (17, 2, 8), (6,), (40, 3)])
    ]
    alone = [answer(engine, tensors) for tensors in requests]
    together = engine.generate([engine.parse(tensors) for tensors in requests])
    for ours, theirs in zip(together, alone, strict=True):
        np.testing.assert_array_equal(ours["output_ids"], theirs["output_ids"])
        np.testing.assert_allclose(ours["cum_log_probs"], theirs["cum_log_probs"], atol=1e-4)


def test_a_stream_grows_to_the_answer(opened: Opened) -> None:
    _, engine = opened
    tensors = ask(prompts(5), 8, end_id=NEVER)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.submit(engine.parse(tensors), answers.put, is_streaming=True)
    parts = [answers.get()]
    while not parts[-1].is_final:
        parts.append(answers.get())
    assert len(parts) >= 8
    whole = generated(answer(engine, tensors))
    for part in parts:
        tokens = generated(part.tensors)
        assert tokens == whole[: len(tokens)]
    assert generated(parts[-1].tensors) == whole


def talk(engine: Engine, line: list[int], count: int, is_first: bool, **told: Any) -> list[int]:
    tensors = ask([line], count, end_id=NEVER, **told) | {"START": np.array([int(is_first)], np.int32)}
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.submit(engine.parse(tensors), answers.put, session="talk")
    found = answers.get()
    assert not isinstance(found, Failure), found
    return generated(found.tensors)


def test_a_conversation_goes_on_as_one_long_input_does(opened: Opened) -> None:
    model, engine = opened
    line: list[int] = []
    for turn, (new, count) in enumerate(zip(prompts(7, 3, 6), (4, 5, 6), strict=True)):
        line += new
        expected = greedy(model, line, count)
        assert talk(engine, new, count, turn == 0) == expected[len(line) :]
        line = expected


@pytest.mark.parametrize("memory_len", [3, 9])
def test_a_requests_window_and_the_models_both_hold(memory_len: int, tmp_path: Path) -> None:
    model, settings = settings_of("mistral", tmp_path)
    engine, line = open_engine(settings, CPU), list[int]()
    for turn, new in enumerate(prompts(memory_len, 3, 1)):
        line += new
        expected = greedy(model, line, 6, window=min(memory_len, WINDOW))
        assert talk(engine, new, 6, turn == 0, memory_len=memory_len) == expected[len(line) :]
        line = expected
    assert greedy(model, line[:4], 20) != greedy(model, line[:4], 20, window=3)
    engine.close()


def continued(model: Any, embeddings: torch.Tensor, count: int) -> list[int]:
    """Continue [T, hidden]; transformers scales what it looks up, and not what it is given."""
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(log_probs_of(model, inputs_embeds=embeddings[None])[-1].argmax()))
        embeddings = torch.cat((embeddings, model.get_input_embeddings()(torch.tensor(tokens[-1:])).detach()))
    return tokens


def test_soft_prompts_stand_in_front(opened: Opened) -> None:
    model, engine = opened
    lines, lengths = prompts(5, 9), [4, 2]
    given = np.random.default_rng(1).normal(0, 0.5, (2, 4, 64)).astype(np.float32)
    told = {"request_prompt_lengths": lengths, "request_prompt_type": 1, "request_prompt_embedding": given}
    outputs = answer(engine, ask(lines, 9, end_id=NEVER, **told))
    for row, line in enumerate(lines):
        own = model.get_input_embeddings()(torch.tensor(line)).detach()
        prompt = torch.from_numpy(given[row, : lengths[row]])
        assert generated(outputs, row) == continued(model, torch.cat((prompt, own)), 9)


def test_a_tasks_prompt_comes_from_the_checkpoint(tmp_path: Path) -> None:
    model, settings = settings_of("llama", tmp_path)
    tables = [np.random.default_rng(task).normal(0, 0.5, (task + 3, 64)).astype(np.float32) for task in range(2)]
    write_tasks(settings, tables, START)
    engine, (line,) = open_engine(settings, CPU), prompts(6)
    asked = ask([[START, START + 1, *line, START + 2]], 9, end_id=NEVER, prompt_learning_task_name_ids=1)
    table = torch.from_numpy(tables[1])
    own = model.get_input_embeddings()(torch.tensor(line)).detach()
    expected = continued(model, torch.cat((table[:2], own, table[2:3])), 9)
    assert generated(answer(engine, asked)) == expected
    engine.close()


def test_a_prefix_prompt_has_as_many_heads_as_the_keys(tmp_path: Path) -> None:
    model, settings = settings_of("llama", tmp_path, 2)
    prefix = np.random.default_rng(2).normal(0, 1, (2, 2, 4, 6, 8)).astype(np.float32)  # layers, k and v, heads
    for rank, part in enumerate(np.split(prefix, 2, axis=2)):
        np.ascontiguousarray(part).tofile(settings.checkpoint / f"model.prefix_prompt.squad.weight.{rank}.bin")
    with (settings.checkpoint / "config.ini").open("a") as ini:
        ini.write("num_tasks = 1\nprompt_learning_type = 2\n[task_0]\ntask_name = squad\nprompt_length = 6\n")
    engine, (line,) = open_engine(settings, CPU), prompts(7)
    found = generated(answer(engine, ask([line], 9, end_id=NEVER, prompt_learning_task_name_ids=0)))
    assert found == prefixes.greedy(model, line, prefix, 9) != greedy(model, line, 9)[7:]
    engine.close()


def test_a_long_text_is_answered_or_refused_with_the_numbers(tmp_path: Path) -> None:
    """Llama 3.1 has 131,072 positions; the cache has room for 100 pages."""
    model, settings = settings_of("llama31", tmp_path)
    token_bytes = 2 * 2 * 4 * 8 * 4  # layers, k and v, key heads, size, fp32
    engine = open_engine(replace(settings, kv_cache_bytes=101 * 32 * token_bytes), CPU)
    (line,) = prompts(3000)
    found = generated(answer(engine, ask([line], 4, end_id=NEVER)))
    assert len(found) == 4 and found == argmaxes(model, line, found)
    needed, there = 101 * 32 * token_bytes, 100 * 32 * token_bytes
    words = f"needs {needed} bytes of KV cache: 1 x 3204 tokens of {token_bytes} bytes; there are {there}"
    with pytest.raises(EngineError, match=words):
        answer(engine, ask(prompts(3200), 4))
    with pytest.raises(RequestError, match="131073 in row 0 exceeds max_pos_seq_len 131072"):
        engine.parse(ask(prompts(131069), 4))
    engine.close()


def test_capped_scores_of_long_inputs_are_held_in_blocks(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2's, 7 queries at a time; Qwen3's scores are not capped."""
    model, engine = opened
    monkeypatch.setattr(torch_attention, "_MOST_SCORES", 7 * 8 * 40)
    (line,) = prompts(40)
    assert generated(answer(engine, ask([line], 9, end_id=NEVER))) == greedy(model, line, 9)[40:]


def test_an_input_beyond_the_models_positions_is_refused_with_the_numbers(opened: Opened) -> None:
    _, engine = opened
    with pytest.raises(RequestError, match="64"):
        engine.parse(ask(prompts(60), 5))
    assert engine.parse(ask(prompts(60), 4))


@pytest.mark.parametrize(("data_type", "limit"), [("fp32", 1e-4), ("fp16", 3e-2)])
@pytest.mark.parametrize("name", ["gemma2", "qwen3", "starcoder2", "nemotron", "llama31"])
def test_a_gpu_gives_transformers_log_probabilities(name: str, data_type: str, limit: float, tmp_path: Path) -> None:
    """Heads of 32, as the kernels take them; the same tokens in fp32. Inputs and outputs pass the windows."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    sizes = {"hidden_size": 256, **({} if name in ("starcoder2", "llama31") else {"head_dim": 32})}
    root, model = served_of(name, tmp_path, 1, **sizes)
    settings = Settings(root, 1, 1, data_type, 1, "Llama", kv_cache_bytes=1 << 26)
    engine, lines = open_engine(settings, torch.device("cuda", 0)), prompts(5, 1, 40)
    told = {"end_id": NEVER, "runtime_top_p": 1e-7, "is_return_log_probs": True, "is_return_context_log_probs": True}
    outputs = answer(engine, ask(lines, COUNT, **told))
    engine.close()
    for row, line in enumerate(lines):
        whole = outputs["output_ids"][row, 0, : len(line) + COUNT].tolist()
        known = log_probs_of(model, input_ids=torch.tensor([whole]))[:-1]
        expected = known.gather(1, torch.tensor(whole)[1:, None])[:, 0].numpy()
        context = outputs["context_log_probs"][row, : len(line)]
        np.testing.assert_allclose(context, [0.0, *expected[: len(line) - 1]], atol=limit)
        np.testing.assert_allclose(outputs["output_log_probs"][row, 0], expected[len(line) - 1 :], atol=limit)
        best = known.max(-1).values.numpy()[len(line) - 1 :]
        np.testing.assert_allclose(expected[len(line) - 1 :], best, atol=limit)  # each token is the argmax
