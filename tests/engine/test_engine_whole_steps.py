"""A decode step's layers in one call of C: against formulas in fp64, and against the layers one by one."""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from support.engines.network_runs import decode_logits
from support.shards.llama_shards import served_of
from torch import Tensor

from backends.fastertransformer.engine.cache.page_allocator import PAGE
from backends.fastertransformer.engine.model import whole_steps
from backends.fastertransformer.engine.model.blocks.attention import GroupedWeights
from backends.fastertransformer.engine.model.blocks.feed_forward import DenseWeights
from backends.fastertransformer.engine.model.config import Stack
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.layouts import LayerWeights, StackWeights
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.precision import choose_precision
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.ops.host.attention import can_attend
from backends.fastertransformer.engine.ops.host.compiled import HostKernels, host_kernels
from backends.fastertransformer.engine.ops.host.layers import HostLayers, PlainLayer
from backends.fastertransformer.engine.ops.host.panels import Panels
from backends.fastertransformer.engine.ops.linear import Norm
from backends.fastertransformer.engine.ops.positions import AttentionSpec, Rotary, plain_frequencies
from ft_format.weight_format import INT8, NONE, WeightFormat

CPU = torch.device("cpu")
HIDDEN, HEADS, KV_HEADS, SIZE, INNER, PAGES = 48, 6, 2, 8, 72, 12
POSITIONS = torch.tensor([0, 5, PAGE - 1, PAGE, 2 * PAGE + 3])
SCALE = SIZE**-0.5


@pytest.fixture
def kernels() -> HostKernels:
    found = host_kernels()
    assert found, "the tests need a C compiler and an x86-64 processor with AVX2"
    return found


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn_layer(seed: int, is_rms: bool, is_gated: bool) -> dict[str, Any]:
    """The tensors of a layer; one without a gate has biases and layer norms, as a GPT has."""
    sizes = {"qkv": ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN), "out": (HIDDEN, HEADS * SIZE)}
    sizes |= {"into": (INNER, HIDDEN), "gate": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    layer: dict[str, Any] = {
        name: (drawn(seed + at, *size) * size[1] ** -0.5, None if is_gated else drawn(seed + at + 9, size[0]))
        for at, (name, size) in enumerate(sizes.items())
    }
    if not is_gated:
        layer["gate"] = None
    for at, name in enumerate(("before", "between")):
        bias = None if is_rms else drawn(seed + at + 30, HIDDEN)
        layer[name] = Norm(1 + 0.1 * drawn(seed + at + 20, HIDDEN), bias, 1e-5, is_rms)
    return layer


def plain(kernels: HostKernels, layer: dict[str, Any]) -> PlainLayer:
    panels = {name: given and Panels(kernels, *given) for name, given in layer.items() if not isinstance(given, Norm)}
    return PlainLayer(**{name: panels.get(name, given) for name, given in layer.items()})


def normed(x: Tensor, norm: Norm) -> Tensor:
    weight = norm.weight.double()
    if norm.is_rms:
        return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * weight
    return F.layer_norm(x, x.shape[-1:], weight, None if norm.bias is None else norm.bias.double(), norm.eps)


def multiplied(x: Tensor, given: tuple[Tensor, Tensor | None]) -> Tensor:
    weight, bias = given
    return F.linear(x, weight.double(), None if bias is None else bias.double())


def rotated(x: Tensor, position: int) -> Tensor:
    """Rotate the halves of a head, [heads, SIZE]."""
    angles = position * plain_frequencies(SIZE).double()
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def layer_in_fp64(x: Tensor, layer: dict[str, Any], kv: Tensor, tables: Tensor, has_rotary: bool) -> Tensor:
    """Run a layer on [B, HIDDEN], row by row, by the formulas; kv, [2, PAGES, Hkv, PAGE, D], is written to."""
    attended = []
    for row, position in enumerate(POSITIONS.tolist()):
        qkv = multiplied(normed(x[row], layer["before"]), layer["qkv"]).view(-1, SIZE)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS])
        if has_rotary:
            q, k = rotated(q, position), rotated(k, position)
        kv[0, tables[row, position // PAGE], :, position % PAGE] = k
        kv[1, tables[row, position // PAGE], :, position % PAGE] = v
        entries = torch.arange(position + 1)
        keys, values = (part[tables[row, entries // PAGE].long(), :, entries % PAGE] for part in kv)  # [S, Hkv, D]
        keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
        weights = (torch.einsum("hd,shd->hs", q, keys) * SCALE).softmax(-1)
        attended.append(torch.einsum("hs,shd->hd", weights, values).flatten())
    x = x + multiplied(torch.stack(attended), layer["out"])
    given = normed(x, layer["between"])
    inner = multiplied(given, layer["into"])
    inner = F.silu(inner) * multiplied(given, layer["gate"]) if layer["gate"] else F.gelu(inner, approximate="tanh")
    return x + multiplied(inner, layer["down"])


@pytest.mark.parametrize("is_gated", [True, False], ids=["llama", "gpt"])
def test_layers_are_what_fp64_says_and_what_is_no_number_stays_in_its_row(is_gated: bool, kernels: HostKernels) -> None:
    layers = [drawn_layer(100 * number, is_gated, is_gated) for number in range(3)]
    rotary = Rotary(SIZE, False, plain_frequencies(SIZE)) if is_gated else None
    spec = AttentionSpec(SCALE, rotary=rotary)
    whole = HostLayers(kernels, [plain(kernels, each) for each in layers], spec, SIZE, "silu" if is_gated else "gelu")
    first = torch.tensor([0, 2, 4, 6, 9])  # of each row's pages
    tables = (first[:, None] + torch.arange(3)).int()
    given = drawn(7, len(POSITIONS), HIDDEN)
    caches = [drawn(50 + number, 2, PAGES, PAGE, KV_HEADS, SIZE).transpose(2, 3) for number in range(3)]
    in_fp64, expected = [each.double() for each in caches], given.double()
    for layer, kv in zip(layers, in_fp64, strict=True):
        expected = layer_in_fp64(expected, layer, kv, tables, rotary is not None)
    windows = torch.full((len(POSITIONS),), 1 << 30)
    untouched = [each.clone() for each in caches]
    found = whole.run(given.clone()[:, None], POSITIONS, tables, windows, caches)[:, 0]
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-5
    for mine, theirs in zip(caches, in_fp64, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)
    for number, spoilt in enumerate((float("nan"), float("inf"), -float("inf"))):
        x = given.clone()
        x[number, 3] = spoilt
        again = whole.run(x[:, None], POSITIONS, tables, windows, [each.clone() for each in untouched])[:, 0]
        others = [row for row in range(len(POSITIONS)) if row != number]
        assert again[number].isnan().all() and torch.equal(again[others], found[others])


@pytest.mark.parametrize(("data_type", "weights"), [("fp32", NONE), ("fp16", NONE), ("bf16", NONE), ("fp32", INT8)])
def test_a_step_is_the_same_to_the_last_bit_as_its_layers_one_by_one(
    data_type: str, weights: WeightFormat, kernels: HostKernels, tmp_path: Path
) -> None:
    root, _ = served_of("llama", tmp_path, 1)
    config, ids = read_config(root, "Llama"), torch.arange(3, 43).view(2, 20)
    network = Network(config, load_weights(root, config, 1, choose_precision(data_type, CPU, weights), CPU))
    assert network._whole_step
    found = decode_logits(network, ids)
    vars(network)["_whole_step"] = None
    assert torch.equal(decode_logits(network, ids), found)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "olmo2"])
def test_layers_that_do_more_run_one_by_one(name: str, kernels: HostKernels, tmp_path: Path) -> None:
    """Norms of heads, of what is added, and behind the sum; their numbers are compared with transformers' elsewhere."""
    root, _ = served_of(name, tmp_path, 1)
    config = read_config(root, "Llama")
    assert Network(config, load_weights(root, config, 1, choose_precision("fp32", CPU), CPU))._whole_step is None


RECORDS = {
    Stack: lambda whole: whole[0],
    LayerWeights: lambda whole: whole[1].layers[0],
    GroupedWeights: lambda whole: whole[1].layers[0].attention,
    DenseWeights: lambda whole: whole[1].layers[0].feed_forward,
    Norm: lambda whole: whole[1].layers[0].post_norm,
}


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("is_used", [False, True], ids=["default", "used"])
def test_a_field_that_comes_later_makes_layers_run_one_by_one(
    kind: type[Any], is_used: bool, kernels: HostKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A made-up field of each record; whether its default is kept decides."""
    root, _ = served_of("llama", tmp_path, 1)
    config = read_config(root, "Llama")
    network = Network(config, load_weights(root, config, 1, choose_precision("fp32", CPU), CPU))
    assert network._whole_step and network.weights.decoder
    grown = make_dataclass(kind.__name__, [("made_up", float, field(default=0.5))], bases=(kind,), frozen=True)
    one = replace(network.weights.decoder, layers=network.weights.decoder.layers[:1])
    record = RECORDS[kind]((config, one))
    given = {each.name: getattr(record, each.name) for each in fields(kind)}
    monkeypatch.setitem(whole_steps._KNOWN, grown, whole_steps._KNOWN[kind])
    monkeypatch.setattr(whole_steps, kind.__name__, grown)
    changed = grown(**given, **({"made_up": 1.5} if is_used else {}))
    stack, weights = (replaced(each, record, changed) for each in (config, one))
    specs = network._specs.values()
    found = whole_steps.whole_step(stack, weights, network.comm, network.ops, specs, network._like)
    assert (found is None) == is_used


def replaced(within: Any, record: Any, other: Any) -> Any:
    """Return what holds a record with another one in its place."""
    if within is record:
        return other
    if isinstance(within, tuple) and not hasattr(within, "_fields"):
        return tuple(replaced(each, record, other) for each in within)
    if type(within) in (StackWeights, LayerWeights, GroupedWeights, DenseWeights):
        values = {each.name: replaced(getattr(within, each.name), record, other) for each in fields(within)}
        return replace(within, **values)
    return within


@pytest.mark.parametrize("name", sorted({*AttentionSpec._fields} - {"scale", "rotary"}))
def test_what_a_spec_says_beside_scale_and_rotation_is_not_the_kernels(name: str) -> None:
    rotary = Rotary(SIZE, False, plain_frequencies(SIZE))
    assert can_attend(AttentionSpec(SCALE, rotary=rotary), torch.empty(0))
    assert not can_attend(AttentionSpec(SCALE, rotary=rotary)._replace(**{name: 3}), torch.empty(0))
