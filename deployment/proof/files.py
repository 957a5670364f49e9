"""Prove every file of a model repository before anything is started, beside the shards (``weights``).

What a manifest lists is compared with it, content and all: a config.ini with another epsilon, a vocabulary with two ids
swapped or a model.py with a line more would be served under the digest of the model that was exported. A person who
edits a file on purpose names it in ``deployment.edited_files``. Repositories without a manifest are served as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from handover.digests import file_digest
from handover.errors import ArtefactError
from handover.manifest import FILE_NAME as MANIFEST_NAME
from handover.manifest import FileRecord, Manifest

if TYPE_CHECKING:  # it needs tritonclient, which a container of another engine does not have
    from deployment.proof.served_models import ServedModel

WEIGHTS = (".bin", ".safetensors")
"""Ends of the names of files of weights."""
_MOST_LISTED = 20


def prove_files(repository: Path, models: Iterable[ServedModel], edited_files: Sequence[str]) -> tuple[int, list[str]]:
    """Compare the files of the repository, and of checkpoints outside of it, with their manifests.

    Weights that ``weights`` proves are compared by presence and size only: those of the models' checkpoints.

    Args:
        repository: Triton model repository.
        models: that are served; without one, as for another engine, the weights' content is compared here too.
        edited_files: patterns of paths in the repository, such as ``*/config.pbtxt``; these may be other than recorded.

    Returns:
        Number of files that are as recorded, and the paths of those that were edited.

    Raises:
        ArtefactError: names every other file that is missing or not as recorded.
    """
    models = tuple(models)
    outside = (
        model.checkpoint for model in models if not model.checkpoint.resolve().is_relative_to(repository.resolve())
    )
    skipped = {inode for model in models for inode in _weights_of(model.checkpoint)}
    proved, edited, problems = 0, list[str](), list[str]()
    known: dict[tuple[int, int, str], bool] = {}  # files have several links
    for root in (repository, *outside):
        for record in _records(root):
            name = record.path if root == repository else str(root / record.path)
            if not (problem := _problem(root / record.path, record, known, skipped)):
                proved += 1
            elif problem != _MISSING and not name.endswith(WEIGHTS) and any(fnmatchcase(name, p) for p in edited_files):
                edited.append(name)
            else:
                problems.append(f"{name}  {problem}")
    if problems:
        raise _refusal(repository, problems)
    return proved, edited


_MISSING = "missing"


def _records(root: Path) -> Iterator[FileRecord]:
    if (root / MANIFEST_NAME).is_file():
        yield from Manifest.read(root).files


def _weights_of(checkpoint: Path) -> Iterator[tuple[int, int]]:
    """Yield the inodes of a checkpoint's files of weights; its manifest does not know the adapters that lie in it."""
    for record in _records(checkpoint):
        with contextlib.suppress(OSError):
            if record.path.endswith(WEIGHTS):
                found = os.stat(checkpoint / record.path)
                yield found.st_dev, found.st_ino


def _problem(
    path: Path, record: FileRecord, known: dict[tuple[int, int, str], bool], skipped: Set[tuple[int, int]]
) -> str:
    """Return in what a file is not as recorded; of those that are skipped the content is not read."""
    try:
        found = os.stat(path)
        if found.st_size != record.size_bytes:
            return f"{found.st_size} bytes instead of {record.size_bytes}"
        if (found.st_dev, found.st_ino) in skipped:
            return ""
        key = (found.st_dev, found.st_ino, record.digest)
        if key not in known:
            known[key] = file_digest(path, record.digest) == record.digest
    except FileNotFoundError:
        return _MISSING
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if known[key] else "content is not what was exported"


def _refusal(repository: Path, problems: list[str]) -> ArtefactError:
    more = [f"... and {len(problems) - _MOST_LISTED} more"] if len(problems) > _MOST_LISTED else []
    return ArtefactError(
        f"{len(problems)} files of {repository} are not as its manifest records them\n  "
        + "\n  ".join(problems[:_MOST_LISTED] + more),
        "nothing was started; export again (force=[export]), or, where you have edited a file on purpose, name it: "
        "deployment.edited_files=[fastertransformer/config.pbtxt], or ['*/config.pbtxt'] for all of that name",
    )
