"""FasterTransformer's shards of Llama: the bytes of the community's own converters, from every form of NeMo."""

from __future__ import annotations

import configparser
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.llama_sources import Case, write_source
from support.tiny_models.llama_models import HIDDEN, VOCAB, save

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

FT: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/ft_llama_digests.json").read_text())["models"]
KEYS = {
    *("model_name", "head_num", "kv_head_num", "size_per_head", "inter_size", "num_layer", "rotary_embedding"),
    *("layernorm_eps", "vocab_size", "start_id", "end_id", "weight_data_type", "rope_theta", "rope_scaling_factor"),
    *("max_pos_seq_len", "tensor_para_size"),
}
"""Those that the community's loaders and converters have."""
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
_WITH_VOCABULARY = ("model.wte.weight.bin", "model.lm_head.weight.bin")


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
    assert ours.keys() <= KEYS
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
