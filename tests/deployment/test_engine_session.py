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
import multiprocessing, os, signal, sys, time
from multiprocessing import resource_tracker, shared_memory

def name():
    lock = multiprocessing.get_context("spawn").Lock()
    region = shared_memory.SharedMemory(create=True, size=4096)
    print(f"sem.{lock._semlock.name[1:]} {region.name}", flush=True)
    return lock, region

def die():
    kept = name()
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    if sys.argv[1] == "a child is dead":
        child = multiprocessing.get_context("spawn").Process(target=die)
        child.start()
        child.join()
    else:
        kept = name()
        os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
    print("named", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("case", "ending"), [("a child is dead", "stop"), ("a child is dead", "sweep"), ("the tracker is dead", "stop")]
)
def test_what_spawned_processes_have_named_is_removed(tmp_path: Path, case: str, ending: str) -> None:
    """As vLLM's do. No name says whose it is: a dead child has nothing mapped, and a dead tracker removes nothing."""
    state = create_state(tmp_path / "endpoint.json")
    directory, log = Path(state.directory), tmp_path / "server.log"
    program = directory / "program.py"
    program.write_text(_PROGRAM)
    server = EngineServer("vLLM", [sys.executable, str(program), case], os.environ, directory, log, False)
    try:
        wait_for(lambda: "named" in log.read_text())
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
