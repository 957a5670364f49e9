"""Slipway as an installed package: the whole project tree lies below this directory, under no other top-level name.

The modules keep the names that they have in a checkout (``launcher``, ``evaluation``, ...). ``slipway.cli`` puts this
directory at the front of the import path, where a checkout's root is for ``python main.py``.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent
PROJECT_DIR = _HERE if (_HERE / "main.py").is_file() else _HERE.parent
"""Directory of main.py: this one in an installed package, the one above in a checkout."""
