"""What can damage a conversion: each is one clear error, never a finished checkpoint that differs from the good one."""

from __future__ import annotations

import gzip
import hashlib
import io
import random
import shutil
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.nemo_archive import TOKENIZER, gpt_config, gpt_state, torch_bytes, write_gpt, write_nemo

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.conversion.write import shards
from export_scripts.conversion.write.journal import FILE_NAME as JOURNAL
from export_scripts.conversion.write.shard_file import ShardFile, full_disk_explained
from export_scripts.convert import convert
from export_scripts.tensors.mapped import Reader, map_record
from handover.errors import ArtefactError, CheckpointError, SlipwayError
from handover.manifest import FILE_NAME, Manifest

QKV = "model.language_model.encoder.layers.1.self_attention.query_key_value.weight"


def shard_bytes(root: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in root.iterdir() if p.name != FILE_NAME}


def test_damaged_weights_never_become_other_shards(tmp_path: Path) -> None:
    """Cut the archive anywhere, or flip bits anywhere in the file of weights: refused, or the good archive's shards.

    The other files in an archive, its configuration and its vocabulary, have no checksum that could tell.
    """
    archive = write_gpt(tmp_path / "gpt.nemo")
    convert(ConvertArguments(archive, tmp_path / "good", 2, "fp16"))
    good, content = shard_bytes(tmp_path / "good"), archive.read_bytes()
    with tarfile.open(archive) as tar:
        weights = tar.getmember("./model_weights.ckpt")
    rng, refused = random.Random(0), 0
    for number in range(30):
        damaged = bytearray(content)
        if number % 3 == 0:
            del damaged[rng.randrange(len(damaged) - 1024) :]
        for _ in range(number % 3):
            damaged[weights.offset_data + rng.randrange(weights.size)] ^= 1 << rng.randrange(8)
        archive.write_bytes(damaged)
        output = tmp_path / f"out{number}"
        try:
            convert(ConvertArguments(archive, output, 2, "fp16"))
        except SlipwayError:
            assert not (output / FILE_NAME).exists()
            refused += 1
        else:
            assert shard_bytes(output) == good, f"damage {number} went through"
    assert refused > 20


def flipped(archive: Path, values: torch.Tensor) -> None:
    """Flip the lowest bit of one weight, in place."""
    content = bytearray(archive.read_bytes())
    at = bytes(content).index(values.numpy().tobytes())
    content[at + 100 * values.element_size()] ^= 1
    archive.write_bytes(content)


@pytest.mark.parametrize("read_bytes", [32 << 20, 2048], ids=["at once", "in columns, and once more in order"])
def test_a_flipped_bit_of_a_weight_is_found_by_the_archives_checksum(
    read_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "READ_BYTES", read_bytes)
    archive, output = write_gpt(tmp_path / "gpt.nemo"), tmp_path / "out"
    flipped(archive, gpt_state()[QKV])
    for _ in range(2):  # and the run that continues finds it again
        with pytest.raises(CheckpointError, match=r"gpt.nemo is damaged: its bytes \d+ to \d+ have the checksum"):
            convert(ConvertArguments(archive, output, 2, "fp16"))
        assert not list(output.glob("model.layers.1.attention.query_key_value.weight*"))


def test_files_that_torch_saved_without_checksums_are_converted(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        archive = write_gpt(tmp_path / "plain.nemo")
    finally:
        torch.serialization.set_crc32_options(True)
    convert(ConvertArguments(archive, tmp_path / "out", 2, "fp16"))
    convert(ConvertArguments(write_gpt(tmp_path / "gpt.nemo"), tmp_path / "good", 2, "fp16"))
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "good")


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(100_000))
    record = map_record(path, 0, 100_000)
    path.write_bytes(bytes(50_000))
    with pytest.raises(CheckpointError, match="weights ends at byte 50000, while it is read"):
        Reader(1 << 20, set()).read(record.reshape(100, 1000).T)
    with pytest.raises(CheckpointError, match="cannot read"):
        map_record(path, 0, 100_000)


def test_a_read_error_names_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write_gpt(tmp_path / "gpt.nemo")

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("export_scripts.tensors.mapped.os.preadv", broken)
    with pytest.raises(CheckpointError, match=r"model\..*: cannot read .*gpt.nemo at byte \d+: .*Input/output error"):
        convert(ConvertArguments(archive, tmp_path / "out", 2, "fp16"))


def test_views_of_any_kind_are_read_as_they_are_mapped(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 255, 4 * 6 * 10 * 8, np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(b"head" + values.tobytes())
    mapped = map_record(path, 4, values.size).view("<u2").reshape(4, 6, 10, 4)
    for view in (
        mapped,
        mapped.T,
        mapped[1],
        mapped[:, 2:3, ::5],
        mapped[..., 1],
        mapped[::3, :, 4],
        mapped[2, 3, 4, 1:2],
    ):
        for shown in (view, np.broadcast_to(view[None], (3, *view.shape))):
            assert (Reader(1 << 16, set()).read(shown) == shown).all()
            assert (Reader(16, set()).read(shown) == shown).all(), "more than the buffer holds"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_what_is_no_number_is_refused_unless_it_is_allowed(bad: float, dtype: torch.dtype, tmp_path: Path) -> None:
    state = gpt_state(dtype)
    state[QKV][3, 5] = bad
    archive = write_gpt(tmp_path / "gpt.nemo", state)
    arguments = ConvertArguments(archive, tmp_path / "out", 1, "fp16")
    name = "model.layers.1.attention.query_key_value.weight"
    with pytest.raises(CheckpointError, match=f"{name} holds 1 values that are NaN or infinite, the first") as error:
        convert(arguments)
    # Row 3 is the first head's key, its second element; FasterTransformer's axes are [hidden, 3, head, element].
    assert "the first at [5, 1, 0, 1]" in error.value.problem
    assert "allow_nonfinite" in error.value.hint
    assert not (tmp_path / "out" / FILE_NAME).exists()

    convert(ConvertArguments(archive, tmp_path / "out", 1, "fp16", allow_nonfinite=True))
    values = np.fromfile(tmp_path / "out" / f"{name}.0.bin", np.float16)
    assert int((~np.isfinite(values)).sum()) == 1


def test_the_check_before_a_conversion_reads_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a login node; of a large model it would take minutes."""
    state = gpt_state()
    state[QKV][4, 5] = 1e5
    archive = write_gpt(tmp_path / "gpt.nemo", state)
    monkeypatch.setattr(Reader, "read", lambda *_: pytest.fail("a weight is read"))
    assert vars(inspect_source(archive, 1, "fp16").dims)["num_layer"] == 2


def test_overflow_is_refused_although_infinity_is_allowed(tmp_path: Path) -> None:
    state = gpt_state()
    state[QKV][3, 5], state[QKV][4, 5] = float("inf"), 1e5
    archive = write_gpt(tmp_path / "gpt.nemo", state)
    with pytest.raises(
        CheckpointError, match="query_key_value.weight overflows fp16: its largest magnitude is 1e\\+05"
    ):
        convert(ConvertArguments(archive, tmp_path / "out", 1, "fp16", allow_nonfinite=True))


def test_a_disk_that_fills_in_the_middle_is_one_error_and_the_next_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, output = write_gpt(tmp_path / "gpt.nemo"), tmp_path / "out"
    write, left = ShardFile.write, iter(range(20))

    def filling(self: ShardFile, values: Any) -> None:
        if next(left, None) is None:
            with full_disk_explained(self._path):
                raise OSError(28, "No space left on device")
        write(self, values)

    with monkeypatch.context() as patched:
        patched.setattr(ShardFile, "write", filling)
        with pytest.raises(ArtefactError, match="the disk is full: model.* could not be written") as error:
            convert(ConvertArguments(archive, output, 2, "fp16"))
    assert "continues" in error.value.hint
    finished = {p.name: p.stat().st_mtime_ns for p in output.glob("*.bin")}
    assert finished
    convert(ConvertArguments(archive, output, 2, "fp16"))
    assert {name: (output / name).stat().st_mtime_ns for name in finished} == finished
    assert Manifest.read(output).problems(output) == []


def test_a_gzipped_archive_needs_room_for_what_it_holds_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are unpacked beside the shards: what cannot end is not begun."""
    archive = write_nemo(tmp_path / "gpt.nemo", gpt_config(), {"model_weights.ckpt": gpt_state()}, mode="w:gz")
    room = SimpleNamespace(free=(16 << 20) + 15_000)  # the shards have 5 KB, the archive holds 15 KB
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    with pytest.raises(ArtefactError, match="free and .* are needed"):
        convert(ConvertArguments(archive, tmp_path / "out", 1, "fp32"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [JOURNAL]
    room.free += 10_000
    convert(ConvertArguments(archive, tmp_path / "out", 1, "fp32"))


def test_gzip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """A tar whose one member declares 4 TB, of which a few KB are there."""
    member = tarfile.TarInfo("model_weights.ckpt")
    member.size = 4 << 40
    path = tmp_path / "bomb.nemo"
    path.write_bytes(gzip.compress(member.tobuf(tarfile.GNU_FORMAT) + bytes(4096)))
    with pytest.raises(CheckpointError, match="would unpack to more than 50 times its size: 'model_weights.ckpt'"):
        inspect_source(path, 1, "fp16")


def test_compressed_record_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    source, target = zipfile.ZipFile(io.BytesIO(torch_bytes(gpt_state()))), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for info in source.infolist():
            packed.writestr(info.filename, source.read(info))
    files = {**TOKENIZER, "model_weights.ckpt": target.getvalue()}
    path = write_nemo(tmp_path / "gpt.nemo", gpt_config(), {}, files=files)
    with pytest.raises(CheckpointError, match="is compressed"):
        inspect_source(path, 1, "fp16")


def test_huge_small_file_is_not_read(tmp_path: Path) -> None:
    root = tmp_path / "gpt"
    root.mkdir()
    shutil.unpack_archive(write_gpt(tmp_path / "gpt.nemo"), root, "tar")
    with (root / "model_config.yaml").open("r+b") as stream:
        stream.truncate(1 << 40)  # holes: it takes no room
    with pytest.raises(CheckpointError, match="model_config.yaml has 1099511627776 bytes"):
        inspect_source(root, 1, "fp16")
