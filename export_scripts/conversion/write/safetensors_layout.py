"""Where tensors go in safetensors files of a limited size, and the parts in which several processes write them.

Format: https://github.com/huggingface/safetensors, "Format". A file's header is known before any weight is read, and
with it where each tensor lies. What a quantized tensor becomes, numbers and scales, lies together.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from pathlib import Path

from export_scripts.conversion.move.assembly import Assembly
from export_scripts.conversion.write.journal import GROWING
from export_scripts.quantization.record import WORDS, Output, Quantization
from export_scripts.tensors.dtypes import STORAGE, item_bytes
from export_scripts.weights.schema import Shape

LARGEST_FILE_BYTES = 5 * 10**9
INDEX_FILE = "model.safetensors.index.json"
_ALIGNMENT = 8
LEAST_PART_BYTES, MOST_PART_BYTES, _PARTS = 8 << 20, 64 << 20, 128


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to write.

    Attributes:
        name: in the file.
        shape: in the file's header.
        axes: shape of what ``make`` gives; neighbouring axes may be one in ``shape``.
        make: puts it together from its sources; nothing is read.
        is_cut: whether several processes may make a part each: its sources have no checksums that need all of it.
        quantization: what its numbers are written as; None: as the other weights are.
        fixed_type: of its numbers, whatever that of the other weights is; empty: theirs.
        word: safetensors' one for that type, where it is not its own.
    """

    name: str
    shape: Shape
    axes: Shape
    make: Callable[[], Assembly]
    is_cut: bool = False
    quantization: Quantization | None = None
    fixed_type: str = ""
    word: str = ""

    def outputs(self, data_type: str) -> tuple[Output, ...]:
        """List what is in the file for it."""
        if self.quantization:
            return self.quantization.outputs(self.name, self.shape, data_type)
        own = self.data_type(data_type)
        word = self.word or WORDS[own]
        return (Output(self.name, word, self.shape, item_bytes(own) if own in STORAGE else 1),)

    def data_type(self, of_others: str) -> str:
        """Return the type of its numbers, where it is not quantized."""
        return self.fixed_type or of_others

    def size_bytes(self, data_type: str) -> int:
        """Bytes in the file."""
        return sum(output.size_bytes for output in self.outputs(data_type))

    @property
    def rows_each(self) -> int:
        """Rows of a quantized tensor for one element of the first axis that ``make`` gives."""
        return self.shape[0] // self.axes[0]

    def places(self, start: int, stop: int, data_type: str) -> Iterator[tuple[int, int]]:
        """Yield where the bytes of some elements of that axis begin and end, in what is in the file for it."""
        if self.quantization is None:
            each = self.size_bytes(data_type) // max(1, self.axes[0])
            yield start * each, stop * each
            return
        offset = 0
        for output in self.outputs(data_type):
            begin, end = output.place(start * self.rows_each, stop * self.rows_each)
            yield offset + begin, offset + end
            offset += output.size_bytes

    @property
    def together(self) -> int:
        """Elements of that axis of which a multiple is written at a time."""
        if self.quantization is None:
            return 1
        return self.quantization.rows // gcd(self.quantization.rows, self.rows_each)


@dataclass(frozen=True)
class WeightsFile:
    """One file of weights, laid out.

    Attributes:
        name: its own.
        header_bytes: of its header, which is made when it is asked for.
        tensors: in the order of their bytes.
        offsets: of each tensor's first byte in the file; what a quantized one becomes follows from there.
        size_bytes: of the file.
        origin: a file with these very bytes, of which this one is a hard link where the file system has them; None:
            there is none.
    """

    name: str
    header_bytes: int
    tensors: Sequence[PlannedTensor]
    offsets: Sequence[int]
    size_bytes: int
    origin: Path | None = None

    def header(self, data_type: str) -> bytes:
        """Return its first bytes."""
        if self.origin is None:
            return _header(self.tensors, data_type)[0]
        with self.origin.open("rb") as stream:
            return stream.read(self.header_bytes)

    @property
    def growing(self) -> str:
        """Name of the file until it is whole."""
        return self.name + GROWING

    def is_linked(self, root: Path) -> bool:
        """Whether the growing file in a directory is the origin under another name: it must not be written to."""
        return self.origin is not None and (root / self.growing).samefile(self.origin)


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor, along its first axis.

    Attributes:
        tensor: whose.
        start, stop: of the rows; the whole tensor has ``start`` 0 and ``stop`` the number of its rows.
    """

    tensor: PlannedTensor
    start: int
    stop: int


@dataclass(frozen=True)
class Part:
    """Bytes of a file that one process writes.

    Attributes:
        file: to write to.
        spans: first and end of its ranges of bytes in the file: one, but for some rows of a quantized tensor.
        rows: what it consists of, in the order of the bytes.
    """

    file: WeightsFile
    spans: tuple[tuple[int, int], ...]
    rows: tuple[Rows, ...]

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all its ranges."""
        return sum(end - start for start, end in self.spans)


def lay_out(tensors: Sequence[PlannedTensor], data_type: str, largest_bytes: int) -> tuple[WeightsFile, ...]:
    """Share tensors out among files, in their order; a tensor that is larger than a file may be has its own.

    Args:
        tensors: to write.
        data_type: fp32, fp16 or bf16.
        largest_bytes: of a file's tensors.
    """
    starts, used_bytes = [0], 0
    for number, tensor in enumerate(tensors):
        size_bytes = tensor.size_bytes(data_type)
        if number > starts[-1] and used_bytes + size_bytes > largest_bytes:
            starts.append(number)
            used_bytes = 0
        used_bytes += size_bytes
    if len(starts) == 1:
        return (file_of("model.safetensors", tensors, data_type),)
    names = [f"model-{number:05}-of-{len(starts):05}.safetensors" for number in range(1, len(starts) + 1)]
    spans = zip(starts, [*starts[1:], len(tensors)], strict=True)
    return tuple(
        file_of(name, tensors[start:stop], data_type) for name, (start, stop) in zip(names, spans, strict=True)
    )


def file_of(name: str, tensors: Sequence[PlannedTensor], data_type: str) -> WeightsFile:
    """Lay tensors out in one file."""
    header, begins, end = _header(tensors, data_type)
    offsets = array("Q", (len(header) + begin for begin in begins))
    return WeightsFile(name, len(header), tensors, offsets, len(header) + end)


def _header(tensors: Sequence[PlannedTensor], data_type: str) -> tuple[bytes, list[int], int]:
    """Render a file's header; also, where behind it each tensor begins, and where the last one ends."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = [], 0
    for tensor in tensors:
        begins.append(end)
        for output in tensor.outputs(data_type):
            span = [end, end := end + output.size_bytes]
            entries[output.name] = {"dtype": output.kind, "shape": list(output.shape), "data_offsets": span}
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    return len(content).to_bytes(8, "little") + content, begins, end


def index_of(files: Sequence[WeightsFile], data_type: str) -> bytes:
    """Render the index of several files."""
    total = sum(file.size_bytes - file.header_bytes for file in files)
    weight_map = {
        output.name: file.name for file in files for tensor in file.tensors for output in tensor.outputs(data_type)
    }
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()


def part_bytes(files: Sequence[WeightsFile]) -> int:
    """Return what one process writes at a time: so little that all end together, with few lines of the journal."""
    return max(LEAST_PART_BYTES, min(sum(file.size_bytes for file in files) // _PARTS, MOST_PART_BYTES))


def parts_of(file: WeightsFile, data_type: str, size_bytes: int) -> Iterator[Part]:
    """Cut a file into parts of about a size: some small tensors each, or some rows of a large one."""
    rows: list[Rows] = []
    spans: list[tuple[int, int]] = []
    for tensor, offset in zip(file.tensors, file.offsets, strict=True):
        count = tensor.axes[0]
        row_bytes = -(-tensor.size_bytes(data_type) // max(1, count))
        most = max(1, size_bytes // max(1, row_bytes)) if tensor.is_cut else count
        most = max(1, most // tensor.together) * tensor.together if most < count else count
        for start in range(0, count, max(1, most)):
            stop = min(start + most, count)
            rows.append(Rows(tensor, start, stop))
            for begin, end in tensor.places(start, stop, data_type):
                _extend(spans, offset + begin, offset + end)
            if sum(end - begin for begin, end in spans) >= size_bytes:
                yield Part(file, tuple(spans), tuple(rows))
                spans, rows = [], []
    if rows:
        yield Part(file, tuple(spans), tuple(rows))


def _extend(spans: list[tuple[int, int]], begin: int, end: int) -> None:
    """Add a range of bytes, unless it is empty; it goes on with the last one where it can."""
    if spans and spans[-1][1] == begin:
        spans[-1] = spans[-1][0], end
    elif begin < end:
        spans.append((begin, end))
