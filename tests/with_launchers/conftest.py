"""These tests need SkyPilot, NeMo-Run and Lepton's client: ``make test-launchers`` installs them by themselves."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "LAUNCHERS_PYTHON" in os.environ else ["test_*.py"]
