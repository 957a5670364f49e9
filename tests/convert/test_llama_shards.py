"""FasterTransformer's shards of Llama: the bytes of the community's own converters."""

from __future__ import annotations

import configparser
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.llama_models import save

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

FT: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/ft_llama_digests.json").read_text())["models"]


def assert_bytes_of_the_community(source: Path, folder: Path, name: str, case: str) -> None:
    """Compare all files of one rank count and type, and what their loader reads of the configuration."""
    data_type, _, gpus = case.partition("/")
    root = folder / data_type / gpus
    convert(ConvertArguments(source, root, int(gpus.removesuffix("-gpu")), data_type))
    made = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in root.glob("*.bin")}
    assert made == FT[name][case]
    parser = configparser.ConfigParser()
    parser.read(root / "config.ini")
    ours = parser["llama"]
    expected = {key: value for key, value in FT[name]["config"][case].items() if key != "model_name"}
    assert {key: float(ours[key]) for key in expected if key != "weight_data_type"} == {
        key: float(value) for key, value in expected.items() if key != "weight_data_type"
    }
    assert ours["weight_data_type"] == data_type


@pytest.mark.parametrize("name", FT)
def test_hugging_face(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "source")
    for case in FT[name]:
        if case != "config":
            assert_bytes_of_the_community(tmp_path / "source", tmp_path / "out", name, case)
