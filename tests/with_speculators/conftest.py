"""These tests need speculators, the package: ``make test-speculators`` installs it beside the others."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from unittest.mock import Mock

collect_ignore_glob = [] if find_spec("speculators") else ["test_*.py"]
sys.modules.setdefault("datasets", Mock())  # its training reads by it, and it is imported with everything else
