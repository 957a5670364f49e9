"""sglang-router and vllm-router as they are before two stand-ins for vLLM: a server that is killed, and restarts.

``ROUTERS`` names the ``bin`` of a virtual environment that has both (``make test-routers``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine_programs import PATH
from support.servers.replicated import Clients, Replicated, Stream, noted_as_run, stopped_at_last
from support.servers.served import wait_for

from deployment.arguments import EngineArguments
from launcher.submit.restarting import restart

PROGRAMS = Path(os.environ["ROUTERS"])
COMMANDS = {
    "sglang": (f"{PROGRAMS}/python3", "-m", "sglang_router.launch_router"),
    "vllm": (f"{PROGRAMS}/vllm-router",),
}


@pytest.fixture(params=COMMANDS)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Replicated]:
    model, deployment = tmp_path / "model", tmp_path / "deployment"
    model.mkdir()
    (model / "config.json").write_text("{}")
    files = deployment / "endpoint.json", deployment / "server.log"
    server = EngineArguments("vllm", model, "tiny", *files, data_type="fp32", restart=1, exit_timeout_s=5)
    body = {"model": "org/tiny", "prompt": "abc", "max_tokens": 3, "temperature": 0}
    settings = {"router": request.param, "router_command": COMMANDS[request.param], "lasting": True}
    with stopped_at_last(Replicated(server, body, {"PATH": PATH, "STAND_IN": "counts"}, **settings)) as served:
        yield served


def test_a_restart_loses_no_request_and_a_killed_server_its_own(served: Replicated) -> None:
    clients = Clients(served, 4, max_tokens=5)
    said = list(restart(noted_as_run(served)))
    streams = clients.end()
    assert all(stream.is_whole for stream in streams), {stream.error for stream in streams}
    assert said[-1].startswith("  restarted")
    assert len({stream.server for stream in streams}) >= 2  # one prompt keeps to one server, until that is restarted
    streams = [Stream(served, max_tokens=60, prompt=f"{number} of a client") for number in range(8)]
    wait_for(lambda: all(stream.server for stream in streams))
    victim = streams[0].server
    os.kill(int(victim), signal.SIGKILL)
    for stream in streams:
        stream.join()
    assert all(stream.is_whole == (stream.server != victim) for stream in streams)
    wait_for(lambda: served.serving() == 2 and served.is_answered())
