"""Tell a run's figures to MLflow or Weights & Biases: ``python3 -m evaluation.track --results=... --mlflow=URI``.

Figures that are not reliable are left out and named. The same figures are told once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from evaluation.arguments import TrackArguments
from evaluation.trackers import mlflow_run, wandb_run
from evaluation.trackers.tracked import read_tracked
from handover.durable import write_atomically
from handover.errors import exit_status
from handover.manifest import Manifest, record_files


def main(argv: Sequence[str]) -> None:
    """Tell the figures, and note where."""
    given = TrackArguments.from_argv(argv, description=__doc__)
    run = read_tracked(given.results, given.report, given.title, given.experiment)
    for name, reason in run.left_out.items():
        sys.stdout.write(f"left out: {name}, {reason}\n")
    told = {}
    if given.mlflow is not None:
        told["mlflow"] = mlflow_run.track(run, given.mlflow)
    if given.wandb is not None:
        told["wandb"] = wandb_run.track(run, given.wandb, given.results / "wandb")
    for name, place in told.items():
        sys.stdout.write(f"{name}: {len(run.figures)} figures, {place}\n")
    given.output.mkdir(parents=True, exist_ok=True)
    write_atomically(given.output / "tracking.json", json.dumps({"identity": run.identity, **told}, indent=1) + "\n")
    made_from = {"results": str(given.results), "title": given.title}
    Manifest("tracking", record_files(given.output), made_from).write(given.output)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "track"))
