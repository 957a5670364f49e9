"""Put what was measured on GPUs into one page, beside the CSVs that it comes from, and one picture, for the site.

    python3 -m benchmarks.gpu.report --directory=results/reference/h200 --picture=docs/images/latency.png

Reads every decode*.csv, scaling*.csv, prefill*.csv, load*.csv, kernels*.csv, sums*.csv and weights*.csv there, of the
modules of these names beside this one; writes report.md.
The picture has the use cases of NVIDIA's published tables at one row a request, by number of GPUs.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.sizes import SIZES
from evaluation.report.formatting import markdown_table
from handover.arguments import ScriptArguments
from handover.errors import ConfigError, exit_status

_USE_CASES = {("60", "20"): "Question answering", ("225", "20"): "Intent classification", ("200", "200"): "Translation"}
_WHERE = ("gpu", "torch", "commit")  # the same in each row of a file
_TITLES = {"decode": "Latency of a request", "prefill": "Inputs", "load": "Load", "kernels": "Products"}
_TITLES |= {"weights": "Loading", "scaling": "Several GPUs", "sums": "Sums over GPUs"}
Lines = list[dict[str, str]]


@dataclass(frozen=True)
class ReportArguments(ScriptArguments):
    """Where the CSVs are, and where the picture goes."""

    directory: Path = field(
        default=Path("results/reference/h200"), metadata={"help": "of the CSVs; report.md goes there too"}
    )
    picture: Path = field(default=Path("docs/images/latency.png"), metadata={"help": "file of the picture"})


def read(directory: Path, kind: str) -> dict[str, Lines]:
    """Read the files of a kind, by name."""
    found = {}
    for path in sorted(directory.glob(f"{kind}*.csv")):
        with path.open(newline="") as file:
            found[path.name] = list(csv.DictReader(file))
    return found


def latencies(directory: Path) -> Lines:
    """Read the latencies of all requests, each case once.

    Where several were measured, ``scaling`` counts, sums in each other's memory before NCCL's; then files by name.
    """
    decoded, scaled = (sum(read(directory, kind).values(), Lines()) for kind in ("decode", "scaling"))
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for line in (*sorted(scaled, key=lambda line: line["sums"] != "peers"), *decoded):
        found.setdefault(_case(line), line)
    return list(found.values())


def _case(line: dict[str, str]) -> tuple[str, ...]:
    return tuple(line[name] for name in ("model", "data_type", "gpus", "batch", "input_length", "output_length"))


def scaling(lines: Lines) -> tuple[list[str], list[list[str]]]:
    """Put the latencies on 1, 2, ... GPUs side by side: columns, and rows of the models that have several."""
    found = {_case(line): line for line in lines}
    counts = sorted({int(line["gpus"]) for line in lines})
    keys = dict.fromkeys((case[:2], case[3:]) for case in found if case[2] != "1")
    columns = ["Model", "Weights", "Batch", "Input", "Output"]
    for count in counts:
        columns += [f"{count} GPU, ms", "x floor"] + ["speed-up"] * (count > 1)
    rows = []
    for model, case in keys:
        row, one = [*model, *case], found.get((*model, "1", *case))
        for count in counts:
            line = found.get((*model, str(count), *case))
            row += [line["ours_ms"], line["ratio"]] if line else ["", ""]
            if count > 1:
                row.append(f"{float(one['ours_ms']) / float(line['ours_ms']):.2f}" if one and line else "")
        rows.append(row)
    return columns, rows


def use_cases(lines: Lines) -> Lines:
    """Pick the published cases of one row a request, by model, case, number of GPUs and format."""
    chosen = [line for line in lines if line["batch"] == "1" and _lengths(line) in _USE_CASES]
    models, cases = list(SIZES), list(_USE_CASES)
    return sorted(
        chosen,
        key=lambda line: (
            models.index(line["model"]),
            cases.index(_lengths(line)),
            int(line["gpus"]),
            line["data_type"],
        ),
    )


def _lengths(line: dict[str, str]) -> tuple[str, str]:
    return line["input_length"], line["output_length"]


def write_page(directory: Path, latencies: Lines, picture: Path) -> str:
    """Write all of it as Markdown."""
    parts = ["# Measured on GPUs", f"![latency by model and GPUs]({os.path.relpath(picture, directory)})"]
    columns = ("Model", "Use case", "Input", "Output", "Average latency, ms", "TP", "PP", "GPUs", "Weights", "x floor")
    rows = [
        [line["model"], _USE_CASES[_lengths(line)], *_lengths(line), line["ours_ms"]]
        + [line["gpus"], "1", line["gpus"], line["data_type"], line["ratio"]]
        for line in use_cases(latencies)
    ]
    parts.append(markdown_table(columns, rows, columns[2:]))
    names, rows = scaling(latencies)
    if rows:
        parts.append(f"## By number of GPUs\n\n{markdown_table(names, rows, names[2:])}")
    for kind, title in _TITLES.items():
        for name, lines in read(directory, kind).items():
            names = [column for column in lines[0] if column not in _WHERE]
            where = ", ".join(f"{column} {lines[0][column]}" for column in _WHERE)
            table = markdown_table(names, [[line[column] for column in names] for line in lines], names)
            parts.append(f"## {title}: {name}\n\n{where}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def draw(latencies: Lines, path: Path) -> None:
    """Draw the use cases' latency beside the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [line for line in use_cases(latencies) if line["data_type"] == "fp16"]
    figure, axes = pyplot.subplots(1, len(_USE_CASES), figsize=(14, 4.8))
    for axis, (lengths, title) in zip(axes, _USE_CASES.items(), strict=True):
        here = [line for line in reversed(lines) if _lengths(line) == lengths]
        labels = [f"{line['model']}, {line['gpus']} GPU{'s' * (line['gpus'] != '1')}" for line in here]
        ours, floors = ([float(line[column]) for line in here] for column in ("ours_ms", "floor_ms"))
        bars = axis.barh(labels, ours, color="#9fc0ea", label="engine")
        axis.barh(labels, floors, color="#1f5fbf", label="floor")
        axis.bar_label(
            bars,
            padding=3,
            labels=[f"{value:,.0f} ms, x{value / floor:.2f}" for value, floor in zip(ours, floors, strict=True)],
        )
        axis.set_xlim(0, 1.7 * max(ours, default=1.0))
        axis.set_title(f"{title}: {lengths[0]} in, {lengths[1]} out", loc="left", fontsize=11)
        axis.set_xlabel("latency of a request, ms (x floor)")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str]) -> None:
    """Read, write, draw."""
    arguments = ReportArguments.from_argv(argv, description=__doc__)
    directory = arguments.directory
    if not (found := latencies(directory)):
        raise ConfigError(f"{directory} has no decode*.csv", "benchmarks.gpu.decode writes them: --csv")
    (directory / "report.md").write_text(write_page(directory, found, arguments.picture))
    draw(found, arguments.picture)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu.report"))
