"""What is told to a tracker: figures, what they are of, and files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from evaluation.report.measurements import read_report
from handover.errors import ConfigError
from handover.provenance import VERSION

_REPORT = ("report.html", "report.md", "results.yml", "bom.cdx.json")


@dataclass(frozen=True)
class Tracked:
    """One run.

    Attributes:
        experiment: that it belongs to.
        figures: by name; those that are not reliable are left out, and named in ``left_out``.
        left_out: figures that are not reliable, with the reason.
        facts: what the figures are of.
        files: of the report.
    """

    title: str
    experiment: str
    figures: Mapping[str, float]
    left_out: Mapping[str, str]
    facts: Mapping[str, str]
    files: tuple[Path, ...]

    @property
    def identity(self) -> str:
        """Digest of what was measured: the same figures are told once, however often they are reported."""
        lines = [f"{name}={value!r}" for name, value in sorted({**self.figures, **self.facts}.items())]
        return hashlib.sha256("\n".join([self.title, *lines]).encode()).hexdigest()[:16]


def read_tracked(results: Path, report: Path, title: str, experiment: str) -> Tracked:
    """Read a run's figures; ArtefactError: nothing was measured there."""
    found = read_report(results)
    doubtful = {name: figure.doubt for name, figure in found.figures.items() if figure.doubt}
    facts = {"model_digest": ", ".join(found.digests), "machine": "; ".join(found.machines), "slipway": VERSION}
    return Tracked(
        title=title,
        experiment=experiment,
        figures={name: figure.value for name, figure in found.figures.items() if name not in doubtful},
        left_out=doubtful,
        facts={name: text for name, text in facts.items() if text} | {f"verdict.{e[0]}": e[1] for e in found.verdicts},
        files=tuple(path for name in _REPORT if (path := report / name).is_file()),
    )


def load(name: str, key: str, extra: str) -> ModuleType:
    """Import a tracker's library; ConfigError: it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{key} is given, and this Python lacks the library: {error}",
            f"pip install 'slipway[{extra}]', also into the container of the stage",
        ) from None
