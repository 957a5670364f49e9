"""Libraries for GPUs that benchmarks.peers.cut cuts: made here by gcc, with fat binaries as vLLM's libraries have them.

That their description is right was seen on vLLM 0.33's own: code of an architecture that had been kept by other means
stays byte for byte. No CUDA library is small enough to be here.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from benchmarks.peers import cut
from handover.errors import ConfigError

PTX, CODE = 1, 2


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    """A module with a header of 64 bytes; what is not read is no zero."""
    payload += bytes(-len(payload) % 8)
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)) + b"\x07" * 12 + struct.pack("<I", architecture)
    return head.ljust(64, b"\x09") + payload


def binary(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def kernel(name: str, number: int) -> bytes:
    return b"\0.text." + name.encode() + b"\0" + bytes([number]) * 40


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """An unpacked wheel with one library of three fat binaries, padding between them, and a module in Python."""
    whole = tmp_path / "whole" / "peer"
    whole.mkdir(parents=True)
    (whole / "code.py").write_text("X = 1\n")
    (whole / "docs").mkdir()
    (whole / "docs" / "page.jpg").write_bytes(b"picture")
    content = (
        binary(entry(CODE, 80, kernel("for_half_t", 1)), entry(CODE, 90, kernel("for_half_t", 2)))
        + bytes(24)
        + binary(
            entry(PTX, 75, kernel("text", 3)), entry(PTX, 80, kernel("text", 4)), entry(PTX, 100, kernel("text", 5))
        )
        + binary(entry(CODE, 90, kernel("for_fp8", 6)), entry(PTX, 90, kernel("for_fp8", 7)))
    )
    numbers = ", ".join(map(str, content))
    source = tmp_path / "library.c"
    source.write_text(
        f'__attribute__((section(".nv_fatbin"), aligned(8), used)) static const unsigned char code[] = {{{numbers}}};\n'
        "int four(void) { return 4; }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", whole / "_C.abi3.so", source], check=True)
    return whole.parent


def kept(library: Path) -> set[int]:
    """Numbers of the kernels whose bytes are there."""
    content = library.read_bytes()
    return {number for number in range(1, 8) if bytes([number]) * 40 in content}


def test_all_that_one_gpu_runs_is_kept_and_the_rest_is_zeros_in_its_place(wheel: Path, tmp_path: Path) -> None:
    cut.main([f"--source={wheel}", f"--target={tmp_path / 'cut'}", '--leave-out=["docs/"]'])
    library, copy = wheel / "peer" / "_C.abi3.so", tmp_path / "cut" / "peer" / "_C.abi3.so"
    assert kept(library) == {1, 2, 3, 4, 5, 6, 7}
    assert kept(copy) == {2, 4, 6}  # machine code for it, else the newest text that it takes
    before, after = library.read_bytes(), copy.read_bytes()
    assert len(before) == len(after)
    assert all(new == old or not new for old, new in zip(before, after, strict=True))
    assert sorted(each.name for each in (tmp_path / "cut").rglob("*") if each.is_file()) == ["_C.abi3.so", "code.py"]
    subprocess.run(["python3", "-c", f"import ctypes; assert ctypes.CDLL({str(copy)!r}).four() == 4"], check=True)


@pytest.mark.parametrize("architecture, left", [(80, {1, 4}), (75, {3}), (100, {5, 7}), (70, set())])
def test_another_architecture(wheel: Path, architecture: int, left: set[int]) -> None:
    library = wheel / "peer" / "_C.abi3.so"
    cut.blank(library, architecture)
    assert kept(library) == left


def test_machine_code_is_kept_by_its_kernels_names_too(wheel: Path, tmp_path: Path) -> None:
    cut.main(
        [f"--source={wheel}", f"--target={tmp_path / 'cut'}", '--kernels=[["_C", "half_t|bfloat16_t"], ["x", "y"]]']
    )
    assert kept(tmp_path / "cut" / "peer" / "_C.abi3.so") == {2, 4}


def test_nothing_is_written_over_and_a_library_without_device_code_stays(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is there already"):
        cut.main([f"--source={wheel}", f"--target={wheel}"])
    with pytest.raises(ConfigError, match="no directory"):
        cut.main([f"--source={tmp_path / 'nowhere'}", f"--target={tmp_path / 'cut'}"])
    text = wheel / "peer" / "code.py"
    assert cut.blank(text, 90) == (0, 0) and text.read_text() == "X = 1\n"
