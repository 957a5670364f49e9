"""What a refusal says of a family that is not known: which known one is nearest, and what of it that one has not."""

from __future__ import annotations

from typing import Any

import pytest

import models
from models import ModelError
from models.nearest import nearest


@pytest.mark.parametrize(
    ("kind", "changes", "wanted"),
    [
        ("ArceeConfig", {"hidden_act": "relu2"}, "llama is nearest"),
        ("GraniteMoeConfig", {"num_local_experts": 4}, "granite is nearest, which has not .*num_local_experts: 4"),
        ("CohereConfig", {"logit_scale": 0.25}, "is nearest, which has not .*logit_scale: 0.25"),
        ("DeepseekV32Config", {}, "is nearest, which has not .*index_topk: 2048"),
    ],
)
def test_of_transformers_other_classes_one_is_nearest(kind: str, changes: dict[str, Any], wanted: str) -> None:
    import transformers

    config = getattr(transformers, kind)(**changes).to_dict()
    with pytest.raises(ModelError, match=wanted):
        models.find(f"my_{config['model_type']}", config)


_OWN = ["llama", "mistral", "nemotron", "gemma2", "granite", "smollm3", "exaone4", "mixtral", "olmoe", "starcoder2"]


@pytest.mark.parametrize("name", _OWN)
def test_a_known_architecture_under_another_name_is_nearest_to_itself(name: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[name]().to_dict()
    assert nearest({**config, "model_type": "other"}, models.ARCHITECTURES) == f"{name} is nearest, by its keys"


def test_what_is_no_decoder_is_near_to_none() -> None:
    assert nearest({"d_model": 3}, models.ARCHITECTURES) == ""
