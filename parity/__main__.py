"""``python3 -m parity``."""

from __future__ import annotations

from handover.errors import exit_status
from parity.run import main

if __name__ == "__main__":
    raise SystemExit(exit_status(main, "parity"))
