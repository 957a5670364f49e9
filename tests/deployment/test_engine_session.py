"""What an engine's children have named in shared memory is removed with them, whichever of them ended first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.servers.served import wait_for

from deployment.engines.process import EngineServer
from deployment.life.leftovers import create_state, sweep

_PROGRAM = """
import multiprocessing, os, signal, time
from multiprocessing import shared_memory

def die():
    lock = multiprocessing.get_context("spawn").Lock()
    region = shared_memory.SharedMemory(create=True, size=4096)
    print(f"sem.{lock._semlock.name[1:]} {region.name}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=die)
    child.start()
    child.join()
    print("joined", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("ending", ["stop", "sweep"])
def test_what_a_child_that_has_died_had_named_is_removed(tmp_path: Path, ending: str) -> None:
    """As vLLM's spawned processes do; nothing has it mapped any more, and no name says whose it is."""
    state = create_state(tmp_path / "endpoint.json")
    directory, log = Path(state.directory), tmp_path / "server.log"
    program = directory / "program.py"
    program.write_text(_PROGRAM)
    server = EngineServer("vLLM", [sys.executable, str(program)], os.environ, directory, log, False)
    try:
        wait_for(lambda: "joined" in log.read_text())
        regions = [Path("/dev/shm") / name for name in log.read_text().split()[:2]]
        assert all(region.exists() for region in regions)
        if ending == "stop":
            server.stop(None)
        else:
            assert not sweep(state)
        assert not [region for region in regions if region.exists()]
    finally:
        server.stop(None)
        sweep(state)
