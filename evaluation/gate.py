"""Decide by thresholds whether a deployment may go live: ``python3 -m evaluation.gate RESULTS --thresholds=FILE``.

The file is YAML: figures (shell patterns over the names of ``evaluation.measurements``) with their limits::

    thresholds:
      lambada.last_token_accuracy: {at_least: 0.45, max_drop: 0.005}
      load.60-20_concurrency4.e2e_p99_ms: {at_most: 800, max_rise_percent: 10}

``at_least`` and ``at_most`` are absolute; the others compare with a stored report (--baseline). Prints GO, NO-GO or
INCONCLUSIVE with every reason; the exit status is 0, 1 or 3.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from evaluation.measurements import Measurement, Report, read_report
from handover.errors import ConfigError, exit_status, nearest
from handover.manifest import write_atomically

GO, NO_GO, INCONCLUSIVE = "GO", "NO-GO", "INCONCLUSIVE"
EXIT_STATUS = {GO: 0, NO_GO: 1, INCONCLUSIVE: 3}
_Limit = Callable[[float, float], float]

# Limit that a value must not pass, from the number in the file and the baseline's value.
_FLOORS: dict[str, _Limit] = {
    "at_least": lambda number, base: number,
    "max_drop": lambda number, base: base - number,
    "max_drop_percent": lambda number, base: base * (1 - number / 100),
}
_CEILINGS: dict[str, _Limit] = {
    "at_most": lambda number, base: number,
    "max_rise": lambda number, base: base + number,
    "max_rise_percent": lambda number, base: base * (1 + number / 100),
}
_ABSOLUTE = ("at_least", "at_most")


@dataclass(frozen=True)
class Check:
    """One limit on one figure, decided.

    Attributes:
        figure: name, or the pattern that no figure matches.
        rule: ``at_least 0.45``.
        verdict: GO, NO-GO or INCONCLUSIVE.
        reason: with the numbers.
    """

    figure: str
    rule: str
    verdict: str
    reason: str


def main(argv: Sequence[str]) -> None:
    """Decide, print, write and exit with the verdict's status."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.gate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="results directory of the run")
    parser.add_argument("--thresholds", type=Path, required=True, help="YAML file")
    parser.add_argument("--baseline", type=Path, help="results directory of the run to compare with")
    parser.add_argument("--output", type=Path, help="JSON file for the verdict and its reasons")
    given = parser.parse_args(list(argv))
    thresholds = read_thresholds(given.thresholds)
    report = read_report(given.results)
    baseline = read_report(given.baseline) if given.baseline is not None else None
    checks = list(decide(report, thresholds, baseline))
    outcome = verdict(checks)
    for check in checks:
        sys.stdout.write(f"{check.verdict:<12} {check.figure}  {check.rule}: {check.reason}\n")
    sys.stdout.write(f"{outcome}\n")
    if given.output is not None:
        content = {"verdict": outcome, "checks": [dataclasses.asdict(check) for check in checks]}
        content |= {"model_digests": list(report.digests)}
        write_atomically(given.output, json.dumps(content, indent=1) + "\n")
    if EXIT_STATUS[outcome]:
        raise SystemExit(EXIT_STATUS[outcome])


def read_thresholds(path: Path) -> dict[str, dict[str, float]]:
    """Read the YAML file.

    Raises:
        ConfigError: it cannot be read, holds nothing, an unknown rule or something that is no number.
    """
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    thresholds = content.get("thresholds") if isinstance(content, dict) else None
    if not isinstance(thresholds, dict) or not thresholds:
        raise ConfigError(f"{path} has no thresholds", "write thresholds: {<figure>: {at_least: <number>}}")
    for figure, rules in thresholds.items():
        if not isinstance(rules, dict) or not rules:
            raise ConfigError(f"{path}: {figure} has no rule", nearest("", [*_FLOORS, *_CEILINGS]))
        for rule, number in rules.items():
            if rule not in _FLOORS and rule not in _CEILINGS:
                raise ConfigError(f"{path}: {figure}: there is no rule '{rule}'", nearest(rule, [*_FLOORS, *_CEILINGS]))
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
                raise ConfigError(f"{path}: {figure}: {rule} is {number!r}", "it is a number")
    return thresholds


def decide(report: Report, thresholds: Mapping[str, Mapping[str, float]], baseline: Report | None) -> Iterable[Check]:
    """Decide every rule on every figure that its pattern matches; a pattern that matches none is inconclusive."""
    for pattern, rules in thresholds.items():
        names = [name for name in report.figures if fnmatchcase(name, pattern)]
        for rule, number in rules.items():
            shown = f"{rule} {number:g}"
            if not names:
                yield Check(pattern, shown, INCONCLUSIVE, "the report has no such figure")
            for name in names:
                base = baseline.figures.get(name) if baseline is not None else None
                yield _check(report.figures[name], shown, rule, number, base)


def verdict(checks: Sequence[Check]) -> str:
    """NO-GO if any check says so, else INCONCLUSIVE if any says so, else GO."""
    found = {check.verdict for check in checks}
    return NO_GO if NO_GO in found else INCONCLUSIVE if INCONCLUSIVE in found or not checks else GO


def _check(figure: Measurement, shown: str, rule: str, number: float, base: Measurement | None) -> Check:
    if rule not in _ABSOLUTE and base is None:
        return Check(figure.name, shown, INCONCLUSIVE, "there is no baseline for this figure")
    is_floor = rule in _FLOORS
    limit = (_FLOORS | _CEILINGS)[rule](number, base.value if base is not None else 0.0)
    excess = (limit - figure.value) if is_floor else (figure.value - limit)
    against = "" if rule in _ABSOLUTE or base is None else f" (baseline {base.value:.6g})"
    reason = f"{figure.value:.6g}, limit {limit:.6g}{against}"
    if excess <= 0:
        return Check(figure.name, shown, GO, reason)
    noise = _noise(figure, None if rule in _ABSOLUTE else base)
    if excess <= noise:
        return Check(figure.name, shown, INCONCLUSIVE, f"{reason}: past it by less than the noise of {noise:.3g}")
    return Check(figure.name, shown, NO_GO, reason)


def _noise(figure: Measurement, base: Measurement | None) -> float:
    """Half of the 95% interval of what is compared; none between two runs over the same samples."""
    if base is not None and figure.source and figure.source == base.source:
        return 0.0
    return math.hypot(figure.noise or 0.0, base.noise or 0.0 if base is not None else 0.0)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "gate"))
