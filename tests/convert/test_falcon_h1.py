"""Falcon-H1 of Megatron-Bridge: bytes and logits of transformers' model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.falcon_models import write_falcon
from support.checkpoints.hybrid_models import hybrid
from support.tiny_models.same_model import assert_same_model

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.errors import CheckpointError

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("name", "ranks", "dtype", "changes"),
    [
        ("falcon_h1", 1, BF16, {}),
        ("falcon_h1", 2, FP32, {}),
        ("falcon_h1_norm", 2, BF16, {}),
        ("falcon_h1_norm", 1, FP32, {"layernorm_zero_centered_gamma": True}),
    ],
)
def test_the_same_model_comes_out(
    name: str, ranks: int, dtype: torch.dtype, changes: dict[str, Any], tmp_path: Path
) -> None:
    """The norm within Mamba is stored as it is, where the others are stored less one."""

    source, out = hybrid(name, dtype), tmp_path / "out"
    path = write_falcon(tmp_path / "run", source, ranks, **changes)
    convert(ConvertArguments(path, out, weight_data_type="fp32" if dtype == FP32 else "bf16", format="huggingface"))
    assert_same_model(out, source)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"falconh1_ratio": 0.5}, r"falconh1_ratio: 0.5  \(every layer has all three blocks\)"),
        ({"use_attention": False}, r"use_attention: False  \(every layer has all"),
        ({"hybrid_override_pattern": "PM"}, r"hybrid_override_pattern: P  \("),
        ({"hybrid_mlp_ratio": 0.5}, "hybrid_layer_pattern must say"),
        ({"D_has_hdim": True}, "D_has_hdim: True"),
        ({"add_bias_linear": True}, r"add_bias_linear: True  \(its linear layers have no biases\)"),
        ({"position_embedding_type": "none"}, "position_embedding_type: none"),
        ({"ssm_multipliers": [1.0, 2.0]}, r"ssm_multipliers is \[1.0, 2.0\], not a list of 5 numbers"),
        ({"lm_head_multiplier": 0.0}, "lm_head_multiplier is 0.0, not a number above 0"),
        ({"residual_multiplier": 0.5}, "residual_multiplier: 0.5"),
        ({"layernorm_epsilon": 1e-3}, r"mamba.norm_eps: 1e-05  \(the other norms add 0.001\)"),
        ({"qk_layernorm": True}, "qk_norm|q_norm"),
        ({"activation_func": {"_target_": "torch.nn.functional.gelu", "_call_": False}}, "feed_forward.activation"),
        ({"rmsnorm": False}, r"mamba_mixer\.norm\.weight"),
    ],
)
def test_what_the_class_does_not_compute_is_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_falcon(tmp_path / "run", hybrid("falcon_h1_norm"), 1, **changes)
    with pytest.raises(CheckpointError, match=words):
        convert(ConvertArguments(path, tmp_path / "out", weight_data_type="fp32", format="huggingface"))
    assert not (tmp_path / "out").exists()


def test_multipliers_of_another_model_are_refused(tmp_path: Path) -> None:
    path = write_falcon(tmp_path / "run", hybrid("falcon_h1_norm"), 1, falconh1_ratio=None)
    with pytest.raises(CheckpointError, match=r"key_multiplier: 0.7  \(it multiplies nothing by a number\)"):
        convert(ConvertArguments(path, tmp_path / "out", weight_data_type="fp32", format="huggingface"))
