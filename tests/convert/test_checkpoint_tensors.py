"""Mapped tensors against torch.load, the format's own reader."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints.nemo_archive import NEMO, torch_bytes

from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.checkpoints.files.pickled import StoredTensor
from export_scripts.checkpoints.files.torch_file import TorchFile
from export_scripts.checkpoints.files.torch_format import open_torch_file
from handover.errors import CheckpointError


def as_torch(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array.copy()).view(dtype)


@pytest.mark.parametrize(
    "name", ["gpt122_tp1_pp1", "gpt_tp2_pp1", "gpt_tp1_pp2", "gpt_spm", "gpt_untied", "gpt_O2_bf16"]
)
def test_every_tensor_inside_the_tar_is_what_torch_loads(name: str) -> None:
    archive = open_archive(NEMO / f"{name}.nemo")
    with tarfile.open(archive.path) as tar:
        members = {m.name[2:]: tar.extractfile(m).read() for m in tar if m.name.endswith(".ckpt")}  # type: ignore[union-attr]
    for member, content in members.items():
        file, expected = TorchFile(archive, member), torch.load(io.BytesIO(content), weights_only=True)
        assert list(file.state) == list(expected)
        for key, value in expected.items():
            if value is not None:
                assert torch.equal(as_torch(file.read(file.state[key]), value.dtype), value), key


def test_views_of_shared_storage_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.float32)
    state = {
        "transposed": base.reshape(6, 10).t(),
        "offset": base[7:19],
        "strided": base.reshape(6, 10)[1:5:2, ::3],
        "expanded": base[:3].unsqueeze(1).expand(3, 4),
        "parameter": torch.nn.Parameter(base.reshape(3, 20)),
        "scalar": base[5],
        "empty": base[:0],
    }
    (tmp_path / "w.ckpt").write_bytes(torch_bytes(state))
    file = TorchFile(open_archive(tmp_path), "w.ckpt")
    for key, value in state.items():
        assert file.read(file.state[key]).tolist() == value.tolist(), key


def test_plain_values_and_nested_state_dicts_are_read(tmp_path: Path) -> None:
    state = {"a._extra_state": None, "b._extra_state": b"\x00\xff\x80", "w": torch.ones(2)}
    (tmp_path / "w.ckpt").write_bytes(torch_bytes({"epoch": 3, "state_dict": state}))
    file = TorchFile(open_archive(tmp_path), "w.ckpt")
    assert file.state["a._extra_state"] is None
    assert file.state["b._extra_state"] == b"\x00\xff\x80"
    assert isinstance(file.state["w"], StoredTensor)


def test_reading_maps_the_archive_and_copies_nothing() -> None:
    file = TorchFile(open_archive(NEMO / "gpt122_tp1_pp1.nemo"), "model_weights.ckpt")
    array = file.read(file.state["model.language_model.embedding.word_embeddings.weight"])
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            assert line.endswith("gpt122_tp1_pp1.nemo")
            break
    else:
        pytest.fail("the array lies nowhere")
    assert not array.flags.writeable


def streamed(state: object, path: Path) -> Path:
    """Save as torch did before its zip."""
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def test_torchs_format_before_the_zip_is_mapped_as_torch_reads_it(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.float32)
    state = {
        "whole": base,
        "transposed": base.reshape(6, 10).t(),
        "strided": base.reshape(6, 10)[1:5:2, ::3],
        "half": torch.arange(7).half(),
        "bytes": torch.ones(3, dtype=torch.uint8),
        "double": torch.ones(3, dtype=torch.float64),
        "bfloat16": torch.arange(5).bfloat16(),
    }
    streamed(state, tmp_path / "w.ckpt")
    file = open_torch_file(open_archive(tmp_path), "w.ckpt")
    for key in ("whole", "transposed", "strided", "half"):
        assert file.read(file.state[key]).tolist() == state[key].tolist(), key
    assert torch.equal(as_torch(file.read(file.state["bfloat16"]), torch.bfloat16), state["bfloat16"])
    assert file.state["double"].storage.data_type == "fp64"


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.999])
def test_truncated_files_of_the_format_before_the_zip(keep: float, tmp_path: Path) -> None:
    file = streamed({"w": torch.ones(100), "v": torch.ones(10)}, tmp_path / "w.ckpt")
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    with pytest.raises(CheckpointError):
        open_torch_file(open_archive(tmp_path), "w.ckpt")


def test_flipped_bits_of_the_format_before_the_zip_never_read_elsewhere(tmp_path: Path) -> None:
    content = streamed({"w": torch.ones(4), "v": torch.ones(2)}, tmp_path / "w.ckpt").read_bytes()
    for position in np.random.default_rng(0).integers(0, len(content) * 8, 150):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        (tmp_path / "w.ckpt").write_bytes(damaged)
        try:
            file = open_torch_file(open_archive(tmp_path), "w.ckpt")
        except CheckpointError:
            continue
        for value in file.state.values():
            if isinstance(value, StoredTensor) and value.storage.data_type == "fp32":
                assert file.read(value).size * 4 <= len(content)
