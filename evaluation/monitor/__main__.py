"""``python3 -m evaluation.monitor``."""

from __future__ import annotations

from evaluation.monitor.run import main
from handover.errors import exit_status

if __name__ == "__main__":
    raise SystemExit(exit_status(main, "monitor"))
