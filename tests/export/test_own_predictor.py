"""Speculation by the model's own predictor in a model repository: written, served, and refused where there is none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.engines.own_drafts import check_repository
from support.tiny_models.huggingface_models import write_tokenizer
from support.tiny_models.llama_models import save
from support.tiny_models.predicting_models import never_wrong, save_predicting

from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from handover.errors import ArtefactError


def exported(folder: Path, form: str = "huggingface") -> ExportArguments:
    write_tokenizer(folder / "source")
    convert(ConvertArguments(folder / "source", folder / "model", weight_data_type="fp32", format=form))
    served = ExportArguments(folder / "model", folder / "repository", "mine", 1, 1, "fp32", 0, 0, 8)
    return replace(served, speculation="mtp")


@pytest.mark.parametrize(("name", "one"), [("glm4_moe", 1.0), ("qwen3_5", 0.0)])
def test_it_is_written_and_served(name: str, one: float, tmp_path: Path) -> None:
    model, _ = save_predicting(name, tmp_path / "source", partial(never_wrong, one=one))
    arguments = exported(tmp_path)
    assert build_repository(arguments).problems(arguments.output) == []
    check_repository(arguments.output, model, "a predictor of further tokens")


def test_shards_which_have_none_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path / "source")
    arguments = exported(tmp_path, "fastertransformer")
    with pytest.raises(ArtefactError, match="no layer that predicts further tokens"):
        build_repository(arguments)
    assert not arguments.output.exists()


def test_one_whose_tensors_are_not_there_is_refused(tmp_path: Path) -> None:
    save("glm4_moe", tmp_path / "source")
    arguments = exported(tmp_path)
    about = tmp_path / "model/config.json"
    key = '"num_nextn_predict_layers": '
    about.write_text(about.read_text().replace(f"{key}0", f"{key}1"))
    with pytest.raises(ArtefactError, match="eh_proj.weight: missing"):
        build_repository(arguments)
