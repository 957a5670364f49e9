"""What Falcon-H1's keys cannot be, and which architectures have multipliers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.tiny_models.drawn_models import drawn

import models
from models import ModelError
from models.blocks.multipliers import Multipliers

FALCON = models.find("falcon_h1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers has 4 numbers, not 5"),
        ({"mlp_multipliers": 2.0}, "mlp_multipliers is 2.0, not a list"),
        ({"mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers is 0.0, not a number above 0"),
        ({"key_multiplier": None}, "key_multiplier is None, not a number"),
        ({"mamba_n_heads": 5, "mamba_d_head": 3, "mamba_d_ssm": 16}, "mamba_n_heads 5 times mamba_d_head 3 is not 16"),
        ({"mamba_proj_bias": True, "projectors_bias": False}, r"mamba_proj_bias: True  \(projectors_bias is False"),
        ({"hidden_act": "gelu"}, r"hidden_act: gelu  \(it is silu\)"),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit: \[0.001, 0.1\]  \(dt has no bounds\)"),
    ],
)
def test_what_the_class_does_not_compute_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        FALCON.read({**drawn("falcon_h1", 0), **changes})


def test_transformers_own_words_for_no_bounds_are_read() -> None:
    """What the class keeps, and what it saves."""
    for said in ((0.0, float("inf")), [0.0, {"__float__": "Infinity"}]):
        assert FALCON.read({**drawn("falcon_h1", 0), "time_step_limit": said}).mamba is not None


def test_a_model_with_multipliers_is_no_other() -> None:
    llama = models.find("llama").read(drawn("llama", 0))
    scaled = replace(llama, multipliers=Multipliers(key=0.5))
    assert models.find("llama").lacks(replace(llama, multipliers=Multipliers())) == []
    assert models.find("llama").lacks(scaled) == ["multipliers.key: 0.5  (llama has 1.0)"]
    falcon = FALCON.read(drawn("falcon_h1", 0))
    assert any("+" in line for line in models.find("nemotron_h").lacks(replace(falcon, model_type="")))
    lacking = FALCON.lacks(replace(llama, model_type="", mamba=falcon.mamba, multipliers=Multipliers()))
    assert any(line.startswith("layers.blocks: attention+feed_forward  (") for line in lacking)
