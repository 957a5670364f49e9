"""Wait until stages of the same run have made what their plans say: ``python -m launcher.run.after PLAN.json ...``.

A server of Kubernetes that stays begins so, as its pod is there as soon as the pods of those stages are. Standard
library only.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from time import sleep as pause

from launcher.plan.plan import StagePlan
from launcher.run import console
from launcher.run.artefact import is_current

_PAUSE_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Wait for the results of the plans in the given files, in order."""
    parser = argparse.ArgumentParser(prog="launcher.run.after", description=main.__doc__)
    parser.add_argument("plans", nargs="+", type=Path, help="plan files")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the first process of a pod ignores it
    for file in parser.parse_args(list(argv)).plans:
        plan = StagePlan.from_json(file.read_text())
        said = False
        while not is_current(plan):
            if not said:
                console.say_error(f"waiting for {plan.stage}: {plan.output}")
            said = True
            pause(_PAUSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
