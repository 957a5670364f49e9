"""The two formats of torch.save: a zip since torch 1.6, one stream before. Tensors of both are mapped in place.

Format of the stream: torch/serialization.py (``_legacy_save``): pickles of a magic number, a version, the machine, the
content and the keys of the storages; then each storage as its element count (8 bytes) and its elements.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.pickled import ITEM_BYTES, Storage, StoredTensor, as_state, unpickle
from export_scripts.checkpoints.files.torch_file import AsState, TorchFile, is_sane, reach
from handover.errors import CheckpointError

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_COUNT_BYTES = 8
# How the stream begins: the magic number, pickled with protocol 2.
_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def open_torch_file(
    archive: Archive, name: str, take_state: AsState = as_state, records: Collection[str] = ()
) -> TorchFile:
    """Open a file that torch.save wrote, of either format; see ``TorchFile``."""
    with archive.open(name) as stream:
        is_stream = stream.read(len(_START)) == _START
    return (StreamedTorchFile if is_stream else TorchFile)(archive, name, take_state, records)


class StreamedTorchFile(TorchFile):
    """A file of torch before 1.6, or of ``_use_new_zipfile_serialization=False``."""

    def _load(self, records: Collection[str]) -> Any:
        self._starts: dict[str, int] = {}
        storages: dict[str, Storage] = {}
        with self._archive.open(self.name) as stream:
            head = [unpickle(stream, self._where) for _ in range(3)]
            if head[:2] != [_MAGIC, _VERSION] or not isinstance(head[2], dict):
                raise CheckpointError(
                    f"{self._where} is of version {head[1]} of torch's format", "version 1001 is read"
                )
            if not head[2].get("little_endian", True):
                raise CheckpointError(f"{self._where} was written on a big-endian machine")
            content = unpickle(stream, self._where, records, storages)
            keys, position = unpickle(stream, self._where), stream.tell()
            if not isinstance(keys, list) or not set(map(str, keys)) <= storages.keys():
                raise CheckpointError(f"{self._where} lists storages that it does not use", "copy the checkpoint again")
            for key in keys:
                storage = storages[key]
                stream.seek(position)
                if int.from_bytes(stream.read(_COUNT_BYTES), "little") != storage.element_count:
                    raise CheckpointError(f"{self._where}: storage {key} has another size", "copy the checkpoint again")
                self._starts[key] = position + _COUNT_BYTES
                position = self._starts[key] + storage.element_count * ITEM_BYTES.get(storage.data_type, 1)
        if position > self._archive.sizes[self.name]:
            raise CheckpointError(f"{self._where} is truncated", "copy the checkpoint again")
        return content

    def checksum(self, tensor: StoredTensor) -> tuple[object, ...] | None:
        """None: the stream has no checksums."""
        return None

    def has_checksum(self, tensor: StoredTensor) -> bool:
        """This format has none."""
        return False

    def _place(self, tensor: StoredTensor) -> tuple[int, int, int | None]:
        size_bytes = tensor.storage.element_count * ITEM_BYTES[tensor.storage.data_type]
        return self._starts[tensor.storage.key], size_bytes, None

    def _check_record(self, tensor: StoredTensor) -> None:
        if tensor.storage.key not in self._starts:
            raise CheckpointError(f"{self._where}: storage {tensor.storage.key} is missing")
        if not is_sane(tensor) or reach(tensor) > tensor.storage.element_count:
            raise self._too_small(tensor)
