"""Room in a tmpfs: the file that takes it holds the same bytes, and a refusal or a smaller file leave nothing of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.checkpoints.nemo_archive import write_gpt

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.write import room as rooms
from export_scripts.conversion.write.room import Room, room_for
from export_scripts.convert import convert
from handover.errors import CheckpointError
from handover.manifest import Manifest

STEP, WEIGHTS = 4096, "model.safetensors"


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in memory; room is made there in small steps, as if there were a second processor."""
    monkeypatch.setattr(rooms, "_STEP_BYTES", STEP)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="slipway-room-") as folder:
        yield Path(folder)


def grown(room: Room) -> Room:
    """Wait until it has its most."""
    if room._thread is not None:
        room._thread.join()
    return room


@pytest.mark.parametrize("size_bytes", [1, 5 * STEP, 20 * STEP])
def test_a_file_takes_the_room_once_and_gets_its_own_size(size_bytes: int, shared: Path) -> None:
    room = grown(Room(shared, 10 * STEP + 1))
    assert room.size_bytes == 10 * STEP and list(shared.iterdir()) == []
    assert room.take(shared / "first", size_bytes) and not room.take(shared / "second", size_bytes)
    found = (shared / "first").stat()
    assert found.st_size == size_bytes
    assert found.st_blocks * 512 == min(-(-size_bytes // STEP), 10) * STEP
    assert (shared / "first").read_bytes() == bytes(size_bytes)


@pytest.mark.parametrize("end", [Room.close, lambda room: room.take(Path("/proc/self/none"), 1)])
def test_room_that_nothing_takes_is_given_back(end: Callable[[Room], object], shared: Path) -> None:
    room = grown(Room(shared, 10 * STEP))
    held = Path(f"/proc/self/fd/{room._descriptor}")
    assert held.exists()
    assert not end(room) and not held.exists() and list(shared.iterdir()) == []


@pytest.mark.parametrize("largest_file_bytes", [None, 10_000])
def test_a_conversion_in_memory_writes_what_it_writes_elsewhere(
    largest_file_bytes: int | None, shared: Path, tmp_path: Path
) -> None:
    archive = write_gpt(tmp_path / "gpt.nemo")
    given = {"format": "huggingface", "largest_file_bytes": largest_file_bytes}
    arguments = ConvertArguments(archive, shared / "out", **given)  # type: ignore[arg-type]
    with room_for(arguments) as room:
        identity = os.fstat(grown(room)._descriptor).st_ino
        assert room.size_bytes > 0
        manifest = convert(arguments, room=room)
    (weights, *_) = sorted((shared / "out").glob("*.safetensors"))
    assert weights.stat().st_ino == identity
    elsewhere = convert(ConvertArguments(archive, tmp_path / "out", **given))  # type: ignore[arg-type]
    assert manifest.files == elsewhere.files and Manifest.read(shared / "out").problems(shared / "out") == []


def test_a_refused_conversion_leaves_nothing(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(100 * STEP))
    arguments = ConvertArguments(tmp_path, shared / "out", format="huggingface")
    with pytest.raises(CheckpointError, match="no checkpoint"), room_for(arguments) as room:
        assert grown(room).size_bytes == 100 * STEP
        convert(arguments, room=room)
    assert list(shared.iterdir()) == []


def test_none_is_made_where_it_has_no_use(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write_gpt(tmp_path / "gpt.nemo")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / WEIGHTS).write_bytes(bytes(100 * STEP))
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling/weights.bin").symlink_to("nowhere")

    def made(checkpoint: Path, output: Path, **changes: str) -> int:
        with room_for(ConvertArguments(checkpoint, output, **{"format": "huggingface", **changes})) as room:  # type: ignore[arg-type]
            return grown(room).size_bytes

    assert made(archive, shared / "out") > 0
    assert made(archive, shared / "out", format="fastertransformer") == 0
    assert made(tmp_path / "linked", shared / "out", quantization="fp8") == 50 * STEP
    for checkpoint in ("linked", "dangling", "missing"):
        assert made(tmp_path / checkpoint, shared / "out") == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert made(archive, shared / "out") == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(rooms, "_TMPFS", -1)
    assert made(archive, shared / "out") == 0
