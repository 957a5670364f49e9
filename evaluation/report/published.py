"""The result files of a run that a report reads: the newest of each kind, unchanged since they were published."""

from __future__ import annotations

from pathlib import Path

from handover.digests import file_digest
from handover.errors import ArtefactError
from handover.manifest import FILE_NAME, REPLACED, Manifest

PARTIAL = ".partial"


class Remarks(list[str]):
    """Sentences for the report's head.

    Attributes:
        left_out: why the figures of an evaluation or a benchmark were left out, by its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left_out: dict[str, str] = {}

    def leave_out(self, name: str, sentence: str, reason: str) -> None:
        """Print that figures are left out, and remember why for whoever asks for one of them."""
        self.append(sentence)
        self.left_out[name] = reason


def newest_results(
    root: Path, file_name: str, remarks: Remarks, is_written_last: bool = False
) -> list[tuple[Path, bool]]:
    """List result files, each with whether it is published; an unpublished one only if no other exists.

    Args:
        root: directory of all results of a kind.
        file_name: name of the files.
        remarks: a sentence is added for each file that was changed after publication, which is left out.
        is_written_last: whether an unpublished file that is newer than the published one takes its place: the later run
            was complete, and failed because of its result.
    """
    chosen: dict[str, Path] = {}
    found = (path for path in root.glob(f"*/{file_name}") if REPLACED not in path.parent.name)
    for path in sorted(found, key=lambda path: path.parent.name.endswith(PARTIAL)):
        other = chosen.setdefault(path.parent.name.removesuffix(PARTIAL), path)
        if is_written_last and path.stat().st_mtime_ns > other.stat().st_mtime_ns:
            chosen[path.parent.name.removesuffix(PARTIAL)] = path
    results = []
    for name, path in sorted(chosen.items()):
        is_published = not path.parent.name.endswith(PARTIAL)
        if is_published and (change := change_of(path)):
            sentence = f"The figures of {name} are not those that were measured, and left out: {change}."
            remarks.leave_out(name, sentence, f"the figures are not those that were measured: {change}")
        else:
            results.append((path, is_published))
    return results


def change_of(path: Path) -> str:
    """Describe how a file differs from its directory's manifest; empty if it does not, or without a manifest."""
    if not (path.parent / FILE_NAME).is_file():
        return ""
    try:
        record = next((r for r in Manifest.read(path.parent).files if r.path == path.name), None)
    except ArtefactError as error:
        return error.problem
    if record is None:
        return f"{path.name} is not in its manifest"
    return "" if file_digest(path, record.digest) == record.digest else f"{path.name} was changed after it was written"
