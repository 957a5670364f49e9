"""One real Slurm for all tests of this directory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SlurmCluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Two idle nodes; only the commands that get ``client_environment()`` see them.

    Not below pytest's own temporary directory: the paths of sockets must stay short.
    """
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with SlurmCluster(directory) as cluster:
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)
