"""A CPU that the engine takes for a GPU. CUDA graphs are faked: what would be captured is done instead."""

from __future__ import annotations

import pytest
import torch

from backends.fastertransformer.engine.model import network
from backends.fastertransformer.engine.ops.triton_ops import TritonOps
from backends.fastertransformer.engine.steps import graphs
from support.engines.faked_graphs import fake_graphs


def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on networks have Triton's operations; products of fp32 numbers are torch's all the same."""
    monkeypatch.setattr(network, "choose_ops", TritonOps)
    fake_graphs(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)


def launch_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on steps are those of a GPU of few processors, for Triton's interpreter, whose time is that of programs.

    A row is still shared by several programs, and graphs of inputs still have room for more rows than they are given.
    """
    from backends.fastertransformer.engine.ops.kernels import launch, sampling

    monkeypatch.setattr(launch.scratch_of(torch.device("cpu")), "processors", 2)
    monkeypatch.setattr(sampling, "_PARTS", 4)
    monkeypatch.setattr(graphs, "most_rows", lambda tokens: 4)
