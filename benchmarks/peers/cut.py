"""Cut an unpacked wheel with CUDA libraries to what one kind of GPU runs, so that a peer can be brought to a machine.

    pip download vllm==0.33.0 --no-deps --python-version 3.12 --platform manylinux_2_28_x86_64 --only-binary=:all:
    unzip -q vllm-*.whl -d whole
    python3 -m benchmarks.peers.cut --source=whole --target=cut --architecture=90 \
        --leave-out='["_vllm_fa2_C", "third_party/deep_gemm"]' --kernels='[["_vllm_fa3_C", "half_t|bfloat16_t"]]'
    tar -cJf peer.tar.xz -C cut .

What is not needed is zeros in its place: libraries keep every offset, and zeros compress to nothing. Beside it the
machine needs those of the wheel's requirements that it has not: put them into the same directory by ``pip install
--target``. A table says what each library keeps.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from handover.arguments import ScriptArguments, option
from handover.errors import ConfigError, exit_status

_SECTION = b".nv_fatbin"
_MAGIC = 0xBA55ED50
_BINARY, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ12xI")
_PTX, _MACHINE_CODE = 1, 2
_NAMES = re.compile(rb"\.text\.(\w+)").findall


@dataclass(frozen=True)
class CutArguments(ScriptArguments):
    """What to cut."""

    source: Path = field(metadata={"help": "directory of the unpacked wheel"})
    target: Path = field(metadata={"help": "directory to write, which must not be there"})
    architecture: int = option(90, "compute capability, 90 of a Hopper")
    leave_out: tuple[str, ...] = option((), "regular expressions: of what they find in a path no file is copied")
    kernels: tuple[tuple[str, str], ...] = option(
        (), "pairs of regular expressions: libraries, and names of which a module of theirs must have one to be kept"
    )


@dataclass(frozen=True)
class Code:
    """A module of device code in a library.

    Attributes:
        binary: number of the fat binary that it is part of, one of a translation unit.
        is_ptx: text for the driver's compiler; else machine code.
        architecture: compute capability times ten.
        begin, end: in the file, without its header.
    """

    binary: int
    is_ptx: bool
    architecture: int
    begin: int
    end: int


def main(argv: Sequence[str]) -> None:
    """Copy what is needed and print a table; ConfigError: the target is there, or the source is not."""
    arguments = CutArguments.from_argv(argv, __doc__)
    if not arguments.source.is_dir():
        raise ConfigError(f"{arguments.source} is no directory", "--source names that of the unpacked wheel")
    if arguments.target.exists():
        raise ConfigError(f"{arguments.target} is there already", "name a --target that is not")
    print("| library | MB | device code | kept |\n| --- | ---: | ---: | ---: |")
    for file in sorted(each for each in arguments.source.rglob("*") if each.is_file()):
        name = file.relative_to(arguments.source)
        if any(re.search(each, str(name)) for each in arguments.leave_out):
            continue
        copy = arguments.target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)
        if file.suffix == ".so":
            patterns = [each for library, each in arguments.kernels if re.search(library, str(name))]
            whole, kept = blank(copy, arguments.architecture, patterns)
            print(f"| {name} | {file.stat().st_size / 1e6:.1f} | {whole / 1e6:.1f} | {kept / 1e6:.1f} |", flush=True)


def blank(library: Path, architecture: int, names: Sequence[str] = ()) -> tuple[int, int]:
    """Overwrite by zeros the device code that a GPU does not run.

    Args:
        library: to change in its place.
        architecture: of the GPU. Of a fat binary without machine code for it the newest PTX that it takes is kept.
        names: regular expressions; machine code none of whose kernels has such a name goes too.

    Returns:
        Bytes of device code before and after.
    """
    content = bytearray(library.read_bytes())
    codes = list(device_code(content))
    kept = {each for each in codes if each.architecture == architecture and not each.is_ptx}
    served = {each.binary for each in kept}
    newest = dict[int, Code]()
    for each in sorted(codes, key=lambda code: code.architecture):
        if each.is_ptx and each.architecture <= architecture and each.binary not in served:
            newest[each.binary] = each
    kept = {each for each in kept if not names or _has_name(content[each.begin : each.end], names)}
    kept |= set(newest.values())
    for each in codes:
        if each not in kept:
            content[each.begin : each.end] = bytes(each.end - each.begin)
    library.write_bytes(content)
    return sum(each.end - each.begin for each in codes), sum(each.end - each.begin for each in kept)


def _has_name(code: bytes, names: Sequence[str]) -> bool:
    kernels = [each.decode() for each in _NAMES(code)]
    return any(re.search(name, kernel) for name in names for kernel in kernels)


def device_code(content: bytes | bytearray) -> Iterator[Code]:
    """Yield the modules of a shared library (ELF of 64 bits), in its fat binaries' order; none where it has none.

    A fat binary begins with a magic number, a version, its header's bytes and the bytes behind it; so does each entry,
    with its kind in place of the magic number and its architecture at byte 28. NVIDIA documents neither: so they were
    found in vLLM's libraries.
    """
    number = -1
    for position, end in _sections(content):
        while position + _BINARY.size <= end:
            magic, _, header, size = _BINARY.unpack_from(content, position)
            if magic != _MAGIC:  # binaries are aligned to 8 bytes
                position += 8
                continue
            number, entry = number + 1, position + header
            position = entry + size
            while entry + _ENTRY.size <= position:
                kind, _, entry_header, entry_size, architecture = _ENTRY.unpack_from(content, entry)
                begin = entry + entry_header
                entry = begin + entry_size
                if kind in (_PTX, _MACHINE_CODE):
                    yield Code(number, kind == _PTX, architecture, begin, entry)


def _sections(content: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Where the sections with fat binaries begin and end."""
    if content[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", content, 0x28)
    size, count, index_of_names = struct.unpack_from("<HHH", content, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", content, table + size * index) for index in range(count)]
    names = heads[index_of_names][4]
    for name, _, _, _, begin, length in heads:
        if content.startswith(_SECTION + b"\0", names + name):
            yield begin, begin + length


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "cut"))
