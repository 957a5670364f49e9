"""One real Slurm for all tests of this directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from support.slurm.cluster import SlurmCluster, started
from support.slurm.launches import DEMONSTRATION, FIVE_STAGES, HOSTILE, SMALL, Launched, launch, override, serve


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    with started() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def finished(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """All five stages, in a directory and under a name that a shell would trip over."""
    root = tmp_path_factory.mktemp("five") / HOSTILE
    root.mkdir()
    checkpoint = shutil.copy(DEMONSTRATION, root / "the checkpoint's.nemo")
    names = (override("export.run.model_train_name", HOSTILE), override("export.model.checkpoint_path", checkpoint))
    launched = launch(slurm, root / "re sults", FIVE_STAGES, *names, *SMALL)
    still_to_come = slurm.states(*launched.ids)
    assert "COMPLETED" not in still_to_come.values(), f"main.py did not return at once: {still_to_come}"
    slurm.wait_for_end(*launched.ids)
    return launched


@pytest.fixture(scope="session")
def limited(slurm: SlurmCluster, finished: Launched, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A server with the shortest time limit there is; begun early, as Slurm looks at the clock every 30 s only."""
    return serve(slurm, finished, tmp_path_factory.mktemp("limited"), "deployment.run.time_limit=0:01:00")
