"""What belongs to a checkpoint and lies elsewhere, where the user says: an adapter, a tokenizer.

Their files get folders of their own in the checkpoint's archive, ``lora/<name>/`` and ``given_tokenizer/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from export_scripts.checkpoints.files.archive import Archive, Extent, open_archive
from export_scripts.checkpoints.lora.adapter import KIND as LORA
from export_scripts.checkpoints.nemo.companions import with_companions
from export_scripts.checkpoints.tokenizers.user_tokenizer import FOLDER as TOKENIZER
from handover.errors import CheckpointError


@dataclass(frozen=True)
class GivenFiles:
    """Paths that the user names beside the checkpoint's.

    Attributes:
        adapter: a LoRA adapter: a ``.nemo``, unpacked or not, or a directory of NeMo 2, Megatron-Bridge or PEFT.
        tokenizer: a tokenizer's directory or file, which takes the place of the checkpoint's own.
    """

    adapter: Path | None = None
    tokenizer: Path | None = None

    def made_from(self) -> dict[str, str]:
        """Return for a manifest what was given."""
        named = {"adapter": self.adapter, "tokenizer": self.tokenizer}
        return {name: str(path) for name, path in named.items() if path is not None}


NOTHING_GIVEN = GivenFiles()


def with_given(archive: Archive, given: GivenFiles) -> Archive:
    """Add what is given to a checkpoint's files; the archive keeps its path.

    Raises:
        CheckpointError: a given path does not exist, or the checkpoint is compressed and cannot be mapped.
    """
    folders: dict[str, Path] = {}
    for what, path in (("adapter_path", given.adapter), ("tokenizer", given.tokenizer)):
        if path is not None and not path.exists():
            raise CheckpointError(f"export.model.{what} {path} does not exist", "it is a path of this machine")
    if archive.is_compressed and given != NOTHING_GIVEN:
        raise CheckpointError(
            f"{archive.path} is compressed, and an adapter or a tokenizer is given beside it",
            "unpack the checkpoint first",
        )
    if given.adapter is not None:
        folders[f"{LORA}/{given.adapter.name}"] = given.adapter
    result = with_companions(archive.path, archive, folders) if folders else archive
    if given.tokenizer is None:
        return result
    return Archive(archive.path, {**_extents(result), **_tokenizer_extents(given.tokenizer)}, remark=archive.remark)


def _extents(archive: Archive) -> Mapping[str, Extent]:
    return {name: archive.extent(name) for name in archive.sizes}


def _tokenizer_extents(path: Path) -> dict[str, Extent]:
    """List a tokenizer's files: one file, or those of a directory without its folders."""
    if path.is_file():
        return {f"{TOKENIZER}/{path.name}": Extent(path, 0, path.stat().st_size)}
    files = open_archive(path)
    return {f"{TOKENIZER}/{name}": files.extent(name) for name in files.sizes if "/" not in name}
