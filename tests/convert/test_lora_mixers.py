"""LoRA adapters of Megatron-Bridge on layers with states: the merged weights, and PEFT's matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import core_delta_rule, falcon_models, hybrid_models
from support.checkpoints.hybrid_models import hybrid
from support.checkpoints.llama_adapters import ALPHA, RANK
from support.checkpoints.llama_files import ChunkedArray, write_torch_dist
from support.checkpoints.mixer_adapters import products, write_adapter
from support.tiny_models.llama_models import save, tensors
from support.tiny_models.peft_output import assert_holds

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.user_files import GivenFiles
from export_scripts.convert import convert
from handover.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WRITERS: dict[str, tuple[Callable[..., Path], tuple[str, ...]]] = {
    "nemotron_h": (hybrid_models.write_bridge, ("in_proj", "out_proj")),
    "nemotron3_latent": (hybrid_models.write_bridge, ("in_proj", "out_proj", "fc1_latent_proj", "fc2_latent_proj")),
    "falcon_h1": (falcon_models.write_falcon, ("in_proj", "out_proj")),
    "qwen3_next": (core_delta_rule.write_bridge, ("out_proj",)),
}


_CASES = [
    ("nemotron3_latent", 2),
    ("falcon_h1", 2),
    ("qwen3_next", 2),
    pytest.param("nemotron_h", 1, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "ranks"), _CASES)
def test_weights_have_the_sums_on_the_trainings_model_and_on_the_hubs(name: str, ranks: int, tmp_path: Path) -> None:
    source, (write, words) = hybrid(name), WRITERS[name]
    added, model = products(source, words), write(tmp_path / "model", source, 1)
    wish: dict[str, Any] = {"weight_data_type": "fp32"}
    wish["adapter"] = write_adapter(tmp_path / "adapter", model, source, ranks, added)
    save(name, tmp_path / "base")
    for number, base in enumerate((model, tmp_path / "base")):
        convert(ConvertArguments(base, tmp_path / f"out{number}", **wish, format="huggingface"))
        made, own = tensors(tmp_path / f"out{number}"), source.tensors if number == 0 else tensors(tmp_path / "base")
        for key, weight in own.items():
            wanted = weight.double()
            if key in added:
                down, up = added[key]
                wanted = wanted + ALPHA / RANK * up.double() @ down.double()
            assert (made[key][: len(wanted)] - wanted).abs().max() < 1e-6, key
        convert(ConvertArguments(base, tmp_path / f"peft{number}", **wish, format="peft"))
        held = {key.replace("backbone.", "model."): pair for key, pair in added.items()}
        assert_holds(tmp_path / f"peft{number}", held)


def spoilt(case: str, folder: Path) -> None:
    """Write the adapter's arrays of one layer again, changed."""
    made = {"decoder.layers.0.mixer.in_proj.adapter.linear_in.weight": torch.ones(RANK, 64)}
    rows = {"z": 32, "x": 32, "B": 12, "C": 12, "dt": 8}
    made |= {
        f"decoder.layers.0.mixer.in_proj.adapter.linear_out.weight.{section}": torch.ones(count, RANK)
        for section, count in rows.items()
    }
    if case == "a section is missing":
        del made["decoder.layers.0.mixer.in_proj.adapter.linear_out.weight.B"]
    elif case == "sections lie in one":
        made = {key: each for key, each in made.items() if "linear_in" in key}
        made["decoder.layers.0.mixer.in_proj.adapter.linear_out.weight"] = torch.ones(sum(rows.values()), RANK)
    elif case == "a section of another size":
        made["decoder.layers.0.mixer.in_proj.adapter.linear_out.weight.C"] = torch.ones(6, RANK)
    for left in folder.glob("*.distcp"):
        left.unlink()
    arrays = {key: ChunkedArray(tuple(each.shape), [((0, 0), each)]) for key, each in made.items()}
    write_torch_dist(folder, arrays, prefix="", common={"iteration": 7, "content_metadata": {}})


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a section is missing", "in_proj.adapter.linear_out.weight  missing beside"),
        ("sections lie in one", r"linear_out.weight is no part of a LoRA adapter that is read"),
        ("a section of another size", "does not fit|not rows of"),
    ],
)
@pytest.mark.parametrize("base", [pytest.param("Bridge", marks=pytest.mark.long), "hub"])
def test_sections_that_do_not_fit_are_named(case: str, words: str, base: str, tmp_path: Path) -> None:
    source = hybrid("nemotron_h")
    model = hybrid_models.write_bridge(tmp_path / "model", source, 1)
    adapter = write_adapter(tmp_path / "adapter", model, source, 1, products(source))
    spoilt(case, adapter / "iter_0000007")
    if base == "hub":
        save("nemotron_h", model := tmp_path / "base")
    with pytest.raises(CheckpointError, match=words):
        open_source(find_archive(model, GivenFiles(adapter=adapter)))
