"""The directory in which an artefact grows: that it is ours, how far it is, and who is at it. Standard library only.

For an artefact ``X``, in this order:

1. ``X.partial.lock`` is made and locked: one run at a time does any of what follows.
2. A directory with the mark of ownership in it is made under a temporary name and renamed to ``X.partial``. So no
   ``X.partial`` of ours is ever without the mark, and what has none is somebody else's.
3. The commands write there. After each, once all it wrote is on the disk, the mark says how many are done.
4. What was made is published: renamed to ``X``, and the mark and the lock are removed.

A kill between any two of these leaves what the next run goes on with, or clears away by itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from handover.durable import (
    discard,
    is_temporary,
    make_directory,
    remove_temporaries,
    rename_durably,
    sync,
    temporary_beside,
    write_atomically,
)
from handover.errors import ArtefactError
from handover.manifest import WORK_FILE
from launcher.plan.plan import partial


def lock_of(output: Path) -> Path:
    """File beside an artefact that is there, and locked, while a run is at it."""
    return output.with_name(partial(output).name + ".lock")


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Keep other runs from an artefact, and clear what killed ones left of their last steps.

    Raises:
        ArtefactError: another run is at it.
    """
    file = lock_of(output)
    make_directory(file.parent)
    with _lock(file) as stream:
        try:
            stream.write(json.dumps({"pid": os.getpid(), "host": os.uname().nodename}))
            stream.flush()
            (output / WORK_FILE).unlink(missing_ok=True)
            for path in (output, partial(output)):
                remove_temporaries(output.parent, of=path.name)
            yield
        finally:
            file.unlink(missing_ok=True)


@contextmanager
def _lock(file: Path) -> Iterator[IO[str]]:
    """Open a file and lock it; one that a run removes while we wait for it is of no use."""
    while True:
        with file.open("a") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ArtefactError(
                    f"another run is making {file.name.removesuffix('.partial.lock')} in {file.parent}",
                    f"wait for it, or stop the process named in {file}",
                ) from None
            if file.exists() and file.stat().st_ino == os.fstat(stream.fileno()).st_ino:
                stream.truncate(0)
                yield stream
                return


def take_up(output: Path, fingerprint: str) -> int:
    """Make the directory, or find it as an earlier run of the same plan left it.

    Args:
        output: the artefact to be.
        fingerprint: of the plan on its inputs; what was begun for another one is removed.

    Returns:
        Number of commands that are done.

    Raises:
        ArtefactError: a directory in the way is not ours.
    """
    directory = partial(output)
    if _is_ours(directory):
        recorded = _read(directory)
        if recorded and recorded[0] == fingerprint:
            _remove_temporaries_below(directory)
            return recorded[1]
        discard(directory)
    elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ArtefactError(f"{directory} is in the way and was not made by Slipway", "move it away or delete it")
    beginning = temporary_beside(directory)
    beginning.mkdir()
    note(beginning, fingerprint, 0)
    rename_durably(beginning, directory)
    return 0


def note(directory: Path, fingerprint: str, commands_done: int) -> None:
    """Mark the directory as ours, and say how far it is."""
    content = {"made_by": "slipway", "fingerprint": fingerprint, "commands_done": commands_done}
    write_atomically(directory / WORK_FILE, json.dumps(content) + "\n")


def _is_ours(directory: Path) -> bool:
    return (directory / WORK_FILE).is_file()


def _read(directory: Path) -> tuple[str, int] | None:
    """Fingerprint and number of finished commands; None if the mark is damaged: what was done is unknown then."""
    try:
        content = json.loads((directory / WORK_FILE).read_text())
        return str(content["fingerprint"]), int(content["commands_done"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_temporaries_below(directory: Path) -> None:
    for folder, names, _ in os.walk(directory):
        names[:] = [name for name in names if not is_temporary(name)]
        remove_temporaries(Path(folder))


def clear(output: Path) -> None:
    """Clear what is left beside a finished artefact by runs that were killed; another run's work goes on.

    Where nothing is left, nothing is written: results may be read-only.
    """
    left = (lock_of(output), output / WORK_FILE, partial(output) / WORK_FILE)
    beside = {output.name, partial(output).name}
    if not any(path.exists() for path in left) and not _has_temporaries(output.parent, beside):
        return
    with suppress(ArtefactError, OSError), locked(output):
        if _is_ours(partial(output)):
            discard(partial(output))


def _has_temporaries(parent: Path, names: set[str]) -> bool:
    return any(is_temporary(path.name) and any(f".{name}." in path.name for name in names) for path in parent.iterdir())


def publish(output: Path, keep: Path | None) -> None:
    """Rename the directory to the artefact's name.

    Args:
        output: the artefact.
        keep: new name of an artefact that has its place; None: that is removed.
    """
    replaced = None
    if output.exists():
        replaced = keep or temporary_beside(output)
        rename_durably(output, replaced)
    rename_durably(partial(output), output)
    (output / WORK_FILE).unlink()
    sync(output)
    if replaced and not keep:
        shutil.rmtree(replaced)
