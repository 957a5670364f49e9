"""A CPU that the engine takes for a GPU. CUDA graphs are faked: what would be captured is done instead."""

from __future__ import annotations

import pytest
import torch

from backends.fastertransformer.engine.model import network
from backends.fastertransformer.engine.ops.triton_ops import TritonOps
from support.faked_graphs import fake_graphs


def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on networks have Triton's operations; products of fp32 numbers are torch's all the same."""
    monkeypatch.setattr(network, "choose_ops", TritonOps)
    fake_graphs(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
