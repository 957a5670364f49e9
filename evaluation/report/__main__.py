"""``python3 -m evaluation.report``."""

from __future__ import annotations

from evaluation.report.write import main
from handover.errors import exit_status

if __name__ == "__main__":
    raise SystemExit(exit_status(main, "report"))
