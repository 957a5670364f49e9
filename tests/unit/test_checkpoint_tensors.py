"""Mapped tensors against torch.load, the format's own reader."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from nemo_archive import NEMO, torch_bytes

from export_scripts.checkpoints.archive import open_archive
from export_scripts.checkpoints.pickled import StoredTensor
from export_scripts.checkpoints.torch_file import TorchFile


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
