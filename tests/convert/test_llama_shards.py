"""FasterTransformer's shards of Llama: the bytes of the community's own converters, from every form of NeMo."""

from __future__ import annotations

import configparser
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.llama_models import HIDDEN, VOCAB, save
from support.llama_sources import Case, write_source

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

FT: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/ft_llama_digests.json").read_text())["models"]
SOURCES = [
    Case("llama_mha", "legacy", 2, 2),
    Case("llama_mha", "legacy, two matrices", 4),
    Case("llama_mha", "Megatron-LM, legacy", 2),
    Case("llama", "core", 4, 2),
    Case("llama", "core, local"),
    Case("llama", "zarr", 4),
    Case("llama", "torch_dist", 2),
    Case("llama", "NeMo 2"),
    Case("llama", "NeMo 2, layers apart, gate and up apart", 2),
    Case("llama", "Megatron-LM", 2, 2),
    Case("llama", "Megatron-LM, torch_dist", 4),
]
FAMILIES = [
    Case("llama_linear", "core", 2),
    Case("llama31", "core", 1, 2),
    Case("llama32", "NeMo 2", 4),
    Case("mistral", "zarr", 2),
    Case("nemotron", "core", 4),
    Case("qwen2", "core", 2, 2),
    Case("qwen3", "NeMo 2", 2),
    Case("gemma", "NeMo 2", 2),
    Case("gemma2", "core", 4, 2),
    Case("starcoder2", "NeMo 2, layers apart", 2),
]
_WITH_VOCABULARY = ("model.wte.weight.bin", "model.lm_head.weight.bin")

_OF_THE_FORM = ("model_name", "model_variant", "vocab_size", "start_id", "end_id")


def assert_bytes_of_the_community(source: Path, folder: Path, name: str, case: str) -> None:
    """Compare all files of one rank count and type, and what their loader reads of the configuration.

    The rows with which training padded the vocabulary stay in FasterTransformer's files; they are not compared.
    """
    data_type, _, gpus = case.partition("/")
    root = folder / data_type / gpus
    convert(ConvertArguments(source, root, int(gpus.removesuffix("-gpu")), data_type))
    made = {path.name: path.read_bytes() for path in root.glob("*.bin")}
    rows = VOCAB * HIDDEN * (4 if data_type == "fp32" else 2)
    made |= {file: made[file][:rows] for file in _WITH_VOCABULARY}
    assert {file: hashlib.sha256(content).hexdigest() for file, content in made.items()} == FT[name][case]
    parser = configparser.ConfigParser()
    parser.read(root / "config.ini")
    ours, theirs = parser["llama"], FT[name]["config"][case]
    words = {"model_name", "weight_data_type", "vocab_size"}
    assert {key: float(ours[key]) for key in theirs if key not in words} == {
        key: float(value) for key, value in theirs.items() if key not in words
    }
    assert ours["weight_data_type"] == data_type
    assert (root / "model.wte.weight.bin").stat().st_size == int(ours["vocab_size"]) * rows // VOCAB


@pytest.mark.parametrize("name", FT)
def test_hugging_face(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "source")
    for case in FT[name]:
        if case != "config":
            assert_bytes_of_the_community(tmp_path / "source", tmp_path / "out", name, case)


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_every_form_of_nemo(source: Case, tmp_path: Path) -> None:
    path = write_source(source, tmp_path / "source")
    for case in ("fp32/1-gpu", "fp16/2-gpu", "bf16/4-gpu"):
        assert_bytes_of_the_community(path, tmp_path / "out", source.name, case)


@pytest.mark.parametrize("source", FAMILIES, ids=str)
def test_every_family_has_the_shards_of_its_hugging_face_form(source: Case, tmp_path: Path) -> None:
    """Those are compared with transformers' logits by test_convert_llama.py."""
    save(source.name, tmp_path / "hub")
    made = {}
    for form, path in (("hub", tmp_path / "hub"), ("nemo", write_source(source, tmp_path / "source"))):
        root = tmp_path / form / "2-gpu"
        convert(ConvertArguments(path, root, 2, "fp32"))
        made[form] = {path.name: path.read_bytes() for path in root.glob("*.bin")}
        rows = VOCAB * HIDDEN * 4
        made[form] |= {file: made[form][file][:rows] for file in _WITH_VOCABULARY}
        parser = configparser.ConfigParser()
        parser.read(root / "config.ini")
        made[form]["config.ini"] = {key: value for key, value in parser["llama"].items() if key not in _OF_THE_FORM}
    assert made["nemo"].pop("config.ini") == made["hub"].pop("config.ini")
    assert sorted(made["nemo"]) == sorted(made["hub"])
    assert [file for file, content in made["nemo"].items() if content != made["hub"][file]] == []
