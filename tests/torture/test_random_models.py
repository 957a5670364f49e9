"""Exported means served: random configurations of every Hugging Face decoder, with transformers as the judge.

Each is built by transformers with random dimensions and switches, legal or not, and saved. Convert refuses it, or the
engine opens the shards and computes transformers' log probabilities.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.engines.stranger import log_probs, log_probs_of
from support.torture.random_models import EPSILONS, Candidate, build, try_models

if TYPE_CHECKING:
    from support.torture.campaign import Campaign, Tally

VOCABULARY_LEAST, POSITIONS = 91, 16


def _common(draw: random.Random) -> dict[str, Any]:
    heads, size = draw.choice((1, 2, 3, 4)), draw.choice((2, 3, 4, 5, 6, 8, 10))
    return {
        "heads": heads,
        "hidden": heads * size,
        "size": size,
        "layers": draw.choice((1, 2)),
        "inter": draw.choice((4, 6, 12, 34)),
        "vocab": draw.choice((91, 96, 97)),
        "eps": draw.choice(EPSILONS),
        "tied": draw.random() < 0.5,
    }


def _gpt2(draw: random.Random, of: dict[str, Any], name: str = "GPT2") -> tuple[str, dict[str, Any]]:
    config = {"n_embd": of["hidden"], "n_head": of["heads"], "n_layer": of["layers"], "n_inner": of["inter"]}
    activation = draw.choice(("gelu_new", "gelu", "relu", "gelu_pytorch_tanh", "silu"))
    return name, {
        **config,
        "n_positions": POSITIONS,
        "layer_norm_epsilon": of["eps"],
        "activation_function": activation,
        "scale_attn_weights": draw.random() < 0.9,
    }


def _gpt_bigcode(draw: random.Random, of: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return _gpt2(draw, of, "GPTBigCode")[0], {**_gpt2(draw, of)[1], "multi_query": draw.random() < 0.5}


def _gptj(draw: random.Random, of: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    config = _gpt2(draw, of)[1]
    return "GPTJ", {**config, "rotary_dim": draw.choice((1, 2, 3, 4, 6, 8, of["size"], of["size"] + 2))}


def _gpt_neox(draw: random.Random, of: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "GPTNeoX", {
        **{"hidden_size": of["hidden"], "num_attention_heads": of["heads"], "num_hidden_layers": of["layers"]},
        **{"intermediate_size": of["inter"], "max_position_embeddings": POSITIONS, "layer_norm_eps": of["eps"]},
        "rotary_pct": draw.choice((0.0, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0)),
        "use_parallel_residual": draw.random() < 0.5,
        "attention_bias": draw.random() < 0.7,
        "hidden_act": draw.choice(("gelu", "gelu_fast", "relu")),
    }


def _opt(draw: random.Random, of: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "OPT", {
        **{"hidden_size": of["hidden"], "num_attention_heads": of["heads"], "num_hidden_layers": of["layers"]},
        **{"ffn_dim": of["inter"], "max_position_embeddings": POSITIONS},
        "word_embed_proj_dim": draw.choice((of["hidden"], 4)),
        "do_layer_norm_before": draw.random() < 0.6,
        "enable_bias": draw.random() < 0.7,
        "activation_function": draw.choice(("relu", "gelu")),
    }


def _bloom(draw: random.Random, of: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    config = {"hidden_size": of["hidden"], "n_head": of["heads"], "n_layer": of["layers"]}
    post = draw.random() < 0.2
    return "Bloom", {
        **config, "layer_norm_epsilon": of["eps"], "apply_residual_connection_post_layernorm": post
    }  # fmt: skip


def _xglm(draw: random.Random, of: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "XGLM", {
        **{"d_model": of["hidden"], "attention_heads": of["heads"], "num_layers": of["layers"], "ffn_dim": of["inter"]},
        "max_position_embeddings": POSITIONS,
        "scale_embedding": draw.random() < 0.5,
        "activation_function": draw.choice(("gelu", "relu")),
    }


FAMILIES = (_gpt2, _gpt_bigcode, _gptj, _gpt_neox, _opt, _bloom, _xglm)


def _draw_one(trial: int, draw: random.Random) -> Candidate:
    import transformers

    of = _common(draw)
    name, config = FAMILIES[trial % len(FAMILIES)](draw, of)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"

    def make() -> Any:
        ids = {"bos_token_id": 5, "eos_token_id": 7}
        made = getattr(transformers, f"{name}Config")(
            vocab_size=of["vocab"], tie_word_embeddings=of["tied"], **ids, **config
        )
        return getattr(transformers, f"{name}{head}")(made)

    model = build(make, input_ids=torch.tensor([[11, 3]]))
    prompt = [draw.randrange(VOCABULARY_LEAST) for _ in range(draw.choice((2, 7, POSITIONS - 1)))]
    ids = ("bos_token_id", "eos_token_id")
    return Candidate(f"{name} {config} {of}", model, ids, prompt, log_probs, log_probs_of)


@pytest.mark.timeout(3600)
def test_exported_means_served(campaign: Campaign, tally: Tally, memory: Path) -> None:
    try_models(campaign.trials(14, 1400), tally, memory, _draw_one)
