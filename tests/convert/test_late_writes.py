"""What is kept while another process writes comes to its place, in order, and a lock is never left taken."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from export_scripts.conversion.write import late_writes
from export_scripts.conversion.write.late_writes import LateWrites
from export_scripts.conversion.write.workers import turns


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_ready_while_another_writes_is_kept_and_written_later(processes: int, descriptor: int) -> None:
    (turn,) = turns(processes, 1)
    writes, content = LateWrites(descriptor, turn, memoryview(bytearray(8))), bytearray(b"abcd")
    assert turn.acquire()
    writes.write(memoryview(content), 2)
    content[:] = b"efgh"  # its memory is used again
    writes.write(memoryview(content), 6)
    assert os.pread(descriptor, 20, 0) == b"", "another process has the file"
    turn.release()
    content[:] = b"ijkl"
    writes.write(memoryview(content), 10)
    writes.finish()
    assert os.pread(descriptor, 20, 0) == b"\0\0abcdefghijkl"
    assert turn.acquire(False), "it was given back"


def test_a_process_whose_room_is_full_waits(descriptor: int) -> None:
    turn = threading.Lock()
    writes = LateWrites(descriptor, turn, memoryview(bytearray(3)))
    turn.acquire()
    waiting = threading.Thread(target=writes.write, args=(memoryview(b"abcd"), 0))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and os.pread(descriptor, 4, 0) == b""
    turn.release()
    waiting.join()
    assert os.pread(descriptor, 4, 0) == b"abcd"


def test_a_full_disk_leaves_the_file_to_the_others(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    turn = threading.Lock()
    monkeypatch.setattr(late_writes, "write_at", full)
    with pytest.raises(OSError, match="no space"):
        LateWrites(descriptor, turn, memoryview(bytearray(4))).write(memoryview(b"abcd"), 0)
    assert turn.acquire(False)
