"""An encoder's inputs one behind the other against padded ones: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from backends.fastertransformer.engine.attention.cache import UNBOUNDED, CacheShape
from backends.fastertransformer.engine.attention.pages import PagedCache
from backends.fastertransformer.engine.checkpoint.weights import load_weights
from backends.fastertransformer.engine.network.network import Network
from backends.fastertransformer.engine.precision import choose_precision
from benchmarks.gpu_agreement import AgreementArguments, write_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("knows_lengths", [False, True])
@torch.inference_mode()
def test_inputs_are_kept_as_padded_ones_are(knows_lengths: bool, tmp_path: Path) -> None:
    arguments = AgreementArguments(layers=1, hidden=64, vocab=50)
    config = write_checkpoint(arguments, "t5", tmp_path / "1-gpu")
    network = Network(config, load_weights(tmp_path / "1-gpu", config, 1, choose_precision("fp32", DEVICE), DEVICE))
    shape = CacheShape(config.num_layer, config.head_num, config.size_per_head, torch.float32, has_cross=True)
    ids = torch.randint(0, 50, (2, 45), device=DEVICE)
    lengths = [45, 7]
    counts = torch.tensor(lengths, device=DEVICE)
    caches = [PagedCache(shape, DEVICE, 1 << 24, 64) for _ in range(2)]
    for cache in caches:
        nothing = np.array([UNBOUNDED, UNBOUNDED])
        cache.place(0, np.array([5, 5]), nothing, np.array(lengths), {})
    padded = network.encode(ids, counts)
    network.remember(padded, counts, slice(0, 2), caches[0])
    tokens = torch.cat(
        [torch.stack((row[:n], torch.arange(n, device=DEVICE), torch.full((n,), slot, device=DEVICE)))
         for slot, (row, n) in enumerate(zip(ids, lengths, strict=True))], 1
    )  # fmt: skip
    ends = torch.tensor([0, 45, 52], dtype=torch.int32, device=DEVICE)
    packed = network.begin(tokens, ends, lengths if knows_lengths else None, caches[1])
    assert (packed[:45] - padded[0]).abs().max() < 1e-4 and (packed[45:] - padded[1, :7]).abs().max() < 1e-4
    for slot, length in enumerate(lengths):
        sides = [cache.source_cells(slice(slot, slot + 1)).read(cache.cross_memory[0], length) for cache in caches]
        for one, other in zip(*sides, strict=True):
            assert (one - other).abs().max() < 1e-4 and one.abs().max() > 0.1
