"""A checkpoint in another's place is noticed, also where its size and time of modification are the same."""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints.nemo_archive import gpt_state, write_gpt

from handover import identity
from handover.identity import files_of, identify


def put_in_place(path: Path, other: Path) -> None:
    """Replace a file by another of the same size, with the first one's time of modification."""
    was = path.stat()
    assert other.stat().st_size == was.st_size
    os.utime(other, ns=(was.st_atime_ns, was.st_mtime_ns))
    os.replace(other, path)


def nemo(path: Path, scale: float) -> None:
    write_gpt(path, {name: tensor if tensor is None else tensor * scale for name, tensor in gpt_state().items()})


def safetensors(path: Path, scale: float) -> None:
    save_file({"a.weight": torch.full((512, 512), scale), "b.weight": torch.ones(2048, 512)}, path)


def one_tensor_of_many(path: Path, scale: float) -> None:
    """A torch file of 8 MB of which one number in the middle differs: its record's checksum does too."""
    state = {f"layers.{number}.weight": torch.ones(1000, 100) for number in range(20)}
    state["layers.10.weight"][500, 50] = scale
    torch.save(state, path)


def two_members(path: Path, scale: float) -> None:
    """A tar of 8 MB whose first member, of two ranks' files, has another number in its middle."""
    folder = path.with_suffix(".folder")
    folder.mkdir()
    with tarfile.open(path, "w") as tar:
        for rank in (0, 1):
            one_tensor_of_many(folder / f"mp_rank_0{rank}.ckpt", scale if rank == 0 else 1.0)
            os.utime(folder / f"mp_rank_0{rank}.ckpt", (1, 1))
            tar.add(folder / f"mp_rank_0{rank}.ckpt", f"mp_rank_0{rank}.ckpt")
    shutil.rmtree(folder)


def gzipped(path: Path, scale: float) -> None:
    torch.manual_seed(0)
    content = torch.rand(1_000_000).numpy().tobytes()
    path.write_bytes(gzip.compress(content[:-4] + torch.tensor([scale]).numpy().tobytes(), 0, mtime=0))


FORMATS = [nemo, safetensors, one_tensor_of_many, two_members, gzipped]


@pytest.mark.parametrize("write", FORMATS)
def test_a_checkpoint_of_the_same_size_and_time_is_another(
    write: Callable[[Path, float], None], tmp_path: Path
) -> None:
    path, other = tmp_path / "checkpoint", tmp_path / "elsewhere" / "checkpoint"
    other.parent.mkdir()
    write(path, 1.0)
    write(other, 2.0)
    before = identify(files_of(path))
    put_in_place(path, other)
    assert identify(files_of(path)) != before


@pytest.mark.parametrize("write", FORMATS)
def test_what_is_read_of_a_file_tells_two_models_apart(write: Callable[[Path, float], None], tmp_path: Path) -> None:
    """For file systems whose inodes and times of change say nothing."""
    samples = []
    for scale in (1.0, 1.0, 2.0):
        write(tmp_path / "checkpoint", scale)
        samples.append(list(identity._samples(tmp_path / "checkpoint", 1 << 20)))
        assert sum(map(len, samples[-1])) <= 2 << 20
    assert samples[0] == samples[1] != samples[2]


def test_a_directory_is_known_by_every_file_and_not_by_its_own_place(tmp_path: Path) -> None:
    root = tmp_path / "zarr"
    (root / "layers").mkdir(parents=True)
    for number in range(1000):
        (root / "layers" / f"{number}.0").write_bytes(number.to_bytes(4, "big"))
    before = identify(files_of(root))
    root = root.rename(tmp_path / "moved")
    assert identify(files_of(root)) == before
    twin = root / "twin"
    twin.write_bytes(bytes(4))
    put_in_place(root / "layers" / "501.0", twin)
    assert identify(files_of(root)) != before


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert identify({"": tmp_path / "pipe"}).startswith("sha256:")


def test_a_tar_that_lies_about_sizes_is_read_to_its_end_and_no_further(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT)
    for size in (b"7" * 11 + b"\0", b"\xff" * 12, b"\x80" + b"\xff" * 11, b"not octal!!\0"):
        (tmp_path / "bad.tar").write_bytes(header[:124] + size + header[136:] + bytes(512))
        assert identify(files_of(tmp_path / "bad.tar")).startswith("sha256:")
