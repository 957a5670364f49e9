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
import sys
from collections.abc import Sequence

from evaluation.arguments import GateArguments
from evaluation.report.judgement import GO, INCONCLUSIVE, NO_GO, decide, verdict
from evaluation.report.measurements import read_report
from evaluation.report.thresholds import read_thresholds
from handover.durable import write_atomically
from handover.errors import exit_status

EXIT_STATUS = {GO: 0, NO_GO: 1, INCONCLUSIVE: 3}


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


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "gate"))
