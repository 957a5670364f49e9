"""``python -m launcher status|logs|cancel RESULTS_DIR``: look after a run from its files on disk alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from handover.errors import exit_status
from launcher import jobs

ACTIONS = {"status": jobs.status, "logs": jobs.logs, "cancel": jobs.cancel}


def main(argv: Sequence[str]) -> None:
    """Print what the action has to say, one line a fact."""
    parser = argparse.ArgumentParser(prog="python -m launcher", description=__doc__)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("results", type=Path, help="results directory of a run, or one above it")
    options = parser.parse_args(list(argv))
    for line in ACTIONS[options.action](options.results):
        print(line)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "launcher"))
