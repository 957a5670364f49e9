"""Attention with sinks (GPT-OSS) and with gates of its output (Qwen3-Next): the engine against transformers' own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines.hub_served import check_served, described, opened
from support.tiny_models.greedy import argmaxes
from support.tiny_models.llama_models import build, save

from backends.fastertransformer.engine.ops.positions import AttentionSpec
from backends.fastertransformer.engine.ops.torch_attention import attend_masked
from models.decoder import Decoder

SINKS = "gpt_oss_eager"


def with_sinks(name: str, directory: Path) -> Any:
    """Save a model of a dense class whose attention is GPT-OSS's: its function, and a sink of each head."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    AttentionInterface.register(SINKS, eager_attention_forward)
    AttentionMaskInterface.register(SINKS, eager_mask)
    model = build(name, max_position_embeddings=512)
    torch.manual_seed(4)
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(2 * torch.randn(model.config.num_attention_heads))
    model.save_pretrained(directory)
    model.set_attn_implementation(SINKS)
    return model


@pytest.mark.parametrize("name", ["llama", "llama_mha", "mistral", "qwen3"])
def test_sinks_are_those_of_gpt_oss(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without groups of heads, windows, and norms of queries and keys; longer than a page."""
    model = with_sinks(name, tmp_path)
    described(tmp_path, monkeypatch, lambda each: replace(each, attention=replace(each.attention, has_sinks=True)))
    line, plain = [5, 6, 7, 8], build(name, max_position_embeddings=512)
    assert argmaxes(plain, line, line) != argmaxes(model, line, line)  # it matters
    engine = opened(tmp_path)
    check_served(engine, model)
    check_served(engine, model, longest=150)
    check_served(engine, model, longest=150)  # its beginning is known
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_takes_its_share_and_no_more(dtype: torch.dtype) -> None:
    """One token of a row, and many, whose scores are made in blocks; next to nothing where all else is hidden."""
    torch.manual_seed(0)
    heads, sinks, spec = (1, 4, 40, 16), torch.tensor([-50.0, 0.0, 2.0, 30.0]), AttentionSpec(0.25)
    q, k, v = (torch.randn(heads, dtype=torch.float64) for _ in range(3))
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) * spec.scale).masked_fill(hidden, -torch.inf)
    columns = sinks.double()[None, :, None, None].expand(1, 4, 40, 1)
    expected = torch.cat((scores, columns), -1).softmax(-1)[..., :-1] @ v
    query, key, value = (each.to(dtype) for each in (q, k, v))
    limit = 1e-5 if dtype == torch.float32 else 0.02
    whole = attend_masked(query, key, value, None, spec, is_causal=True, sinks=sinks)
    last = attend_masked(query[:, :, -1:], key, value, None, spec, sinks=sinks)
    assert (whole - expected).abs().max() < limit and (last - expected[:, :, -1:]).abs().max() < limit
    assert whole[0, 3].abs().max() < 1e-6 < whole[0, 0].abs().max()


def dense(decoder: Decoder) -> Decoder:
    """Leave out the blocks that no layer has."""
    assert {layer.blocks for layer in decoder.layers} == {("attention", "feed_forward")}
    return replace(decoder, mixture=None, delta=None)


def test_gates_of_the_output_are_those_of_qwen3_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a head rotates, norms are stored less one; every layer has attention and a plain feed-forward."""
    told: dict[str, Any] = {"layer_types": ["full_attention"] * 4, "mlp_only_layers": [0, 1, 2, 3]}
    model = save("qwen3_next", tmp_path, max_position_embeddings=512, **told)
    described(tmp_path, monkeypatch, dense)
    engine = opened(tmp_path)
    check_served(engine, model)
    check_served(engine, model, longest=150)
    engine.close()
