"""Put what was measured on GPUs into one page and one picture, beside the CSVs that it comes from.

    python3 -m benchmarks.gpu_report --directory=results/reference/h200

Reads every decode*.csv of benchmarks.gpu_decode, prefill*.csv of gpu_prefill, load*.csv of gpu_load, kernels*.csv of
gpu_kernels and weights*.csv of gpu_weights there; writes report.md and latency.png: the use cases of NVIDIA's published
tables at one row a request.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu_sizes import SIZES
from evaluation.markdown import markdown_table
from handover.arguments import ScriptArguments
from handover.errors import ConfigError, exit_status

_USE_CASES = {("60", "20"): "Question answering", ("225", "20"): "Intent classification", ("200", "200"): "Translation"}
_WHERE = ("gpu", "torch", "commit")  # the same in each row of a file
_TITLES = {"decode": "Latency of a request", "prefill": "Inputs", "load": "Load", "kernels": "Products"}
_TITLES |= {"weights": "Loading"}
Lines = list[dict[str, str]]


@dataclass(frozen=True)
class ReportArguments(ScriptArguments):
    """Where the CSVs are."""

    directory: Path = field(
        default=Path("results/reference/h200"), metadata={"help": "of the CSVs; report.md and latency.png go there too"}
    )


def read(directory: Path, kind: str) -> dict[str, Lines]:
    """Read the files of a kind, by name."""
    found = {}
    for path in sorted(directory.glob(f"{kind}*.csv")):
        with path.open(newline="") as file:
            found[path.name] = list(csv.DictReader(file))
    return found


def use_cases(decoded: dict[str, Lines]) -> Lines:
    """Pick the published cases of one row a request, by model, case, number of GPUs and format."""
    lines = [line for lines in decoded.values() for line in lines]
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


def write_page(directory: Path, decoded: dict[str, Lines]) -> str:
    """Write all of it as Markdown."""
    parts = ["# Measured on GPUs", "![latency by model and GPUs](latency.png)"]
    columns = ("Model", "Use case", "Input", "Output", "Average latency, ms", "TP", "PP", "GPUs", "Weights", "x floor")
    rows = [
        [line["model"], _USE_CASES[_lengths(line)], *_lengths(line), line["ours_ms"]]
        + [line["gpus"], "1", line["gpus"], line["data_type"], line["ratio"]]
        for line in use_cases(decoded)
    ]
    parts.append(markdown_table(columns, rows, columns[2:]))
    for kind, title in _TITLES.items():
        for name, lines in read(directory, kind).items():
            names = [column for column in lines[0] if column not in _WHERE]
            where = ", ".join(f"{column} {lines[0][column]}" for column in _WHERE)
            table = markdown_table(names, [[line[column] for column in names] for line in lines], names)
            parts.append(f"## {title}: {name}\n\n{where}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def draw(decoded: dict[str, Lines], path: Path) -> None:
    """Draw the use cases' latency beside the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [line for line in use_cases(decoded) if "int8" not in line["data_type"]]
    figure, axes = pyplot.subplots(1, len(_USE_CASES), figsize=(14, 4.5))
    for axis, (lengths, title) in zip(axes, _USE_CASES.items(), strict=True):
        here = [line for line in lines if _lengths(line) == lengths]
        labels = [f"{line['model']}\n{line['gpus']} GPU" for line in here]
        axis.bar(labels, [float(line["ours_ms"]) for line in here], color="tab:blue", label="engine")
        axis.bar(labels, [float(line["floor_ms"]) for line in here], color="tab:gray", label="floor")
        axis.set_title(f"{title}: {lengths[0]} in, {lengths[1]} out")
        axis.set_ylabel("latency, ms")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str]) -> None:
    """Read, write, draw."""
    directory = ReportArguments.from_argv(argv, description=__doc__).directory
    if not (decoded := read(directory, "decode")):
        raise ConfigError(f"{directory} has no decode*.csv", "benchmarks.gpu_decode writes them: --csv")
    (directory / "report.md").write_text(write_page(directory, decoded))
    draw(decoded, directory / "latency.png")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu_report"))
