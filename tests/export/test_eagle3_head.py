"""An EAGLE-3 head in a model repository: linked, proved before serving, and refused where it does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.engines.own_drafts import check_repository
from support.tiny_models.eagle_heads import RIGHT, SHARED, SPECULATORS, save_with_head
from support.tiny_models.huggingface_models import write_tokenizer

from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from handover.errors import ArtefactError, ConfigError
from handover.manifest import Manifest


def exported(folder: Path, form: str = "huggingface", **said: Any) -> tuple[Any, ExportArguments]:
    model, _ = save_with_head(folder / "source", folder / "head", **said)
    write_tokenizer(folder / "source")
    convert(ConvertArguments(folder / "source", folder / "model", weight_data_type="fp32", format=form))
    served = ExportArguments(folder / "model", folder / "repository", "mine", 1, 1, "fp32", 0, 0, 8)
    return model, replace(served, speculation="eagle3", draft_model=folder / "head")


def test_it_is_linked_and_served(tmp_path: Path) -> None:
    model, arguments = exported(tmp_path, layout=SPECULATORS, **RIGHT)
    assert build_repository(arguments).problems(arguments.output) == []
    assert Manifest.read(arguments.output).made_from["draft_model"] == str(tmp_path / "head")
    (held,) = arguments.output.glob("fastertransformer/1/*/draft")
    assert {each.name for each in held.iterdir()} == {"config.json", "model.safetensors"}
    assert (held / "model.safetensors").samefile(tmp_path / "head/model.safetensors")
    check_repository(arguments.output, model, "an EAGLE-3 head")


def test_one_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    _, arguments = exported(tmp_path, changes={"hidden_size": 32}, without=("fc.weight",))
    with pytest.raises(ConfigError, match="one needs the other"):
        replace(arguments, draft_model=None)
    for changed, problem in (
        (arguments, r"hidden_size: 32  \(the model's width is 64\)\n  fc.weight: missing"),
        (replace(arguments, pipeline_para_size=2), "speculation eagle3 with 2 pipeline stages"),
    ):
        with pytest.raises(ArtefactError, match=problem):
            build_repository(changed)
        assert not arguments.output.exists()


def damage_config(head: Path, **said: Any) -> None:
    file = head / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))


def lead_outside(head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"][-1] = 10_000
    save_file(tensors, head / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda head: damage_config(head, quantization_config={"quant_method": "fp8"}), "served as fp32, fp16 or bf16"),
        (lambda head: damage_config(head, eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state: False"),
        (lead_outside, r"d2t: leads to token \d+  \(the model has"),
    ],
)
def test_what_a_head_cannot_be_is_said(tmp_path: Path, damage: Callable[[Path], None], problem: str) -> None:
    _, arguments = exported(tmp_path)
    damage(tmp_path / "head")
    with pytest.raises(ArtefactError, match=problem):
        build_repository(arguments)
    assert not arguments.output.exists()


def test_a_head_that_was_changed_after_export_is_named(tmp_path: Path) -> None:
    _, arguments = exported(tmp_path)
    manifest = build_repository(arguments)
    (held,) = arguments.output.glob("fastertransformer/1/*/draft/model.safetensors")
    content = bytearray(held.read_bytes())
    content[-1] ^= 1
    held.unlink()  # it is a link to the head's own file
    held.write_bytes(content)
    assert any("draft/model.safetensors" in each for each in manifest.problems(arguments.output))


def test_the_models_head_that_ranks_share_is_refused(tmp_path: Path) -> None:
    _, arguments = exported(tmp_path, **SHARED)
    with pytest.raises(ArtefactError, match="lm_head.weight: missing, and 2 ranks share the model's"):
        build_repository(replace(arguments, tensor_para_size=2))


def test_shards_which_have_none_are_refused(tmp_path: Path) -> None:
    _, arguments = exported(tmp_path, "fastertransformer")
    with pytest.raises(ArtefactError, match="eagle3 with FasterTransformer's shards"):
        build_repository(arguments)
    assert not arguments.output.exists()
