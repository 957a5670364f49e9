"""What the kernels are compiled for: nothing that is another from request to request, or a request would wait for it.

Triton compiles a kernel again where a number becomes 1 or a multiple of 16, or memory begins at one of 16 bytes. Its
launcher says here what it would be compiled for, as it does before every launch; nothing runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.faked_gpu import fake_gpu
from support.engines.network_runs import FP32, load_for_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from backends.fastertransformer.engine.cache.kv_cache import KvCache
from backends.fastertransformer.engine.cache.sizing import CacheShape
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.ops.kernels import fp8_rows, gemm, launch, sampling
from backends.fastertransformer.engine.ops.linear import Blocks, Norm
from backends.fastertransformer.engine.steps import graphs, warmup
from backends.fastertransformer.engine.steps.steps import Steps
from benchmarks.gpu.agreement import AgreementArguments, write_checkpoint

CPU = torch.device("cpu")
Variants = set[tuple[Any, ...]]


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[Variants]:
    """Those that would be compiled, from now on."""
    found: Variants = set()
    backend = make_backend(GPUTarget("cuda", 90, 32))

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, kinds, options = bind(*args, **kwargs)
        found.add((kernel.fn.__name__, str(kinds), str(sorted(options.items()))))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launch.scratch_of(CPU), "processors", 132)  # an H200's
    fake_gpu(monkeypatch)
    yield found


def take_steps(steps: Steps, lengths: Sequence[int], more: int) -> None:
    """Begin rows of these lengths, go on with more tokens of each, and take a step."""
    counts, nothing = np.array(lengths), np.full(len(lengths), -1)
    source = counts if steps.config.encoder else np.zeros_like(counts)
    allocator = steps.cache.allocator
    rows = [
        allocator.take(length + more + 1, source=each) for length, each in zip(lengths, source.tolist(), strict=True)
    ]
    steps.slots.allocate(0, rows, counts + more)
    ids = np.ones(sum(lengths), int)
    if steps.config.encoder:
        steps.encode(ids, counts, nothing, 0)
    hidden = steps.extend(ids, np.zeros_like(counts), counts, 0)
    if not steps.config.encoder:
        steps.predictions.argmax(hidden[: len(lengths)])
    steps.extend(np.ones(more * len(lengths), int), counts, np.full_like(counts, more), 0)
    steps.decode(len(lengths))
    steps.slots.free(len(lengths), 0, counts[:0], counts[:0])
    allocator.release(rows)


def open_steps(family: str, directory: Path) -> Steps:
    arguments = AgreementArguments(layers=1, hidden=256, vocab=50)
    config = write_checkpoint(arguments, family, directory / "1-gpu")
    root = directory / "1-gpu"
    weights = load_for_kernels(root, config) if config.has_experts else load_weights(root, config, 1, FP32, CPU)
    whole = Network(config, weights)
    has_cross = config.encoder is not None
    shape = CacheShape(whole.weights.decoder.entries, torch.float32, has_cross, is_head_major=True)
    return Steps(whole, KvCache(shape, CPU, 1 << 26, config.max_pos_seq_len))


@torch.inference_mode()
def test_warming_up_takes_no_step_after_its_limit(
    tmp_path: Path, variants: Variants, caplog: pytest.LogCaptureFixture
) -> None:
    warmup.warm_up(open_steps("gpt", tmp_path), limit_s=0)
    sampling_kernels = {"_draw_limits", "_draw", "_draw_of_all", "_keep_allowed"}
    assert {name for name, *_ in variants} == sampling_kernels
    assert "not captured within" in caplog.text and "256 rows" in caplog.text and "512 tokens" in caplog.text


def test_the_limits_of_draws_are_compiled_once_wherever_a_column_is_and_however_many_rows_draw(
    variants: Variants,
) -> None:
    sampling.warm_up(97, CPU)
    known = set(variants)
    floats, integers = torch.zeros(256, 11), torch.zeros(256, 7, dtype=torch.long)
    for at, count in itertools.product(range(4), (1, 15, 16, 64, 240)):
        seeds, generated, top_k = (integers[:, at + other] for other in range(3))
        columns = torch.zeros(count, dtype=torch.long), seeds, generated, top_k, floats[:, 2 * at]
        sampling.draw_limits(*columns)
        sampling.draw_limits(*columns, floats[:, at])
    assert variants == known


@torch.inference_mode()
def test_large_inputs_that_keep_the_gpu_busy_are_not_captured(
    tmp_path: Path, variants: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, clock = open_steps("gpt", tmp_path), [0.0]

    def spend(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(warmup, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(warmup, "_take_input", lambda *_: spend(0.010))
    for waited, most in ((0.069, 1024), (0.016, 3072), (0.010, 4096), (0.0, 4096)):
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _, waited=waited: spend(waited))
        assert max(warmup._choose_tokens(steps, 99.0)) == most


@pytest.mark.parametrize("family", ["llama", "bloom", "t5"])
@torch.inference_mode()
def test_behind_captures_the_largest_step_takes_its_memory_again(
    family: str, tmp_path: Path, variants: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, taken = open_steps(family, tmp_path), list[tuple[str, int]]()

    def note(name: str, real: Callable[..., Any], *given: Any) -> Any:
        taken.append((name, np.size(given[0])))
        return real(*given)

    for name in ("capture", "mix", "extend", "encode"):
        monkeypatch.setattr(steps, name, partial(note, name, getattr(steps, name)))
    monkeypatch.setattr(warmup, "_choose_tokens", lambda *_: (16, 64))
    warmup.warm_up(steps)
    most = {"llama": ("mix", 4096 - 256), "bloom": ("extend", 4096), "t5": ("encode", 4096)}[family]
    assert taken[-2][0] == "capture" and taken[-1] == most
    assert not steps.slots.positions.any() and not steps.slots.count


# A GPT-NeoX launches what a GPT-J does and rotates by halves, as a Llama; a Qwen3 launches what GLM does.
@pytest.mark.in_ci(when=lambda at: at.family not in ("gptneox", "qwen3"))
@pytest.mark.parametrize("family", ["gpt", "bloom", "gptj", "gptneox", "t5", "llama", "qwen3", "gemma2", "glm4_moe"])
@torch.inference_mode()
def test_no_request_needs_what_was_not_warmed_up(family: str, tmp_path: Path, variants: Variants) -> None:
    steps = open_steps(family, tmp_path)
    config = steps.config
    assert warmup.warm_up(steps).startswith("steps of up to 256 rows")
    known = set(variants)
    assert known
    for lengths, more in (([7], 1), ([16], 16), ([5, 3, 100], 7), ([1] * 19, 2), ([3] * 300, 3), ([90] * 8, 1)):
        take_steps(steps, lengths, more)
    larger = ([513], 9), ([514], 5), ([700, 1], 2), ([225] * 8, 1)
    not_captured = ([2049], 9), ([2050], 5), ([1500, 1, 700], 2), ([300] * 8, 1)
    for lengths, more in (*larger, *not_captured):
        if max(lengths) < config.max_pos_seq_len:
            take_steps(steps, lengths, more)
    assert variants - known == set()


@torch.inference_mode()
def test_what_is_larger_than_what_was_captured_says_so_once(
    tmp_path: Path, variants: Variants, caplog: pytest.LogCaptureFixture
) -> None:
    steps = open_steps("gpt", tmp_path)
    warmup.warm_up(steps)
    take_steps(steps, [100] * 16, 1)
    take_steps(steps, [9, 8] * 16, 1)
    take_steps(steps, [1] * 64, 1)
    assert not caplog.messages
    for _ in range(2):
        take_steps(steps, [1] * 257, 1)
    assert caplog.messages == [
        "input of 257 tokens in 257 rows runs without a CUDA graph, which is slower: "
        "graphs were captured of inputs of up to 4096 tokens and 64 rows",
        "decode step of 257 rows runs without a CUDA graph, which is slower: "
        "graphs were captured of steps of up to 256 rows",
    ]


@pytest.mark.parametrize(
    ("kind", "most", "blocks"),
    [
        (torch.float16, 16, None),
        (torch.int8, 512, None),
        (torch.float8_e4m3fn, 128, None),
        (torch.float8_e4m3fn, 128, Blocks(128, 0)),
        (torch.float8_e4m3fn, 256, None),
    ],
)
def test_no_number_of_rows_of_a_product_needs_what_was_not_warmed_up(
    kind: torch.dtype, most: int, blocks: Blocks | None, variants: Variants
) -> None:
    """Products of fp16 with more than a few rows are torch's, and those of FP8 with more than 128 but for bf16."""
    dtype = torch.bfloat16 if most == 256 else torch.float16
    norm = Norm(torch.ones(4096, dtype=dtype), None, 1e-5)
    shapes = [(3 * 4096, 4096), (4096, 4096), (4 * 4096, 4096), (4096, 4 * 4096)]
    matrices = [torch.empty(shape, dtype=kind) for shape in shapes]
    columns = (lambda inputs: inputs // blocks.width) if blocks else (lambda _: 1)
    scales = [None if kind == torch.float16 else torch.ones(rows, columns(inputs)) for rows, inputs in shapes]

    def run(count: int) -> None:
        for matrix, given in zip(matrices, scales, strict=True):
            x = torch.empty(count, matrix.shape[1], dtype=dtype)
            gemm.multiply(x, matrix, scales=given, norm=norm if len(x[0]) == 4096 else None, blocks=blocks)

    for size in sorted({*graphs.ROWS, *graphs.TOKENS}):
        if size <= most:
            run(size)
    known = set(variants)
    assert known
    for count in range(1, most + 1):
        run(count)
    assert variants - known == set()


def test_no_number_of_rounded_rows_needs_what_was_not_warmed_up(variants: Variants) -> None:
    numbers, scales = torch.empty(4096, 1024, dtype=torch.float8_e4m3fn), torch.ones(8, 4096)
    norm = Norm(torch.ones(1024), None, 1e-5, is_rms=True)

    def run(count: int) -> None:
        x = torch.empty(count, 1024, dtype=torch.float16)
        codes, units = fp8_rows.round_rows(x, norm, Blocks(128, 0))
        fp8_rows.multiply_blocks(codes, units, numbers, scales, x.dtype)

    for size in sorted({*graphs.ROWS, *graphs.TOKENS}):
        run(size)
    known = set(variants)
    assert len(known) == 4  # one that rounds, and three kinds of tiles
    for count in (*range(17, 600), *range(600, 9000, 77)):
        run(count)
    assert variants == known
