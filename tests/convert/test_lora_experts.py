"""LoRA adapters of Megatron-Bridge on a mixture's experts: the merged weights, and PEFT's matrices of each expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.core_adapters import (
    APART,
    LEGACY,
    OUTER,
    SHARED,
    expert_products,
    write_bridge,
    write_expert_adapter,
)
from support.checkpoints.llama_adapters import ALPHA, RANK
from support.tiny_models.llama_models import save, saved, tensors
from support.tiny_models.peft_output import assert_holds

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.user_files import GivenFiles
from export_scripts.convert import convert
from handover.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "is_apart"),
    [
        ("mixtral", SHARED, 2, False),
        ("mixtral", APART, 1, True),
        ("qwen3_moe", LEGACY, 1, False),
        ("qwen3_moe", APART, 2, False),
        ("qwen3_moe", OUTER, 2, True),
    ],
)
def test_every_expert_has_its_own_sum(name: str, kind: str, ranks: int, is_apart: bool, tmp_path: Path) -> None:
    added = expert_products(name, kind)
    assert len(added) > 20 and all(value.std() > 0.05 for pair in added.values() for value in pair)
    model = write_bridge(tmp_path / "model", name, 1, None, is_apart)
    adapter = write_expert_adapter(tmp_path / "adapter", name, kind, ranks, added)
    wish: dict[str, Any] = {"weight_data_type": "fp32", "adapter": adapter}
    convert(ConvertArguments(model, tmp_path / "out", **wish, format="huggingface"))
    made = tensors(tmp_path / "out")
    for key, weight in saved(name).tensors.items():
        wanted = weight.double()
        if key in added:
            down, up = added[key]
            wanted = wanted + ALPHA / RANK * up.double() @ down.double()
        assert (made[key][: len(wanted)] - wanted).abs().max() < 1e-6, key
    convert(ConvertArguments(model, tmp_path / "peft", **wish, format="peft"))
    assert_holds(tmp_path / "peft", added)
    save(name, tmp_path / "base")
    convert(ConvertArguments(tmp_path / "base", tmp_path / "again", **wish, format="huggingface"))
    assert all(torch.equal(value, made[key][: len(value)]) for key, value in tensors(tmp_path / "again").items())


def test_a_rank_that_is_divided_by_a_tokens_experts(tmp_path: Path) -> None:
    """normalize_moe_lora: dim 4 and 2 experts a token are of rank 2, and the scale is alpha / 2."""
    added = expert_products("mixtral", APART, RANK // 2)
    model = write_bridge(tmp_path / "model", "mixtral", 1, None)
    adapter = write_expert_adapter(tmp_path / "adapter", "mixtral", APART, 1, added, normalize_moe_lora=True)
    wish: dict[str, Any] = {"weight_data_type": "fp32", "adapter": adapter, "format": "huggingface"}
    convert(ConvertArguments(model, tmp_path / "out", **wish))
    made = tensors(tmp_path / "out")
    for key, (down, up) in added.items():
        wanted = saved("mixtral").tensors[key].double() + ALPHA / (RANK // 2) * up.double() @ down.double()
        assert (made[key] - wanted).abs().max() < 1e-6, key
    plain = write_expert_adapter(tmp_path / "plain", "mixtral", APART, 1, added)
    with pytest.raises(CheckpointError, match="is of rank 2, and the configuration says 4"):
        open_source(find_archive(model, GivenFiles(adapter=plain)))


def test_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    added = {key: pair for key, pair in expert_products("mixtral", APART).items() if ".experts.3." not in key}
    model = write_bridge(tmp_path / "model", "mixtral", 1, None)
    adapter = write_expert_adapter(tmp_path / "adapter", "mixtral", APART, 1, added)
    assert isinstance(next(iter(added.values()))[0], torch.Tensor)
    with pytest.raises(CheckpointError, match="is not of 4 experts"):
        open_source(find_archive(model, GivenFiles(adapter=adapter)))
