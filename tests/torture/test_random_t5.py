"""Exported means served: random configurations of T5, mT5 and UMT5, with transformers as the judge.

As in ``test_random_models.py``; what is compared are the log probabilities of the tokens that the decoder is given.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.engines.asking import Tensors
from support.torture.random_models import EPSILONS, Candidate, build, try_models

from backends.fastertransformer.engine.engine import Engine

if TYPE_CHECKING:
    from support.torture.campaign import Campaign, Tally

VOCABULARY_LEAST, START, BEGUN = 91, 5, 6
KINDS = ("T5", "MT5", "T5", "MT5", "T5", "UMT5")
PLAIN = ("relu", "gelu", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "silu")
ACTIVATIONS = (*PLAIN, *(f"gated-{name}" for name in PLAIN))


def _config(draw: random.Random) -> dict[str, Any]:
    return {
        "d_model": draw.choice((1, 4, 6, 7, 8, 12)),
        "d_kv": draw.choice((1, 2, 3, 4, 8)),
        "num_heads": draw.choice((1, 2, 3, 4)),
        "d_ff": draw.choice((1, 4, 6, 9, 16)),
        "num_layers": draw.choice((1, 2, 3)),
        "num_decoder_layers": draw.choice((None, 1, 2, 3)),
        "relative_attention_num_buckets": draw.choice((2, 3, 4, 6, 7, 8, 10, 32, 64, 300)),
        "relative_attention_max_distance": draw.choice((*[128] * 7, 20)),
        "feed_forward_proj": draw.choice((*ACTIVATIONS, "tanh")),
        "layer_norm_epsilon": draw.choice((*[1e-6] * 8, *EPSILONS)),
        "vocab_size": draw.choice((91, 96, 97)),
        "tie_word_embeddings": draw.random() < 0.5,
        **({"scale_decoder_outputs": draw.random() < 0.5} if draw.random() < 0.5 else {}),
    }


def _ask(line: list[int]) -> tuple[list[int], list[int]]:
    """What the encoder is given, and what the decoder is."""
    return line[:-BEGUN], line[-BEGUN:]


def _log_probs(engine: Engine, line: list[int]) -> np.ndarray:
    source, begun = _ask(line)
    tensors: Tensors = {"input_ids": np.array([source], np.uint32), "decoder_input_ids": np.array([begun], np.uint32)}
    tensors["is_return_context_log_probs"] = np.array([[True]])
    numbers = {"sequence_length": len(source), "decoder_input_lengths": len(begun), "max_output_len": 1}
    tensors |= {name: np.array([[value]], np.uint32) for name, value in {**numbers, "start_id": START}.items()}
    outputs: Tensors = engine.generate([engine.parse(tensors)])[0]
    return outputs["context_log_probs"][0, : len(begun)]


def _log_probs_of(model: Any, line: list[int]) -> np.ndarray:
    source, begun = _ask(line)
    given = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([[START, *begun]])}
    with torch.no_grad():
        rows = model(**given).logits[0].log_softmax(-1)
    return np.array([rows[place, token] for place, token in enumerate(begun)])


def _draw_one(trial: int, draw: random.Random) -> Candidate:
    import transformers

    name, config = KINDS[trial % len(KINDS)], _config(draw)
    ids = {"pad_token_id": 0, "eos_token_id": 7, "decoder_start_token_id": START}

    def make() -> Any:
        made = getattr(transformers, f"{name}Config")(**config, **ids)
        return getattr(transformers, f"{name}ForConditionalGeneration")(made)

    probe = torch.arange(40)[None]
    model = build(make, input_ids=probe, decoder_input_ids=probe)
    prompt = [draw.randrange(VOCABULARY_LEAST) for _ in range(BEGUN + draw.choice((1, 2, 9, 150)))]
    return Candidate(f"{name} {config}", model, tuple(ids), prompt, _log_probs, _log_probs_of)


@pytest.mark.timeout(3600)
def test_an_exported_t5_means_a_served_one(campaign: Campaign, tally: Tally, memory: Path) -> None:
    try_models(campaign.trials(12, 600), tally, memory, _draw_one)
