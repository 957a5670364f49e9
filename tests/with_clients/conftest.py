"""These tests need the clients themselves: ``make test-clients`` installs them beside the project's own packages."""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("litellm") else ["test_*.py"]
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network for prices when it is imported
