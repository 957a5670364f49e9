"""The console command ``slipway``: ``python main.py`` and the project's other programs, from any directory.

slipway [key=value ...]                      python main.py [key=value ...]
slipway status|logs|cancel|doctor RESULTS    python -m launcher status|logs|cancel|doctor RESULTS
slipway inspect|generate|request|... ...     python -m export_scripts.inspect ..., python -m evaluation.generate ...
slipway commands                             list these names
slipway --version
"""

from __future__ import annotations

import runpy
import sys

from slipway import PROJECT_DIR

_LAUNCHER = "launcher"
PROGRAMS = {
    **dict.fromkeys(("status", "logs", "cancel", "doctor"), _LAUNCHER),
    "inspect": "export_scripts.inspect",
    "openai": "deployment.openai",
    **{name: f"evaluation.{name}" for name in ("generate", "request", "compare", "gate", "recommend", "recompute")},
}
"""First argument of ``slipway``, and the module that it runs."""


def main() -> None:
    """Run what the first argument names; every other command line belongs to main.py."""
    sys.path.insert(0, str(PROJECT_DIR))
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first == "--version":
        from handover.provenance import VERSION

        sys.stdout.write(f"slipway {VERSION}\n")
    elif first == "commands":
        for name, module in PROGRAMS.items():
            sys.stdout.write(f"slipway {name:<10} python -m {module}{f' {name}' if module == _LAUNCHER else ''}\n")
    elif first in PROGRAMS:
        if PROGRAMS[first] != _LAUNCHER:  # whose own first argument is this word
            del sys.argv[1]
        runpy.run_module(PROGRAMS[first], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(PROJECT_DIR / "main.py"), run_name="__main__")
