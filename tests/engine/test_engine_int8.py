"""Weight-only int8: its rounding against numpy, its logits against fp32, its memory by count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.engines.network_runs import CPU, prefill_logits, some_ids
from support.shards.family_shards import write_family
from support.tiny_models.huggingface_models import VOCAB, build

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.precision import Precision, choose_precision
from backends.fastertransformer.engine.model.reader import Reader
from backends.fastertransformer.engine.model.shards import made_up
from backends.fastertransformer.engine.model.weights import load_weights, read_model
from backends.fastertransformer.engine.ops.linear import Int8Linear, Linear
from backends.fastertransformer.engine.parallel.partition import Partition
from backends.fastertransformer.engine.settings import Settings
from ft_format.weight_format import FORMATS, INT8, NONE


def test_each_output_channel_is_rounded_to_multiples_of_its_own_scale() -> None:
    generator = np.random.default_rng(0)
    weight = (generator.standard_normal((6, 40)) * [[0.001], [1], [30], [1], [1], [0]]).astype(np.float32)
    bias, x = (generator.standard_normal(size).astype(np.float32) for size in (6, (3, 5, 40)))
    scale = np.abs(weight).max(1) / 127
    rounded = np.rint(weight / np.maximum(scale, 1e-30)[:, None])
    assert np.abs(rounded).max() == 127
    linear = Int8Linear(torch.from_numpy(weight), torch.from_numpy(bias))
    expected = x @ (rounded * scale[:, None]).T + bias
    size = 1 + 127 * scale  # a processor that multiplies bytes rounds x to 1/65024 of its largest number
    np.testing.assert_allclose(linear(torch.from_numpy(x)).numpy() / size, expected / size, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_only_the_int8_copy_is_kept(dtype: torch.dtype) -> None:
    weight = torch.randn(256, 512).to(dtype)
    linear = Int8Linear(weight)
    assert linear.size_bytes == 256 * 512 + 256 * 2
    assert linear.size_bytes < 0.51 * Linear(weight).size_bytes
    held = [value for value in vars(linear).values() if isinstance(value, torch.Tensor)]
    assert sum(value.numel() * value.dtype.itemsize for value in held) == linear.size_bytes


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_stay_near_those_of_the_full_weights(ranks: int, tmp_path: Path) -> None:
    model = build("gptj", n_embd=64)
    directory, ids = write_family(model, tmp_path, ranks), some_ids(4, 20)
    config, logits, sizes = read_config(directory, "GPT-J"), [], []
    for kept in FORMATS:
        precision = Precision(torch.float32, torch.float32, "", kept)
        weights = load_weights(directory, config, ranks, precision, CPU)
        logits.append(prefill_logits(Network(config, weights), ids))
        sizes.append(weights.size_bytes)
        assert weights.saved_bytes == sizes[0] - weights.size_bytes
    full, quantised = logits
    error = (quantised - full).abs().max() / full.std()
    assert 1e-5 < error < 0.05  # it is another network, and nearly the same
    matrices = 2 * (4 + 8) * 64 * 64  # of two layers
    scales = 4 * 2 * (3 + 1 + 4 + 1) * 64
    assert sizes[0] - sizes[1] == 3 * matrices - scales + VOCAB * (3 * 64 - 4)  # and of the head


@pytest.mark.parametrize("has_head", [False, True])
def test_a_gpus_head_is_int8_beside_the_table_that_tokens_are_looked_up_in(has_head: bool, tmp_path: Path) -> None:
    (tmp_path / "config.ini").write_text(
        "[gpt]\nhead_num = 4\nsize_per_head = 16\ninter_size = 256\nnum_layer = 1\nmax_pos_seq_len = 32\n"
        "vocab_size = 100\nstart_id = 0\nend_id = 0\n"
    )
    config, found = read_config(tmp_path), []
    for kept in FORMATS:
        precision, shards = Precision(torch.float16, torch.float16, "", kept), made_up(torch.float16, CPU)
        reader = Reader(config, 1, precision, CPU, False, None, shards)
        found.append(read_model(reader, config, Partition(range(1)), has_head))
    full, quantised = found
    assert full.head and quantised.head and isinstance(quantised.head, Int8Linear)
    assert quantised.token_embedding.dtype == torch.float16
    matrices, channels = 12 * 64 * 64, (3 + 1 + 4 + 1) * 64
    head = 100 * 64 + 2 * 100 - (2 * 100 * 64 if has_head else 0)
    assert quantised.size_bytes == full.size_bytes - matrices + 2 * channels + head
    assert quantised.saved_bytes == full.size_bytes - quantised.size_bytes


def test_int8_mode_is_part_of_the_precision() -> None:
    assert choose_precision("fp16", CPU).weights is NONE
    chosen = choose_precision("fp16", torch.device("cuda"), INT8)
    assert chosen.weights is INT8 and chosen.compute == torch.float16
    assert chosen.note == "fp16 on cuda, int8 weights"


def test_the_engines_description_says_what_int8_saves(tmp_path: Path) -> None:
    directory = write_family(build("gptj", n_embd=256), tmp_path)
    engine = open_engine(Settings(directory, 1, 1, "fp32", 1, "GPT-J", int8_mode=1), CPU)
    engine.close()
    matrices, scales = 2 * (4 + 8) * 256**2, 4 * 2 * (3 + 1 + 4 + 1) * 256
    saved = (3 * matrices - scales + VOCAB * (3 * 256 - 4)) / 1e9
    words = f"fp32 on cpu, int8 weights; weights 0.00173 GB ({saved:.3g} GB less than without int8)"
    assert words in engine.description
