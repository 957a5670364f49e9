"""The network over several processes gives what one process gives; a process that dies or hangs ends them all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.rank_processes import CACHE_BYTES, PROJECT, RankProcesses, Tensors, answer_of, workers_of
from support.shards.family_shards import write_family
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from support.shards.llama_shards import served_of
from support.shards.prefix_prompts import write as write_with_prefixes
from support.shards.random_t5 import random_t5
from torch.distributed import TCPStore
from transformers import T5EncoderModel

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.parallel.comm import argmax_keys
from backends.fastertransformer.engine.parallel.partition import vocabulary_part
from backends.fastertransformer.engine.settings import Settings

CPU = torch.device("cpu")
running: list[RankProcesses] = []


@pytest.fixture(autouse=True)
def no_rank_outlives_its_test() -> Iterator[None]:
    yield
    while running:
        running.pop().stop()


def start(
    shards: Path, directory: Path, tensor: int, pipeline: int, requests: list[Tensors], **how: Any
) -> RankProcesses:
    running.append(RankProcesses(shards, directory, tensor, pipeline, requests, **how))
    return running[-1]


def request(seed: int, lengths: tuple[int, ...], outputs: tuple[int, ...]) -> Tensors:
    rows = len(lengths)
    ids = np.random.default_rng(seed).integers(0, 96, (rows, max(lengths)))
    return {
        "input_ids": ids.astype(np.uint32),
        "input_lengths": np.array(lengths, np.uint32)[:, None],
        "request_output_len": np.array(outputs, np.uint32)[:, None],
        "runtime_top_p": np.full((rows, 1), 1e-7, np.float32),  # greedy, with the model's own probabilities
        "is_return_log_probs": np.ones((rows, 1), bool),
        "is_return_context_cum_log_probs": np.ones((rows, 1), bool),
        "is_return_context_log_probs": np.ones((rows, 1), bool),
    }


def scored(tensors: Tensors) -> Tensors:
    """With the most probable tokens of the input and of the output; a rank of four has fewer than 20 x 4 columns."""
    count = np.full((len(tensors["input_ids"]), 1), 20, np.uint32)
    return tensors | {"num_top_log_probs": count, "num_context_top_log_probs": count}


SCORES = ("output_raw_log_probs", "output_top_log_probs", "context_top_log_probs")
# Rows that end at different steps and so move in the cache; the second batch reuses its memory.
REQUESTS = [request(1, (7, 1, 12, 3, 7), (10, 4, 20, 1, 10)), request(2, (30,), (12,))]


def sampled(tensors: Tensors) -> Tensors:
    rows = len(tensors["input_ids"])
    chance = {"runtime_top_p": np.full((rows, 1), 0.9, np.float32), "temperature": np.full((rows, 1), 2, np.float32)}
    return tensors | chance | {"random_seed": np.arange(rows, dtype=np.uint64)[:, None]}


def beams_prompts_and_a_talk() -> list[Tensors]:
    """What moves between slots and between ranks: beams, given embeddings, saved keys and values, a window."""
    searched = request(3, (6, 2), (9, 12)) | {"beam_width": np.full((2, 1), 3, np.uint32)}
    prompted = request(4, (5, 3), (6, 6)) | {
        "request_prompt_embedding": np.random.default_rng(5).normal(0, 0.5, (2, 4, 32)).astype(np.float32),
        "request_prompt_lengths": np.array([[4], [2]], np.uint32),
        "request_prompt_type": np.ones((2, 1), np.uint32),
    }
    begin = request(6, (5, 7), (4, 4)) | {"START": np.ones(1, np.int32)}
    begin |= {"session_len": np.full((2, 1), 40, np.uint32), "memory_len": np.full((2, 1), 8, np.uint32)}
    go_on = request(7, (6, 3), (5, 5)) | {"START": np.zeros(1, np.int32)}
    for turn in (begin, go_on):
        turn["is_return_context_cum_log_probs"] = np.zeros((2, 1), bool)
    return [searched, prompted, begin, go_on]


def assert_layout_gives_what_one_process_gives(
    tensor: int, pipeline: int, directory: Path, device: str, **how: bool
) -> None:
    # 3 layers: over 2 stages they are 2 and 1, over 4 stages the last has none.
    model = random_gpt2(tie_word_embeddings=tensor != 4, n_head=max(4, tensor))
    shards = write_shards(model, directory, tensor)
    requests = [scored(REQUESTS[0]), REQUESTS[1], sampled(REQUESTS[0]), *beams_prompts_and_a_talk()]
    ranks = start(shards, directory, tensor, pipeline, requests, on_gpu=device == "cuda", **how)
    alone = Settings(shards, tensor, 1, "fp32", 1, has_process_per_rank=False, kv_cache_bytes=CACHE_BYTES)
    engine = open_engine(alone, torch.device(device, 0))
    expected = [answer_of(engine, each) for each in requests]
    assert set(ranks.wait(240)) == {0}, ranks.text
    for ours, theirs in zip(ranks.answers, expected, strict=True):
        for name in ("output_ids", "sequence_length"):
            np.testing.assert_array_equal(ours[name], theirs[name])
        for name in {*theirs} & {"cum_log_probs", "output_log_probs", "context_log_probs", *SCORES}:
            np.testing.assert_allclose(ours[name], theirs[name], atol=1e-4)
    assert {*SCORES} <= ranks.answers[0].keys()


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4)])
def test_any_layout_gives_what_one_process_gives(tensor: int, pipeline: int, tmp_path: Path) -> None:
    assert_layout_gives_what_one_process_gives(tensor, pipeline, tmp_path, "cpu")


@pytest.mark.parametrize("has_peer_sums", [True, False])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 1), (2, 2), (4, 1), (8, 1), (4, 2), (2, 4)])
def test_any_layout_gives_what_one_gpu_gives(tensor: int, pipeline: int, has_peer_sums: bool, tmp_path: Path) -> None:
    if torch.cuda.device_count() < tensor * pipeline:
        pytest.skip("no GPU for each rank")
    assert_layout_gives_what_one_process_gives(tensor, pipeline, tmp_path, "cuda", has_peer_sums=has_peer_sums)
    assert "falling back to NCCL" not in running[-1].text


@pytest.mark.parametrize("data_type", ["fp16", "bf16"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_half_precision_over_gpus_is_as_near_to_one_gpu_as_its_rounding(
    tensor: int, data_type: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if torch.cuda.device_count() < tensor:
        pytest.skip("no GPU for each rank")
    sizes = {"n_embd": 512, "n_head": 8, "n_layer": 4, "vocab_size": 5003, "initializer_range": 0.04}
    shards = write_shards(random_gpt2(tie_word_embeddings=tensor != 4, **sizes), tmp_path, tensor)
    ranks = start(shards, tmp_path, tensor, 1, REQUESTS, on_gpu=True, data_type=data_type)
    alone = Settings(shards, tensor, 1, data_type, 1, has_process_per_rank=False, kv_cache_bytes=CACHE_BYTES)
    engine = open_engine(alone, torch.device("cuda", 0))
    expected = [answer_of(engine, each) for each in REQUESTS]
    assert set(ranks.wait(240)) == {0}, ranks.text
    pairs = list(zip(ranks.answers, expected, strict=True))
    # Of the largest log-probability: rounding grows with the logits, which an untied head makes ten times as large.
    known = [(ours["context_log_probs"], theirs["context_log_probs"]) for ours, theirs in pairs]
    away = max(float(np.abs(ours - theirs).max() / np.abs(theirs).max()) for ours, theirs in known)
    same = float(np.mean([np.mean(ours["output_ids"] == theirs["output_ids"]) for ours, theirs in pairs]))
    record_property("log-probability difference, of the largest", away)
    record_property("tokens that agree", same)
    assert away < {"fp16": 2e-3, "bf16": 1e-2}[data_type]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_an_engine_starts_the_other_ranks_itself(tensor: int, pipeline: int, tmp_path: Path) -> None:
    assert_layout_gives_what_one_process_gives(tensor, pipeline, tmp_path, "cpu", starts_others=True)
    assert f"rank 1 of {tensor * pipeline}" in running[-1].text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_opens_one_engine_of_several_processes_after_another(device: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("no GPU for each rank")
    shards = write_shards(random_gpt2(), tmp_path, 2)
    ranks = start(shards, tmp_path, 2, 1, REQUESTS, starts_others=True, engines=3, on_gpu=device == "cuda")
    assert ranks.wait(100 if device == "cpu" else 250) == [0], ranks.text  # a GPU's kernels are compiled
    first, answers = ranks.answers[: len(REQUESTS)], ranks.answers
    assert len(answers) == 3 * len(REQUESTS)
    for ours, theirs in zip(answers, first * 3, strict=True):
        np.testing.assert_array_equal(ours["output_ids"], theirs["output_ids"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_an_encoder_decoder_over_ranks_gives_what_one_process_gives(
    tensor: int, pipeline: int, device: str, tmp_path: Path
) -> None:
    if device == "cuda" and torch.cuda.device_count() < tensor * pipeline:
        pytest.skip("no GPU for each rank")
    shards = write_family(random_t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False), tmp_path, tensor)
    requests = []
    begun = {"decoder_input_ids": np.array([[7, 8, 9], [5, 0, 0]], np.uint32)}
    begun |= {"decoder_input_lengths": np.array([[3], [1]], np.uint32)}
    scored = begun | {"is_return_context_log_probs": np.ones((2, 1), bool)}
    for seed, more in ((1, {}), (2, {"beam_width": np.full((2, 1), 3, np.uint32)}), (3, scored)):
        ids = np.random.default_rng(seed).integers(2, 90, (2, 9)).astype(np.uint32)
        lengths, counts = np.array([[9], [4]], np.uint32), np.array([[7], [10]], np.uint32)
        requests.append({"input_ids": ids, "sequence_length": lengths, "max_output_len": counts, **more})
    ranks = start(shards, tmp_path, tensor, pipeline, requests, model_type="T5", on_gpu=device == "cuda")
    settings = Settings(shards, tensor, 1, "fp32", 1, "T5", has_process_per_rank=False, kv_cache_bytes=CACHE_BYTES)
    engine = open_engine(settings, torch.device(device, 0))
    expected = [answer_of(engine, each) for each in requests]
    assert set(ranks.wait(240)) == {0}, ranks.text
    for ours, theirs in zip(ranks.answers, expected, strict=True):
        for name, array in theirs.items():
            np.testing.assert_allclose(ours[name], array, atol=1e-4 if array.dtype.kind == "f" else 0)


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        *[("gemma2", 4, 1), ("gemma2", 1, 2), ("starcoder2", 2, 1), ("qwen3", 2, 2)],
        *[("glm4_moe", 4, 1), ("qwen3_moe", 2, 2), ("gpt_oss", 2, 1), ("minimax_m2", 4, 1)],
    ],
)
def test_a_llama_over_ranks_gives_what_one_process_gives(name: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    """Norms behind the sum over ranks, a tied head, windows; biases; shared key heads; experts; sinks."""
    shared = {"num_key_value_heads": 2} if name == "minimax_m2" else {}
    shards, _ = served_of(name, tmp_path, tensor, **shared)
    requests = [
        *REQUESTS,
        sampled(REQUESTS[0]),
        request(3, (6, 2), (9, 12)) | {"beam_width": np.full((2, 1), 3, np.uint32)},
    ]
    ranks = start(shards, tmp_path, tensor, pipeline, requests, model_type="Llama")
    alone = Settings(shards, tensor, 1, "fp32", 1, "Llama", has_process_per_rank=False, kv_cache_bytes=CACHE_BYTES)
    engine = open_engine(alone, CPU)
    expected = [answer_of(engine, each) for each in requests]
    assert set(ranks.wait(240)) == {0}, ranks.text
    for ours, theirs in zip(ranks.answers, expected, strict=True):
        for key in ("output_ids", "sequence_length"):
            np.testing.assert_array_equal(ours[key], theirs[key])
        for key in ("cum_log_probs", "output_log_probs", "context_log_probs"):
            np.testing.assert_allclose(ours[key], theirs[key], atol=1e-4)


def test_prefix_prompts_over_ranks_give_what_one_process_gives(tmp_path: Path) -> None:
    _, settings = write_with_prefixes("gpt_neox", tmp_path, 2)
    tasks = np.array([[0], [1], [2]], np.uint32)
    requests = [request(1, (7, 3, 5), (10, 4, 8)) | {"prompt_learning_task_name_ids": tasks}]
    ranks = start(settings.checkpoint, tmp_path, 2, 2, requests, model_type="GPT-NeoX")
    expected = answer_of(open_engine(settings, CPU), requests[0])
    assert set(ranks.wait(240)) == {0}, ranks.text
    np.testing.assert_array_equal(ranks.answers[0]["output_ids"], expected["output_ids"])
    np.testing.assert_allclose(ranks.answers[0]["cum_log_probs"], expected["cum_log_probs"], atol=1e-4)


def test_attentions_over_ranks_are_what_one_process_gives(tmp_path: Path) -> None:
    shards = write_family(T5EncoderModel(random_t5().config), tmp_path, 2)
    ids = np.random.default_rng(1).integers(2, 90, (2, 9)).astype(np.uint32)
    requests = [{"input_ids": ids, "sequence_length": np.array([[9], [4]], np.uint32)}]
    requests.append(requests[0] | {"is_return_attentions": np.ones((2, 1), bool)})
    ranks = start(shards, tmp_path, 2, 2, requests, model_type="T5-Encoder")
    engine = open_engine(Settings(shards, 2, 1, "fp32", 1, "T5-Encoder", has_process_per_rank=False), CPU)
    expected = [answer_of(engine, each) for each in requests]
    assert set(ranks.wait(240)) == {0}, ranks.text
    for ours, theirs in zip(ranks.answers, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            np.testing.assert_allclose(ours[name], array, atol=1e-5)


def test_an_engine_whose_other_rank_cannot_load_says_so_and_leaves_no_process_behind(tmp_path: Path) -> None:
    shards = write_shards(random_gpt2(), tmp_path, 2)
    (shards / "model.layers.1.mlp.dense_h_to_4h.weight.1.bin").unlink()
    ranks = start(shards, tmp_path, 2, 1, REQUESTS, starts_others=True)
    deadline = time.monotonic() + 240
    while not workers_of(tmp_path):
        assert time.monotonic() < deadline, ranks.text
        time.sleep(0.02)
    assert ranks.wait(240) != [0]
    assert "model.layers.1.mlp.dense_h_to_4h.weight.1.bin" in ranks.text
    assert not workers_of(tmp_path) and not list(tmp_path.glob("slipway-ranks-*"))


def test_a_process_whose_engine_could_not_load_opens_another(tmp_path: Path) -> None:
    shards = write_shards(random_gpt2(), tmp_path, 2)
    (shards / "model.wpe.bin").rename(shards / "aside")
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from backends.fastertransformer.engine.engine import open_engine\n"
        "from backends.fastertransformer.engine.errors import EngineError\n"
        "from backends.fastertransformer.engine.settings import Settings\n"
        "shards = Path(sys.argv[1])\n"
        "settings = Settings(shards, 2, 1, 'fp32', 1, has_process_per_rank=True)\n"
        "try:\n"
        "    open_engine(settings)\n"
        "except EngineError as error:\n"
        "    assert 'model.wpe.bin' in str(error), error\n"
        "    (shards / 'aside').rename(shards / 'model.wpe.bin')\n"
        "    open_engine(settings).close()\n"
        "    print('opened')\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-c", program, str(shards)]
    run = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=PROJECT, timeout=180, env=environment)
    assert (run.returncode, run.stdout) == (0, "opened\n"), run.stderr
    assert not workers_of(tmp_path)


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_or_hangs_ends_the_others_within_a_minute(
    victim: int, harm: signal.Signals, tmp_path: Path
) -> None:
    shards = write_shards(random_gpt2(), tmp_path, 2)
    ranks = start(shards, tmp_path, 2, 1, [REQUESTS[0]] * 100_000)
    other = 1 - victim
    deadline = time.monotonic() + 240
    while "answered" not in ranks.outputs[0].read_text():
        assert time.monotonic() < deadline, ranks.text
        time.sleep(0.1)
    os.kill(ranks.processes[victim].pid, harm)
    assert ranks.processes[other].wait(240) == 1
    said = ranks.outputs[other].read_text()
    assert f"rank {other} of 2: " in said and "lost" in said


def listening_ports(pid: int) -> dict[int, str]:
    """Ports that a process listens on, with the address of each as /proc writes it."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()]
    sockets = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().split("\n")
    ]
    found = [line[1].rpartition(":") for line in lines if len(line) > 9 and line[3] == "0A" and line[9] in sockets]
    return {int(port, 16): address for address, _, port in found}


def test_a_stranger_cannot_reach_the_store_of_ranks_on_several_hosts(tmp_path: Path) -> None:
    """Oracle: torch's own client, which needs nothing but the port."""
    shards = write_shards(random_gpt2(), tmp_path, 2)
    ranks = start(shards, tmp_path, 2, 1, [REQUESTS[0]] * 100_000, is_one_host=False)
    deadline = time.monotonic() + 240
    while "answered" not in ranks.outputs[0].read_text():
        assert time.monotonic() < deadline and None in [each.poll() for each in ranks.processes], ranks.text
        time.sleep(0.1)
    assert (tmp_path / "rendezvous").stat().st_mode & 0o777 == 0o600
    loopback = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
    listening = {port: address for each in ranks.processes for port, address in listening_ports(each.pid).items()}
    reachable = [port for port, address in listening.items() if address not in loopback]
    assert listening and len(reachable) == 1  # rank 0's listener, where this host's name has no address but loopback
    for port in reachable:
        with pytest.raises(Exception, match="(?i)connect|reset|store|ping failed|timed out|timeout"):
            TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1)).num_keys()
    assert [each.poll() for each in ranks.processes] == [None, None]


def test_a_rank_that_cannot_load_its_shard_ends_the_start(tmp_path: Path) -> None:
    shards = write_shards(random_gpt2(), tmp_path, 2)
    (shards / "model.layers.1.mlp.dense_h_to_4h.weight.1.bin").unlink()
    ranks = start(shards, tmp_path, 2, 1, REQUESTS)
    assert all(ranks.wait(240)), ranks.text
    assert "model.layers.1.mlp.dense_h_to_4h.weight.1.bin" in ranks.outputs[1].read_text()


def test_the_largest_key_is_the_argmax_and_the_first_of_equals() -> None:
    values = torch.tensor([-0.0, 0.0, -1.5, 3e38, -3e38, 3e38, 1e-40, float("-inf"), 65504.0])
    for count in range(1, len(values) + 1):
        tokens = torch.randperm(1 << 20)[:count].sort().values
        best = argmax_keys(values[:count], tokens).argmax()
        assert tokens[best] == tokens[values[:count].argmax()]
        assert argmax_keys(values[:count], tokens).unique().numel() == count


@pytest.mark.parametrize("vocab_size", [4, 97, 50257, 256000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_token_is_predicted_by_one_rank(vocab_size: int, ranks: int) -> None:
    parts = [vocabulary_part(vocab_size, rank, ranks) for rank in range(ranks)]
    assert [token for part in parts for token in part] == list(range(vocab_size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1 and min(map(len, parts))
