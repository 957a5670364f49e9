"""Exported means served: random configurations of every Hugging Face decoder, with transformers as the judge.

Each is built by transformers with random dimensions and switches, legal or not, and saved. Convert refuses it, or the
engine opens the shards and computes transformers' log probabilities.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from support.huggingface_models import filling, write_tokenizer
from support.stranger import change_json, engine_of, log_probs, log_probs_of

from handover.errors import CheckpointError

if TYPE_CHECKING:
    from conftest import Campaign, Tally

TOLERANCE = 2e-3  # the exact GELU against its tanh form, through layers
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
        "eps": draw.choice((1e-5, 1e-6, 1e-12, 0.0, 0.3, 1.0, 2.0, -1e-5)),
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


def _model(name: str, config: dict[str, Any], of: dict[str, Any]) -> Any:
    """Build what the configuration says; None: transformers itself cannot."""
    import transformers

    ids = {"bos_token_id": 5, "eos_token_id": 7}
    try:
        made = getattr(transformers, f"{name}Config")(
            vocab_size=of["vocab"], tie_word_embeddings=of["tied"], **ids, **config
        )
        head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        model = getattr(transformers, f"{name}{head}")(made).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(filling(key, tuple(parameter.shape))))
            model(torch.tensor([[11, 3]]))
    except (ValueError, RuntimeError, ZeroDivisionError, IndexError, TypeError, AssertionError):
        return None
    return model


def _fault(model: Any, source: Path, output: Path, draw: random.Random) -> tuple[str | None, bool]:
    """Say what is wrong, and whether it was served."""
    prompt = [draw.randrange(VOCABULARY_LEAST) for _ in range(draw.choice((2, 7, POSITIONS - 1)))]
    ids = {key: draw.choice((5, 90, 50256, -1, -7, None)) for key in ("bos_token_id", "eos_token_id")}
    change_json(source / "config.json", **ids)
    (source / "generation_config.json").unlink(missing_ok=True)
    try:
        with engine_of(source, output, ranks=draw.choice((1, 1, 2))) as engine:
            difference = np.abs(log_probs(engine, prompt) - log_probs_of(model, prompt)).max()
            return (None if difference < TOLERANCE else f"differs by {difference:.2g}"), True
    except CheckpointError:
        return None, False
    except Exception as error:  # whatever it is, it came too late
        return f"{type(error).__name__}: {error}", True


def test_exported_means_served(campaign: Campaign, tally: Tally, memory: Path) -> None:
    wanted, served = campaign.trials(14, 1400), 0
    for trial in range(wanted):
        draw = random.Random(trial)
        of = _common(draw)
        name, config = FAMILIES[trial % len(FAMILIES)](draw, of)
        model = _model(name, config, of)
        if model is None:
            continue
        folder = memory / "random model"
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder / "source")
        write_tokenizer(folder / "source")
        fault, is_served = _fault(model, folder / "source", folder / "out", draw)
        served += is_served
        tally.record(f"trial {trial}: {name} {config} {of}: {fault}" if fault else None)
    tally.check()
    assert served >= tally.tried // 5, f"only {served} of {tally.tried} were served: the rest proves little"
