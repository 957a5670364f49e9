"""Runs of Megatron-LM and Megatron-Bridge: ``iter_<n>/`` or ``release/``, of which a tracker names one.

Files: Megatron-LM and Megatron-Bridge, ``training/checkpointing.py``: ``latest_checkpointed_iteration.txt`` is written
when a save is finished, and so is Megatron-Bridge's ``latest_train_state.pt``; of a distributed checkpoint,
``.metadata`` is what is written last.
"""

from __future__ import annotations

import re

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.distributed import is_distributed
from export_scripts.checkpoints.files.distributed_torch import TRAINING_MODULES
from export_scripts.checkpoints.files.pickled import StoredTensor
from export_scripts.checkpoints.files.torch_format import open_torch_file
from export_scripts.checkpoints.runs.steps import Choice, choose
from handover.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
_TRAIN_STATE = "latest_train_state.pt"
RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?$")
"""The folder of a training rank: tensor-parallel rank; pipeline stage, expert-parallel rank or both."""
_FOLDER = re.compile(r"(?:iter_(\d+)|release)$")


def find_folder(archive: Archive) -> str:
    """Find the folder of the iteration that is taken; empty: the checkpoint is the root itself."""
    choice = _choice(archive)
    return f"{choice.name}/" if choice else ""


def with_one_iteration(archive: Archive) -> Archive:
    """Leave the files of all iterations out but of the one that is taken; they are no part of what is converted."""
    folders = _folders(archive)
    if len(folders) < 2 or archive.is_compressed or (choice := _choice(archive)) is None:
        return archive
    others = folders.keys() - {choice.name}
    kept = {name: archive.extent(name) for name in archive.sizes if name.partition("/")[0] not in others}
    return Archive(archive.path, kept, remark=choice.remark)


def _choice(archive: Archive) -> Choice | None:
    folders = _folders(archive)
    pointed = _pointed(archive)
    if pointed and pointed[1] not in folders:
        raise CheckpointError(
            f"{archive.path}: {pointed[0]} names {pointed[1]}, which is not there",
            f"there is: {', '.join(folders) or 'none'}",
        )
    if not pointed and "release" in folders and len(folders) > 1:
        raise CheckpointError(f"{archive.path} holds {len(folders)} checkpoints", f"give one of: {', '.join(folders)}")
    if not folders:
        return None
    return choose(archive.path, folders, lambda name: _is_complete(archive, name), pointed)


def _pointed(archive: Archive) -> tuple[str, str] | None:
    """Read which iteration the training names, and in which file; None: in none."""
    if TRACKER in archive:
        word = archive.read_bytes(TRACKER).decode("ascii", "replace").strip()
        return TRACKER, f"iter_{int(word):07d}" if word.isdigit() else word
    if _TRAIN_STATE not in archive or archive.is_compressed:
        return None
    file = open_torch_file(archive, _TRAIN_STATE, records=TRAINING_MODULES)
    step = file.state.get("step")
    if not isinstance(step, StoredTensor):
        raise CheckpointError(f"{archive.path}: {_TRAIN_STATE} has no step", "copy it again, or remove it")
    return _TRAIN_STATE, f"iter_{file.whole(step):07d}"


def _folders(archive: Archive) -> dict[str, int]:
    """Number of each iteration, by its folder; that of a release is no iteration's."""
    tops = {name.partition("/")[0] for name in archive.sizes}
    matches = [found for top in sorted(tops) if (found := _FOLDER.match(top))]
    return {found[0]: int(found[1] or -1) for found in matches}


def _is_complete(archive: Archive, folder: str) -> bool:
    if is_distributed(archive, f"{folder}/"):
        return True
    places = (name.split("/") for name in archive.sizes if name.startswith(f"{folder}/"))
    return any(len(parts) > 2 and RANK.match(parts[1]) for parts in places)
