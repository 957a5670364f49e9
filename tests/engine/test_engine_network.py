"""The network against NeMo's logits: whole inputs, a token at a time, in chunks, through a window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.engines.network_runs import decode_logits, in_a_row, mixed_logits, new_cache, open_network, prefill_logits
from support.shards.gpt2_checkpoint import random_gpt2, write_shards

from backends.fastertransformer.engine.arrays import UNBOUNDED
from backends.fastertransformer.engine.ops.cached_attention import entry_positions
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

NEMO = Path(__file__).resolve().parent.parent / "data" / "nemo"
TOLERANCE = 1e-4


# What an archive's own ranks were is settled by the conversion.
@pytest.mark.in_ci(when=lambda at: at.tensor_para_size == 2 or at.name == "gpt_untied")
@pytest.mark.parametrize("tensor_para_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt122_tp1_pp1", "gpt_tp2_pp1", "gpt_tp1_pp2", "gpt_untied"])
def test_logits_are_nemos(name: str, tensor_para_size: int, tmp_path: Path) -> None:
    convert(ConvertArguments(NEMO / f"{name}.nemo", tmp_path, tensor_para_size, "fp32"))
    network = open_network(tmp_path, tensor_para_size)
    ids = torch.from_numpy(np.load(NEMO / f"{name}.input_ids.npy"))
    expected = torch.from_numpy(np.load(NEMO / f"{name}.logits.npy")).float()
    assert (prefill_logits(network, ids) - expected).abs().max() < TOLERANCE
    assert (decode_logits(network, ids) - expected[:, 1:]).abs().max() < TOLERANCE


def test_a_row_cut_anywhere_gives_what_it_gives_whole(tmp_path: Path) -> None:
    model = random_gpt2()
    network = open_network(write_shards(model, tmp_path), 1)
    ids = torch.randint(0, 96, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits
    cuts = [[5, 6, 20], [1, 13, 14], [7, 8, 23]]
    for row, logits in enumerate(mixed_logits(network, ids, cuts)):
        assert (logits - expected[row, : cuts[row][-1] + 1]).abs().max() < TOLERANCE


def test_a_window_sees_the_last_tokens_only(tmp_path: Path) -> None:
    """Against Hugging Face with every key outside the window masked, and positions as they are."""
    model, window = random_gpt2(n_layer=1), 6
    network = open_network(write_shards(model, tmp_path), 1)
    ids = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(2))
    index = torch.arange(20)
    sees = (index <= index[:, None]) & (index > index[:, None] - window)
    with torch.no_grad():
        expected = model(ids, attention_mask=torch.where(sees, 0.0, -1e9)[None, None].expand(2, -1, -1, -1)).logits
    cache = new_cache(network, 2, 32, window)
    hidden = []
    with torch.inference_mode():
        for start, end in ((0, 5), (5, 11), (11, 13), (13, 19)):  # one of them goes round the end
            rows = in_a_row(list(ids[:, start:end]), [start, start], [0, 1])
            out = network.extend(rows, cache, longest=min(end, window) if start else 0)
            hidden.append(out.view(2, end - start, -1))
        hidden.append(network.decode(ids[:, 19], torch.full((2,), 19), slice(0, 2), cache)[:, None])
        logits = network.logits(torch.cat(hidden, 1))
    assert (logits - expected).abs().max() < TOLERANCE


def test_embeddings_stand_in_for_token_embeddings_where_they_are_numbers(tmp_path: Path) -> None:
    model = random_gpt2()
    network = open_network(write_shards(model, tmp_path), 1)
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(3))
    given = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(4))
    keeps_own = torch.arange(9)[None, :, None] >= torch.tensor([4, 0])[:, None, None]
    with torch.no_grad():
        expected = model(inputs_embeds=torch.where(keeps_own, model.transformer.wte(ids), given)).logits
    cache = new_cache(network, 2, 9)
    embeddings = given.masked_fill(keeps_own, float("nan"))
    with torch.inference_mode():
        hidden = network.extend(in_a_row(list(ids), [0, 0], [0, 1]), cache, embeddings.flatten(0, 1))
        assert (network.logits(hidden).view_as(expected) - expected).abs().max() < TOLERANCE


def test_cells_hold_the_last_position_that_fell_on_them() -> None:
    for window in (1, 3, 7, UNBOUNDED):
        for last in range(-1, 12):
            held = [-1] * 9
            for position in range(last + 1):
                if position % window < 9:
                    held[position % window] = position
            found = entry_positions(torch.tensor([last]), torch.tensor([window]), 9)[0].tolist()
            assert [position if position >= 0 else -1 for position in found] == held
