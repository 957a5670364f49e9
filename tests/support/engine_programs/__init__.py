"""Executables that stand in for the programs of other engines: ``vllm`` computes with transformers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PLACE = Path(__file__).resolve().parent
PATH = os.pathsep.join((str(PLACE), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
"""On which ``vllm`` is the stand-in, and ``python3`` the interpreter of the tests."""
