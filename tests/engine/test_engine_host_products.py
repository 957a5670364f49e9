"""Products by kernels in C: their numbers against torch's in fp64, and what happens where they cannot be compiled."""

from __future__ import annotations

import logging
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from support.engines.network_runs import prefill_logits
from support.shards.llama_shards import served_of
from support.tiny_models.llama_models import VOCAB
from torch import Tensor

from backends.fastertransformer.engine.cache.page_allocator import PAGE
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.precision import choose_precision
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.ops import choose_ops
from backends.fastertransformer.engine.ops.host import compiled
from backends.fastertransformer.engine.ops.host.attention import DecodeAttention
from backends.fastertransformer.engine.ops.host.compiled import HostKernels, host_kernels
from backends.fastertransformer.engine.ops.host.panels import Panels
from backends.fastertransformer.engine.ops.linear import Int8Linear, Linear, Norm
from backends.fastertransformer.engine.ops.ops import Ops
from backends.fastertransformer.engine.ops.positions import AttentionSpec

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
ACTIVATIONS = {"": lambda x: x, "relu": F.relu, "silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh")}
SHAPES = [(1, 64, 32), (3, 78, 50), (13, 600, 100), (97, 1030, 33), (2, 33, 7), (30, 8, 200), (1, 40, 1)]


@pytest.fixture
def kernels() -> HostKernels:
    """The kernels; the tests need a C compiler and an x86-64 processor with AVX2."""
    found = host_kernels()
    assert found
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def drawn(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> tuple[Tensor, ...]:
    """Draw input, weight, bias, and scales."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((rows, inputs), (outputs, inputs), outputs)
    )
    return x, (20 * weight).to(dtype), bias, 0.5 + torch.rand(outputs, generator=generator)


def rounded_as(panels: Panels, x: Tensor) -> Tensor:
    """Round an input as a product does: pairs to bf16, and fours to 1/32512 of the largest of 256 inputs."""
    if panels.group < 4:
        return (x.bfloat16() if panels.rounds else x).double()
    rounded = []
    for some in x.split(256, -1):
        largest = some.abs().amax(-1, keepdim=True)
        rounded.append((some * (32512 / largest)).round().double() * (largest / 32512).double())
    return torch.cat(rounded, -1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_what_fp64_says(shape: tuple[int, int, int], dtype: torch.dtype, kernels: HostKernels) -> None:
    x, weight, bias, scales = drawn(dtype, *shape)
    panels = Panels(kernels, weight, bias, scales)
    assert torch.equal(panels.dense(), weight.to(panels.matrix.dtype)) and panels.matrix.shape == weight.shape
    expected = rounded_as(panels, x) @ weight.double().T * scales.double() + bias.double()
    found = panels.multiply(x)
    assert error(found, expected) < 2e-6
    alone = [panels.multiply(row[None]) for row in x[-3:]]
    assert torch.equal(torch.cat(alone), found[-3:])  # a row's numbers do not depend on the others
    out = torch.ones_like(found)
    assert panels.multiply(x, out=out, adds=True) is out and error(out, expected + 1) < 2e-6
    assert error(Panels(kernels, weight).multiply(x), rounded_as(panels, x) @ weight.double().T) < 2e-6


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("is_rms", [False, True])
def test_what_comes_before_and_behind_is_fused(is_rms: bool, dtype: torch.dtype, kernels: HostKernels) -> None:
    for shape in SHAPES[:-1]:
        x, weight, bias, scales = drawn(dtype, *shape)
        panels, gate = Panels(kernels, weight, bias, scales), Panels(kernels, weight.flip(0), None, scales)
        own, offset = (torch.rand(shape[1], generator=torch.Generator().manual_seed(n)) / 50 for n in (1, 2))
        wide, size = (x.double() + 3), x.shape[1:]
        normed = F.rms_norm(wide, size, eps=1e-5) if is_rms else F.layer_norm(wide, size, eps=1e-5)
        normed = normed * own.double() + (0 if is_rms else offset.double())
        rounding = 1e-2 if panels.rounds else 2e-4 if panels.group == 4 else 2e-5  # a normed number, the other way
        normed = rounded_as(panels, normed.float())
        first = normed @ weight.double().T * scales.double() + bias.double()
        second = normed @ weight.flip(0).double().T * scales.double()
        norm = (own, None if is_rms else offset, 1e-5, is_rms)
        for name, activate in ACTIVATIONS.items():
            found = panels.multiply(x + 3, norm, name, gate)
            assert error(found, activate(first) * second) < rounding, (shape, name)
            assert error(panels.multiply(x + 3, norm, name), activate(first)) < rounding, (shape, name)


def test_extreme_inputs_of_activations_stay_what_torch_says(kernels: HostKernels) -> None:
    panels, x = Panels(kernels, torch.ones(1, 1)), torch.tensor([-1e4, -100, -88, -20, -1e-8, 0, 1e-8, 30, 90, 1e4])
    for name, activate in ACTIVATIONS.items():
        torch.testing.assert_close(panels.multiply(x[:, None], None, name)[:, 0], activate(x), rtol=1e-6, atol=1e-30)
        assert panels.multiply(torch.tensor([[float("nan")]]), None, name).isnan().all()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_bytes_times_what_is_no_number_are_none(odd: float, kernels: HostKernels) -> None:
    x, weight, _, scales = drawn(torch.int8, 3, 600, 70)
    panels = Panels(kernels, weight, None, scales)
    sound, x[1, 300] = panels.multiply(x), odd
    found = panels.multiply(x)
    assert not found[1].isfinite().any() and torch.equal(found[::2], sound[::2])
    x[1] = 0
    assert torch.equal(panels.multiply(x)[1], torch.zeros(70))


def test_bytes_are_multiplied_to_the_16th_bit_of_the_largest_input(kernels: HostKernels) -> None:
    x, weight, _, _ = drawn(torch.int8, 4, 1024, 64)
    x[:, 5] *= 1000
    exact = x.double() @ weight.double().T
    limit = 256 * 127 * x.abs().amax(-1, keepdim=True) / 65024  # of the part that has the largest; others are finer
    assert bool(((Panels(kernels, weight).multiply(x) - exact).abs() < 4 * limit).all())
    assert error(Panels(kernels, weight).multiply(x), exact) < 3e-4


def test_threads_share_the_panels_and_the_rows(kernels: HostKernels) -> None:
    x, weight, bias, _ = drawn(torch.bfloat16, 200, 64, 1000)
    panels, threads, norm = Panels(kernels, weight, bias), torch.get_num_threads(), (torch.ones(64), None, 1e-5, True)
    alone = [panels.multiply(x, norm) for _ in range(2)]
    try:
        torch.set_num_threads(3)
        together = [panels.multiply(x, norm) for _ in range(5)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(alone[0], each) for each in (*alone, *together))


def test_transposed_and_strided_weights_are_laid_out(kernels: HostKernels) -> None:
    weight = torch.randn(70, 100)
    for dtype in TYPES[:2]:
        given = weight.to(dtype)
        assert torch.equal(Panels(kernels, given.T).dense(), given.T)
        assert torch.equal(Panels(kernels, given[:, 10:50]).dense(), given[:, 10:50])


@pytest.mark.parametrize("kind", [Linear, Int8Linear])
def test_torch_s_products_are_the_same_where_there_is_no_compiler(
    kind: type[Linear], kernels: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias, _ = drawn(torch.float32, 5, 48, 70)
    norm = Norm(torch.rand(48), None, 1e-5, is_rms=True)
    ours, ops = kind(weight, bias), choose_ops(CPU)
    assert ours.panels and ours.weight.shape == weight.shape
    monkeypatch.setattr("backends.fastertransformer.engine.ops.host.panels.host_kernels", lambda: None)
    theirs = kind(weight, bias)
    assert theirs.panels is None
    limit = 1e-4 if ours.panels.group == 4 else 2e-6
    for linear in (ours, theirs):
        assert error(linear(x), theirs(x).double()) < limit
        for name in ("silu", "exact_gelu", "squared_relu"):
            found = ops.gated_linear(linear, ours, x, norm, name)
            assert error(found, ops.gated_linear(theirs, theirs, x, norm, name).double()) < limit, name
            added = ops.linear(linear, x, norm, name, torch.ones(5, 70))
            assert error(added, ops.linear(theirs, x, norm, name, torch.ones(5, 70)).double()) < limit, name


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory, so that the kernels are compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    host_kernels.cache_clear()
    yield tmp_path
    host_kernels.cache_clear()


def test_what_was_compiled_is_found_again(
    kernels: HostKernels, compiling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host_kernels()
    (library,) = (compiling / "cache" / "slipway").iterdir()
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    run, commands = subprocess.run, list[list[str]]()

    def note(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", note)
    host_kernels.cache_clear()
    assert host_kernels()
    assert [command[1:] for command in commands] == [["--version"]]


@pytest.mark.parametrize("dtype", TYPES)
def test_processors_without_avx512_are_served(
    dtype: torch.dtype, kernels: HostKernels, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "avx2"))
    monkeypatch.setattr(compiled, "_FLAGS", (*compiled._FLAGS, "-mno-avx512f"))
    older = HostKernels(compiled._library())
    assert older.width == 16 and not older.multiplies_pairs
    for shape in SHAPES:
        x, weight, bias, scales = drawn(dtype, *shape)
        panels, gate = Panels(older, weight, bias, scales), Panels(older, weight)
        first, second = x.double() @ weight.double().T * scales.double() + bias.double(), x.double() @ weight.double().T
        assert error(panels.multiply(x, None, "silu", gate), F.silu(first) * second) < 2e-5
    # Attention is compiled with them: 50 entries of one row.
    q, k, v = (torch.randn(1, 2, 1, 20) for _ in range(3))
    kv, where = torch.randn(2, 2, PAGE, 2, 20).transpose(2, 3), (torch.tensor([49]), torch.tensor([[0, 1]]).int())
    given = (*where, torch.tensor([1 << 30]), AttentionSpec(0.3), q)
    found = DecodeAttention(older, *given).attend(q, k, v, kv)
    torch.testing.assert_close(found, Ops(CPU).decode_attention(*given)(q, k, v, kv), rtol=1e-5, atol=1e-5)


FAILS = "#!/bin/sh\necho gcc 0\n[ $# = 1 ] || { printf '\\221x\\222: no AVX' >&2; exit 1; }\n"


@pytest.mark.parametrize("text", ["", FAILS])
def test_without_a_working_compiler_torch_multiplies_and_the_log_says_so(
    text: str, compiling: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a compiler prints may be in no encoding that Python knows of: in Triton's stub any quote of gcc's is so."""
    if text:
        (compiling / "gcc").write_text(text)
        (compiling / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(compiling))
    with caplog.at_level(logging.WARNING, compiled.__name__):
        assert host_kernels() is None
    assert "products on the CPU are torch's" in caplog.text
    assert ("no AVX" if text else "there is no C compiler") in caplog.text


@pytest.mark.parametrize("data_type", ["bf16", "fp16"])
def test_weights_of_two_bytes_stay_so_in_memory(data_type: str, kernels: HostKernels, tmp_path: Path) -> None:
    """They are transformers' weights rounded to the type; where products round activations, as near as its bf16."""
    root, model = served_of("llama", tmp_path, 1)
    config, ids = read_config(root, "Llama"), torch.arange(3, 43).view(2, 20)
    precision = choose_precision(data_type, CPU)
    assert f"weights kept as {data_type}, arithmetic in fp32" in precision.note
    full, kept = (load_weights(root, config, 1, each, CPU) for each in (choose_precision("fp32", CPU), precision))
    assert kept.size_bytes < 0.55 * full.size_bytes and kept.like.dtype == torch.float32
    found = prefill_logits(Network(config, kept), ids)[..., :VOCAB]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(precision.rounded))
        expected = model(ids).logits
        theirs = model.to(precision.rounded)(ids).logits.float()
    limit = (theirs - expected).norm() if kernels.multiplies_pairs and data_type == "bf16" else 1e-5 * expected.norm()
    assert (found - expected).norm() < limit
