"""The kernels of layers that keep states against torch's form in fp64: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backends.fastertransformer.engine.cache.states import LayerState
from backends.fastertransformer.engine.ops.delta_mixing import DeltaMixing
from backends.fastertransformer.engine.ops.linear import Norm
from backends.fastertransformer.engine.ops.mamba_mixing import MambaMixing
from backends.fastertransformer.engine.ops.mamba_scan import MambaRecurrence
from backends.fastertransformer.engine.ops.packed_rows import Rows
from backends.fastertransformer.engine.ops.state_rows import StateRows
from models.blocks.delta_rule import DeltaRule
from models.blocks.mamba import Mamba

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
STATES = 7  # and that of no row
KINDS = {
    "mamba": Mamba(4, 8, 2, 6, norm_eps=1e-5),
    "mamba with long steps, no bias": Mamba(3, 40, 1, 20, has_conv_bias=False, least_step=0.3),
    "mamba, a norm before the gate": Mamba(4, 16, 4, 16, conv_size=3, has_norm_before_gate=True),
    "mamba without a norm": Mamba(2, 64, 1, 16, has_norm=False),
    "delta by key": DeltaRule(2, 4, 16, 24),
    "delta by kind": DeltaRule(2, 2, 24, 40, is_by_kind=True),
}
if HAS_GPU:
    KINDS |= {
        "Nemotron-H 8B": Mamba(128, 64, 8, 128, norm_eps=1e-5),
        "Falcon-H1 7B": Mamba(24, 128, 2, 256, has_norm=False),
        "Qwen3-Next 80B-A3B": DeltaRule(16, 32, 128, 128),
        "Qwen3.5 9B": DeltaRule(16, 32, 128, 128, is_by_kind=True),
    }
# The interpreter takes its time.
CASES = [(name, dtype) for name in KINDS for dtype in (LIMITS if HAS_GPU else [torch.float32])]
CASES += [] if HAS_GPU else [("mamba", torch.float16), ("delta by key", torch.float16)]
# Norms and gates come behind what drafts change.
DRAFTED = [("mamba with long steps, no bias", torch.float32), ("delta by key", torch.float16)]
DRAFTED += [("delta by kind", torch.float32)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def made(kind: Mamba | DeltaRule) -> tuple[MambaMixing | DeltaMixing, tuple[int, ...]]:
    """Return a layer with random numbers, and the columns of what it is given."""
    torch.manual_seed(0)
    conv = drawn(kind.channels, kind.conv_size) * 0.4
    heads = kind.head_num if isinstance(kind, Mamba) else kind.value_head_num
    decay, bias = -torch.rand(heads, device=DEVICE) * 2 - 0.1, drawn(heads) - 1
    if isinstance(kind, DeltaRule):
        norm = Norm(drawn(kind.value_size) + 1, None, 1e-3, is_rms=True)
        wide = kind.key_head_num * kind.in_per_key
        return DeltaMixing(conv, decay, bias, norm, kind), (wide, 2 * heads)
    norm = Norm(drawn(kind.inter_size) + 1, None, 1e-3, is_rms=True) if kind.has_norm else None
    conv_bias = drawn(kind.channels) * 0.1 if kind.has_conv_bias else None
    return MambaMixing(conv, conv_bias, MambaRecurrence(decay, drawn(heads)), bias, norm, kind), (kind.in_size,)


def doubled(record: Any) -> Any:
    """Return a record whose tensors are fp64."""
    if isinstance(record, Tensor):
        return record.double()
    if isinstance(record, (MambaMixing, DeltaMixing, MambaRecurrence, Norm)):
        return replace(record, **{each.name: doubled(getattr(record, each.name)) for each in fields(record)})
    return record


class AllDouble(StateRows):
    """Torch's form, whose numbers stay fp64: the mixings make them fp32, which is taken back here."""

    def mix(self, mixing: Any, given: Sequence[Tensor], state: LayerState, dtype: torch.dtype) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "float", Tensor.double)
            return super().mix(doubled(mixing), given, state, dtype)


def poisoned(kind: Mamba | DeltaRule) -> LayerState:
    shapes = (STATES + 1, kind.conv_size - 1, kind.channels), (STATES + 1, *kind.memory)
    return LayerState(*(torch.full(shape, torch.nan, device=DEVICE) for shape in shapes))


def rows_of(spans: list[tuple[int, int]], empty: int = 0) -> Rows:
    """Rows from position to position, and rows without tokens behind them; the host does not know their lengths."""
    positions = torch.cat([torch.arange(*span, device=DEVICE) for span in spans])
    ends = np.cumsum([0, *(end - start for start, end in spans), *[0] * empty])
    return Rows(positions, positions, positions, torch.tensor(ends, dtype=torch.int32, device=DEVICE), None)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# The delta rule by key in 16 bits, by kind in 32.
@pytest.mark.in_ci(when=lambda at: HAS_GPU or at.name != "delta by key" or at.dtype == torch.float16)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_passes_and_steps_leave_outputs_and_states_as_torch_does(name: str, dtype: torch.dtype) -> None:
    """Rows begin, go on and have one token; one is padding, and some have no tokens. States are in any order."""
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    kind = KINDS[name]
    mixing, widths = made(kind)
    ours, theirs = poisoned(kind), LayerState(*(part.double() for part in poisoned(kind)))
    states, starts = torch.tensor([5, 1, 7, 2, 0, 0], device=DEVICE), [0] * 4
    for counts in ([70, 1, 2, 16], [1, 20, 3, 33]):
        spans = [(start, start + count) for start, count in zip(starts, counts, strict=True)]
        total, padding = sum(counts), 5
        given = [drawn(total + padding, width).to(dtype) for width in widths]
        rows = TritonOps(DEVICE).state_rows(states, rows_of([*spans, (0, padding)], empty=1))
        found = rows.mix(mixing, given, ours, dtype)
        told = rows_of(spans)._replace(lengths=counts)
        expected = AllDouble(states[:4], told).mix(mixing, [each[:total] for each in given], theirs, torch.float64)
        assert found.dtype == dtype and error(found[:total], expected) < LIMITS[dtype]
        assert found.isfinite().all()
        starts = [end for _, end in spans]
    padded = torch.cat((states[:4], states[4:5]))
    for _ in range(2):
        given = [drawn(5, width).to(dtype) for width in widths]
        found = TritonOps(DEVICE).state_rows(padded, None).mix(mixing, given, ours, dtype)
        expected = AllDouble(states[:4]).mix(mixing, [each[:4] for each in given], theirs, torch.float64)
        assert error(found[:4], expected) < LIMITS[dtype] and found.isfinite().all()
    for own, other in zip(ours, theirs, strict=True):
        assert error(own[states[:4]], other[states[:4]]) < LIMITS[dtype]
        assert own[[0, 3, 4, 6]].isnan().all()


def test_what_one_key_has_taught_is_learnt_exactly() -> None:
    """All keys are the same and nothing is forgotten: the triangular system is as ill as one can be."""
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    kind = KINDS["delta by kind"]
    mixing, widths = made(kind)
    mixing = replace(mixing, decay=torch.full_like(mixing.decay, -1e-6))
    given = [torch.rand(1, width, device=DEVICE).repeat(90, 1) for width in widths]
    given[0] += 0.01 * drawn(*given[0].shape)
    ours, theirs = poisoned(kind), LayerState(*(part.double() for part in poisoned(kind)))
    states, rows = torch.tensor([3], device=DEVICE), rows_of([(0, 90)])
    found = TritonOps(DEVICE).state_rows(states, rows).mix(mixing, given, ours, torch.float32)
    expected = AllDouble(states, rows._replace(lengths=[90])).mix(mixing, given, theirs, torch.float64)
    assert error(found, expected) < 1e-4
    assert error(ours.memory[3], theirs.memory[3]) < 1e-4


@pytest.mark.parametrize("name", ["mamba", "delta by kind"])
def test_blocks_of_a_pass_give_what_the_whole_pass_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is cut goes on from the state that its first block has left."""
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    kind, states, tokens = KINDS[name], torch.tensor([4, 2], device=DEVICE), 3 + 75
    mixing, widths = made(kind)
    given, rows = drawn(1, tokens, sum(widths)), rows_of([(0, 3), (0, 75)])._replace(lengths=[3, 75])
    found = []
    for block_tokens in (4096, 67):
        of_rows, state = TritonOps(DEVICE).state_rows(states, rows), poisoned(kind)
        monkeypatch.setattr(type(of_rows), "block_tokens", block_tokens)

        def mix(part: Tensor, of_part: StateRows, state: LayerState = state) -> Tensor:
            return of_part.mix(mixing, part[0].split(widths, -1), state, torch.float32)[None]

        found.append((of_rows.in_blocks(given, mix), *(part[states] for part in state)))
    assert all(error(cut, whole) < 1e-6 for whole, cut in zip(*found, strict=True))


@pytest.mark.in_ci(when=lambda at: HAS_GPU or (at.name, at.dtype) in DRAFTED)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_drafts_leave_states_until_they_are_settled_by_the_tokens_that_were_right(
    name: str, dtype: torch.dtype
) -> None:
    """Rows of several tokens, of which some were right, beside rows of one, padding, and rows without tokens."""
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    kind, counts, right = KINDS[name], [4, 1, 7, 1, 2], [1, 1, 5, 1, 2]
    mixing, widths = made(kind)
    ours, theirs = poisoned(kind), LayerState(*(part.double() for part in poisoned(kind)))
    states, starts = torch.tensor([5, 1, 7, 2, 6, 0, 0], device=DEVICE), [20, 1, 2, 16, 3]
    given = [drawn(sum(starts), width).to(dtype) for width in widths]
    begun = rows_of([(0, start) for start in starts])
    TritonOps(DEVICE).state_rows(states[:5], begun).mix(mixing, given, ours, dtype)
    AllDouble(states[:5], begun._replace(lengths=starts)).mix(mixing, given, theirs, torch.float64)
    for _ in range(2):  # the second goes on from what the first has left
        spans, padding = [(start, start + count) for start, count in zip(starts, counts, strict=True)], 3
        given, before = [drawn(sum(counts) + padding, width).to(dtype) for width in widths], [*map(torch.clone, ours)]
        rows = TritonOps(DEVICE).drafted_states(states, rows_of([*spans, (0, padding)], empty=1))
        found = rows.mix(mixing, given, ours, dtype)
        told = rows_of(spans)._replace(lengths=counts)
        unsettled = LayerState(*map(torch.clone, theirs))
        expected = AllDouble(states[:5], told).mix(
            mixing, [each[:-padding] for each in given], unsettled, torch.float64
        )
        assert error(found[:-padding], expected) < LIMITS[dtype] and found.isfinite().all()
        for own, was, other in zip(ours, before, unsettled, strict=True):
            np.testing.assert_array_equal(own[[5, 7, 6]].cpu(), was[[5, 7, 6]].cpu())
            assert error(own[[1, 2]], other[[1, 2]]) < LIMITS[dtype]
        firsts = np.cumsum(counts) - counts
        places = np.concatenate([first + np.arange(count) for first, count in zip(firsts, right, strict=True)])
        for each in given:
            each[np.setdiff1d(np.arange(sum(counts)), places)] = torch.nan  # leaves nothing
        rows.settle(torch.tensor([*right, 0, 0], dtype=torch.int32, device=DEVICE))
        kept = [(start, start + count) for start, count in zip(starts, right, strict=True)]
        told, given = rows_of(kept)._replace(lengths=right), [each[places] for each in given]
        AllDouble(states[:5], told).mix(mixing, given, theirs, torch.float64)
        starts = [end for _, end in kept]
        for own, other in zip(ours, theirs, strict=True):
            assert error(own[states[:5]], other[states[:5]]) < LIMITS[dtype] and own[[0, 3, 4]].isnan().all()
