"""An encoder's inputs by the kernels and by torch: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.fastertransformer.engine.cache.kv_cache import KvCache
from backends.fastertransformer.engine.cache.sizing import CacheShape
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.precision import choose_precision
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.ops.ops import Ops
from backends.fastertransformer.engine.ops.packed_rows import NumberedRows
from benchmarks.gpu.agreement import AgreementArguments, write_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("knows_lengths", [False, True])
@torch.inference_mode()
def test_inputs_are_kept_as_torch_keeps_them(knows_lengths: bool, tmp_path: Path) -> None:
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    arguments = AgreementArguments(layers=1, hidden=64, vocab=50)
    config = write_checkpoint(arguments, "t5", tmp_path / "1-gpu")
    weights = load_weights(tmp_path / "1-gpu", config, 1, choose_precision("fp32", DEVICE), DEVICE)
    shape = CacheShape(weights.decoder.entries, torch.float32, has_cross=True)
    lengths = [45, 7]
    rows = NumberedRows.of(np.random.default_rng(1).integers(0, 50, 52), np.zeros(2, int), np.array(lengths), 0)
    encoded, kept = [], []
    for kind in (Ops, TritonOps):
        ops = kind(DEVICE)
        network = Network(config, weights, ops=ops)
        cache = KvCache(replace(shape, is_head_major=ops.is_head_major), DEVICE, 1 << 24, 64)
        cache.allocate(0, [cache.allocator.take(5, source=length) for length in lengths])
        given = rows.on(DEVICE)
        encoded.append(network.encode(given if knows_lengths or kind is Ops else given._replace(lengths=None), cache))
        held = cache.kv[0][:, cache.source_page_tables[:2, :2].flatten().long()].transpose(2, 3).flatten(1, 2)
        kept.append(torch.cat((held[:, :45], held[:, 64:71]), 1))
    for one, other in (encoded, kept):
        assert (one - other).abs().max() < 1e-4 and one.abs().max() > 0.1
