"""Decide by thresholds whether a deployment may go live: ``python3 -m evaluation.gate RESULTS --thresholds=FILE``.

The file is YAML: figures (shell patterns over the names of ``evaluation.report.measurements``) with their limits::

    thresholds:
      lambada.last_token_accuracy: {at_least: 0.45, max_drop: 0.005}
      load.60-20_concurrency4.e2e_p99_ms: {at_most: 800, max_rise_percent: 10}

``at_least`` and ``at_most`` are absolute; the others compare with a stored report (--baseline). An evaluation that has
a verdict of its own (parity) counts too. Prints GO, NO-GO or INCONCLUSIVE with every reason; the exit status is 0, 1
or 3.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from evaluation.arguments import GateArguments
from evaluation.report.measurements import Measurement, Report, read_report
from evaluation.report.thresholds import CEILINGS, FLOORS, read_thresholds
from evaluation.tasks.metric import FAILS, HOLDS
from handover.durable import write_atomically
from handover.errors import exit_status

GO, NO_GO, INCONCLUSIVE = "GO", "NO-GO", "INCONCLUSIVE"
_OF_EVALUATIONS = {HOLDS: GO, FAILS: NO_GO, INCONCLUSIVE: INCONCLUSIVE}
EXIT_STATUS = {GO: 0, NO_GO: 1, INCONCLUSIVE: 3}
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
    given = GateArguments.from_argv(argv, description=__doc__)
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
        given.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(given.output, json.dumps(content, indent=1) + "\n")
    if EXIT_STATUS[outcome]:
        raise SystemExit(EXIT_STATUS[outcome])


def decide(report: Report, thresholds: Mapping[str, Mapping[str, float]], baseline: Report | None) -> Iterable[Check]:
    """Decide every rule on every figure that its pattern matches, and what the evaluations say of themselves.

    What should be there and is not is inconclusive: a pattern that matches nothing, a point that failed, a figure that
    the baseline has. So is a report over several models.
    """
    if len(report.digests) > 1:
        reason = f"the figures belong to {len(report.digests)} models: {', '.join(d[:19] for d in report.digests)}"
        yield Check("model_digest", "one model", INCONCLUSIVE, reason)
    for task, said, reasons in report.verdicts:
        yield Check(task, "verdict", _OF_EVALUATIONS.get(said, NO_GO), f"{said.lower()}: {reasons}")
    for pattern, rules in thresholds.items():
        names = [name for name in report.figures if fnmatchcase(name, pattern)]
        lacking = dict(_lacking(pattern, report, baseline))
        for rule, number in rules.items():
            shown = f"{rule} {number:g}"
            if not names and not lacking:
                yield Check(pattern, shown, INCONCLUSIVE, "the report has no such figure")
            for name, reason in lacking.items():
                yield Check(name, shown, INCONCLUSIVE, reason)
            for name in names:
                base = baseline.figures.get(name) if baseline is not None else None
                yield _check(report.figures[name], shown, rule, number, base)


def _lacking(pattern: str, report: Report, baseline: Report | None) -> Iterable[tuple[str, str]]:
    """Figures that a pattern means and that the report has not, with the reason."""
    column = pattern.rpartition(".")[2]
    for place, error in report.failures.items():
        if fnmatchcase(f"{place}.{column}", pattern):
            yield f"{place}.{column}", f"the point failed: {error}"
    for name in baseline.figures if baseline is not None else ():
        if fnmatchcase(name, pattern) and name not in report.figures:
            yield name, "the baseline has it, the report has not"


def verdict(checks: Sequence[Check]) -> str:
    """NO-GO if any check says so, else INCONCLUSIVE if any says so, else GO."""
    found = {check.verdict for check in checks}
    return NO_GO if NO_GO in found else INCONCLUSIVE if INCONCLUSIVE in found or not checks else GO


def _check(figure: Measurement, shown: str, rule: str, number: float, base: Measurement | None) -> Check:
    if rule not in _ABSOLUTE and base is None:
        return Check(figure.name, shown, INCONCLUSIVE, "there is no baseline for this figure")
    doubt = figure.doubt or (base.doubt if rule not in _ABSOLUTE and base is not None else "")
    if doubt or not math.isfinite(figure.value):
        return Check(figure.name, shown, INCONCLUSIVE, f"{figure.value:.6g}: {doubt or 'it is not a number'}")
    is_floor = rule in FLOORS
    limit = (FLOORS | CEILINGS)[rule](number, base.value if base is not None else 0.0)
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
