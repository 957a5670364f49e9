"""What a report is signed with: the files that it reports, and the figures of the model's card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evaluation.report.data import Findings
from evaluation.report.published import PARTIAL
from handover.manifest import FILE_NAME, REPLACED, SIGNATURE

_MEASURED = ("evaluation", "benchmark")
_SERVED = "model_repo"


def reported_files(results: Path) -> dict[str, Path]:
    """Name every result that lies there, and what the served model is told by.

    How the stages ended is not among them: the runner goes on writing that while the report is made.
    """
    below = (path for name in _MEASURED for path in sorted((results / name).rglob("*")) if path.is_file())
    found = [path for path in below if not any(map(_is_left, path.relative_to(results).parts))]
    found += [results / _SERVED / name for name in (FILE_NAME, SIGNATURE) if (results / _SERVED / name).is_file()]
    return {path.relative_to(results).as_posix(): path for path in found}


def card_figures(findings: Findings) -> Iterator[dict[str, object]]:
    """Return the figures of the evaluations as CycloneDX has them; one that is missing or unreliable is left out."""
    for evaluation in findings.evaluations:
        for metric in evaluation.metrics if not evaluation.doubt else ():
            if metric.value is None:
                continue
            figure: dict[str, object] = {
                "type": f"{evaluation.name} {metric.name}",
                "value": repr(metric.value),
                "slice": f"{evaluation.data.get('known_as') or evaluation.data.get('file', '')} (n={metric.n})",
            }
            if metric.interval is not None:
                low, high = metric.interval
                figure["confidenceInterval"] = {"lowerBound": repr(low), "upperBound": repr(high)}
            yield figure


def _is_left(name: str) -> bool:
    """Whether a file or a directory is of work that is not finished, or of results that later ones have replaced."""
    return name.startswith(".") or name.endswith(PARTIAL) or REPLACED in name
