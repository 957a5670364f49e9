"""How angles are scaled, against transformers' own functions: frequencies, attention factor, and keys both ways."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from support.tiny_models.drawn_models import scaled_rope

import models
from models import ModelError
from models.blocks.rotary import Rotary

DRAWS = 40
_KINDS = ["linear", "dynamic", "llama3", "yarn", "longrope"]


def config_with(rope: dict[str, Any], theta: float, longest: int, size: int) -> dict[str, Any]:
    sizes = {"hidden_size": 2 * size, "num_attention_heads": 2, "head_dim": size, "num_hidden_layers": 1}
    more = {"vocab_size": 9, "intermediate_size": 5, "max_position_embeddings": longest, "rope_theta": theta}
    return {"model_type": "llama", **sizes, **more, "rope_scaling": rope}


def transformers_of(values: dict[str, Any], seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig.from_dict(copy.deepcopy(values))
    kind = config.rope_parameters["rope_type"]
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)  # type: ignore[no-any-return]


def rotary_of(values: dict[str, Any]) -> Rotary:
    rotary = models.find("llama").read(values).layers[0].rotary
    assert rotary
    return rotary


@pytest.mark.parametrize("kind", _KINDS)
def test_frequencies_and_factors_are_those_of_transformers(kind: str) -> None:
    for seed in range(DRAWS):
        rng = random.Random(f"{kind} {seed}")
        size, longest = rng.choice([8, 16, 64, 128]), rng.choice([96, 4096, 131072])
        values = config_with(scaled_rope(rng, kind, size), rng.choice([500.0, 1e4, 1e6]), longest, size)
        rotary = rotary_of(values)
        frequencies, factor = transformers_of(values)
        torch.testing.assert_close(torch.tensor(rotary.frequencies()), frequencies, rtol=2e-6, atol=0)
        assert rotary.attention_factor(longest) == pytest.approx(factor, rel=1e-12)
        written = models.find("llama").write(models.find("llama").read(values)) | {"model_type": "llama"}
        for length in (None, 10 * longest):  # what depends on a text's length does so in what is written
            expected, found = transformers_of(values, length), transformers_of(written, length)
            assert torch.equal(found[0], expected[0])
            assert found[1] == expected[1]


def test_what_no_rotation_can_have_is_refused_by_key() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    long = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for rope, theta, problem in (
        ({**yarn, "factor": 0}, 1e4, "rope_scaling: factor is 0, not a number above 0"),
        ({key: yarn[key] for key in yarn if key != "factor"}, 1e4, "rope_scaling: factor is None"),
        ({**yarn, "original_max_position_embeddings": None}, 1e4, "original_max_position_embeddings is None"),
        (yarn, 0.5, "yarn: its base is above 1"),
        ({**long, "long_factor": [1.0]}, 1e4, "longrope: short_factor and long_factor list 4 and 1 waves of 4"),
        ({**long, "short_factor": 3}, 1e4, "short_factor is 3, not a list of numbers above 0"),
        ({"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}, 1e4, "above high_freq"),
    ):
        with pytest.raises(ModelError, match=problem):
            rotary_of(config_with(rope, theta, 256, 8))
