"""Every Llama-like model that NeMo published a configuration of: both targets compute what NeMo computes.

``tests/with_nemo_configs`` does the same with the files themselves, where they lie on this machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models.published_configs import assert_both_targets_compute_what_nemo_computes, scaled

TABLE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/nemo_published.json").read_text())
# What no tensor of a tiny model depends on: models that differ in these alone are converted once.
_ALIKE = ("encoder_seq_length", "max_position_embeddings", "virtual_pipeline_model_parallel_size", "megatron_amp_O2")


def settings(name: str) -> dict[str, Any]:
    row = dict(TABLE["models"][name])
    absent = row.pop("without", ())
    return {**{key: value for key, value in TABLE["every"].items() if key not in absent}, "mcore_gpt": True, **row}


def different() -> list[str]:
    found: dict[str, str] = {}
    for name in TABLE["models"]:
        config = {key: value for key, value in scaled(settings(name)).items() if key not in _ALIKE}
        found.setdefault(json.dumps(config, sort_keys=True), name)
    return list(found.values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", different())
def test_a_tiny_model_under_it(name: str, tmp_path: Path) -> None:
    assert_both_targets_compute_what_nemo_computes(settings(name), tmp_path)
