"""``python3 -m evaluation.load``."""

from __future__ import annotations

from evaluation.speed.load_sweep import main
from handover.errors import exit_status

if __name__ == "__main__":
    raise SystemExit(exit_status(main, "load"))
