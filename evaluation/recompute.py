"""Compute every figure of a benchmark again from its raw records: ``python3 -m evaluation.recompute --output=DIR``.

DIR holds ``benchmark.csv`` or ``load.csv``, or is the results directory of a run. Each point's ``requests.csv.gz`` and
``requests.json`` say when each request was sent and answered; the figures that follow from them must be those of the
table, to the last digit that it shows. Columns about memory, processors, GPUs and the start-up are readings, and do
not follow from requests. The exit status is 1 if a figure differs, a file was altered, or nothing could be computed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from evaluation.arguments import RecomputeArguments
from evaluation.speed.tables.raw_records import read_records
from evaluation.speed.tables.recomputation import Comparison, compare
from evaluation.speed.tables.table import TABLES, Row, Table
from handover.errors import ArtefactError, exit_status
from handover.manifest import FILE_NAME, REPLACED, Manifest


def main(argv: Sequence[str]) -> None:
    """Print a line for each point and one for each figure that differs.

    Raises:
        ArtefactError: there is no table, a table or a record is damaged, or no point has records.
    """
    output = RecomputeArguments.from_argv(argv, description=__doc__).output
    tables = list(_tables(output))
    if not tables:
        names = " or ".join(table.file_name for table in TABLES)
        raise ArtefactError(f"{output} holds no {names}", "give the directory of a benchmark, or a run's results")
    checked = differing = 0
    for table, file in tables:
        differing += len(altered := _altered(file.parent))
        sys.stdout.writelines([f"{file.parent}\n", *(f"  {problem}\n" for problem in altered)])
        for row in _rows(table, file):
            point = read_records(file.parent / row.directory)
            if point is None:
                sys.stdout.write(f"  {_name(row)}  no records\n")
                continue
            found = compare(table, row, point)
            checked += len(found.equal) + len(found.different)
            differing += len(found.different)
            sys.stdout.write(_lines(row, found))
    if not checked:
        raise ArtefactError(f"no point below {output} has records", "earlier versions wrote none: measure again")
    sys.stdout.write(f"{checked} cells computed again, {differing} problems\n")
    if differing:
        raise SystemExit(1)


def _tables(output: Path) -> Iterator[tuple[Table, Path]]:
    """Find the tables at or below a directory, but not in what a later run took the place of."""
    for table in TABLES:
        for file in sorted(output.rglob(table.file_name)):
            if not any(REPLACED in part for part in file.relative_to(output).parts):
                yield table, file


def _altered(directory: Path) -> list[str]:
    """List the files that are not what the manifest says; nothing where an unfinished run left none."""
    return Manifest.read(directory).problems(directory) if (directory / FILE_NAME).is_file() else []


def _rows(table: Table, file: Path) -> list[Row]:
    try:
        return table.read(file)
    except ValueError as error:
        raise ArtefactError(f"{file} is damaged: {error}", "measure again") from error


def _name(row: Row) -> str:
    return f"{row.workload} {row.label}"


def _lines(row: Row, found: Comparison) -> str:
    total = len(found.equal) + len(found.different)
    lines = [f"  {_name(row)}  {len(found.equal)} of {total} cells are equal"]
    lines += [
        f"    {column}: the table says {said or 'nothing'}, the records give {computed or 'nothing'}"
        for column, (said, computed) in found.different.items()
    ]
    if found.unknown:
        lines.append(f"    not recorded completely: {', '.join(found.unknown)}")
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "recompute"))
