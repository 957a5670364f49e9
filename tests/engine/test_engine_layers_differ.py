"""What layers of one model may differ in, and how tensors may lie in its files: the engine against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines.asking import ask, generated
from support.engines.few_pages import Served, spoiled
from support.engines.hub_served import check_served, described, opened
from support.engines.paged_steps import paged_steps
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.llama_models import VOCAB, save
from torch import Tensor

from backends.fastertransformer.engine.errors import RequestError, WeightsError
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.settings import Settings
from models.decoder import Decoder
from models.described import find_model_tensors, read_directory
from models.fused import places_of_parts

ORIGINAL = 32
WINDOWS = {"sliding_attention": 40, "full_attention": 70}


@pytest.mark.parametrize("ranks", [1, 2])
def test_phi3_is_served_up_to_its_original_length(ranks: int, tmp_path: Path) -> None:
    """Tensors of several, half of a head rotated by longrope with a factor, windows; two ranks copy a key head."""
    model = save("phi3", tmp_path, original_max_position_embeddings=ORIGINAL, num_key_value_heads=3 - ranks)
    assert model.model.rotary_emb.attention_scaling > 1.05
    engine = opened(tmp_path, ranks)
    check_served(engine, model)
    for length, is_refused in ((ORIGINAL - 8, False), (ORIGINAL - 7, True)):
        line = np.random.default_rng(5).integers(3, VOCAB, length).tolist()
        if is_refused:
            with pytest.raises(RequestError, match=f"= {ORIGINAL + 1} in row 0 exceeds max_pos_seq_len {ORIGINAL}"):
                engine.parse(ask([line], 8, end_id=NEVER))
        else:
            (outputs,) = engine.generate([engine.parse(ask([line], 8, end_id=NEVER))])
            assert generated(outputs) == argmaxes(model, line, generated(outputs))
    engine.close()


def test_parts_of_a_tensor_lie_behind_each_other_in_its_place(tmp_path: Path) -> None:
    """No byte of the file is copied to take them apart, and none is left out."""
    save("phi3", tmp_path)
    decoder = read_directory(tmp_path, WeightsError).decoder
    located = find_model_tensors(tmp_path, decoder, WeightsError)
    apart = places_of_parts(decoder, located)
    whole = located["model.layers.1.self_attn.qkv_proj.weight"][1]
    parts = [apart[f"model.layers.1.self_attn.{name}_proj.weight"][1] for name in "qkv"]
    assert [part.offset - whole.offset for part in parts] == [0, 64 * 64 * 4, 96 * 64 * 4]
    assert [part.shape for part in parts] == [(64, 64), (32, 64), (32, 64)]
    both = [apart[f"model.layers.1.mlp.{name}_proj.weight"][1] for name in ("gate", "up")]
    assert both[0].offset + both[0].size_bytes == both[1].offset and both[0].shape == (96, 64)
    assert sum(each.stored.size_bytes for each in apart.values()) == sum(
        each.stored.size_bytes for each in located.values()
    )


def test_neighbours_are_rotated_as_ernie_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers' own dense Ernie 4.5, whose tensors are Llama's."""
    import transformers

    llama = save("llama", tmp_path)
    ernie = transformers.Ernie4_5Config(**{**llama.config.to_dict(), "model_type": "ernie4_5", "use_bias": False})
    ernie._attn_implementation = "eager"
    model = transformers.Ernie4_5ForCausalLM(ernie).eval()
    model.load_state_dict(llama.state_dict())
    ids = torch.arange(3, 15)[None]
    assert (model(ids).logits - llama(ids).logits).abs().max() > 0.01
    described(tmp_path, monkeypatch, lambda decoder: with_neighbours(decoder))
    engine = opened(tmp_path)
    check_served(engine, model)
    engine.close()


def with_neighbours(decoder: Decoder) -> Decoder:
    return replace(decoder, attention=replace(decoder.attention, rotates_neighbours=True))


def window_masks(length: int) -> dict[str, Tensor]:
    place = torch.arange(length)
    masks = {}
    for kind, window in WINDOWS.items():
        is_hidden = (place[None] > place[:, None]) | (place[None] <= place[:, None] - window)
        masks[kind] = torch.zeros(1, 1, length, length).masked_fill(is_hidden, torch.finfo(torch.float32).min)
    return masks


def with_two_windows(decoder: Decoder) -> Decoder:
    wide = WINDOWS["full_attention"]
    layers = tuple(replace(layer, window=layer.window or wide) for layer in decoder.layers)
    return replace(decoder, layers=layers)


def test_windows_may_differ_and_pages_go_where_none_of_them_sees_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"sliding_window": WINDOWS["sliding_attention"], "max_position_embeddings": 512}
    model = save("gemma3", tmp_path, **sizes)
    described(tmp_path, monkeypatch, with_two_windows)
    config = read_config(tmp_path, "Llama")
    assert config.windows == (40, 70, 40) and config.reach == 70

    def compute(ids: Tensor) -> Tensor:
        found: Tensor = model(ids, attention_mask=window_masks(ids.shape[1])).logits
        return found

    engine = opened(tmp_path)
    check_served(engine, model, compute, longest=200)
    engine.close()
    pages = 6  # of 101 tokens that may begin anywhere in a page, and one to grow
    served = Served(paged_steps(Settings(tmp_path, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22), pages))
    line = np.random.default_rng(1).integers(3, VOCAB, 200).tolist()
    with spoiled(served.steps), torch.no_grad():
        found = served.say(ask([line], 100, end_id=NEVER))
        chosen = compute(torch.tensor([[*line, *found]]))[0, len(line) - 1 : -1].argmax(-1)
    assert len(found) == 100 and found == chosen.tolist()
    assert served.allocator.free == pages


def test_rotated_widths_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers without a window rotate 8 of 16 numbers: transformers' other angles are 0, and rows change places.

    There a number is rotated with the one 8 places on, here with the one 4 places on.
    """
    model = save("gemma3", tmp_path)
    rotary = model.model.rotary_emb
    rotary.full_attention_inv_freq[4:] = 0
    places = torch.tensor([*range(4), *range(8, 12), *range(4, 8), *range(12, 16)])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in ("q_proj", "k_proj", "q_norm", "k_norm"):
        key = f"model.layers.1.self_attn.{name}.weight"
        rows = tensors[key].view(-1, 16, *tensors[key].shape[1:])
        tensors[key] = rows[:, places].reshape(tensors[key].shape).contiguous()
    save_file(tensors, path, {"format": "pt"})

    def narrower(decoder: Decoder) -> Decoder:
        layers = list(decoder.layers)
        assert layers[1].rotary and not layers[1].window
        # The angles of 8 numbers whose base makes them those of the first 4 pairs of 16.
        layers[1] = replace(layers[1], rotary=replace(layers[1].rotary, width=8, base=layers[1].rotary.base ** 0.5))
        return replace(decoder, layers=tuple(layers))

    described(tmp_path, monkeypatch, narrower)
    engine = opened(tmp_path)
    assert [spec.rotary.width for spec in engine._steps.network._specs.values()] == [16, 8]
    check_served(engine, model)
    engine.close()
