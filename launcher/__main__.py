"""``python -m launcher status|logs|cancel|restart|doctor [RESULTS_DIR]``: look after a run from its files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from handover.errors import SlipwayError, exit_status
from launcher.doctor import Finding, examine
from launcher.submit import jobs, restarting

ACTIONS: dict[str, Callable[[Path], Iterable[object]]] = {
    "status": jobs.status,
    "logs": jobs.logs,
    "cancel": jobs.cancel,
    "restart": restarting.restart,
}


def main(argv: Sequence[str]) -> None:
    """Print what the action has to say, one line a fact."""
    parser = argparse.ArgumentParser(prog="python -m launcher", description=__doc__)
    parser.add_argument("action", choices=[*ACTIONS, "doctor"])
    parser.add_argument(
        "results", type=Path, nargs="?", default=Path("results"), help="results directory of a run, or one above it"
    )
    for name in ("partition", "account"):
        parser.add_argument(f"--{name}", help="of the jobs; doctor tries a node of it")
    options = parser.parse_args(list(argv))
    given = {name: getattr(options, name) for name in ("partition", "account") if getattr(options, name)}
    if options.action == "doctor":
        lines: Iterable[object] = examine(options.results, [f"--{name}={value}" for name, value in given.items()])
    else:
        lines = ACTIONS[options.action](options.results)
    bad = 0
    for line in lines:
        print(line, flush=True)
        bad += isinstance(line, Finding) and line.state == "bad"
    if bad:
        raise SlipwayError(f"{bad} of the checks failed")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "launcher"))
