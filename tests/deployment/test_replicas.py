"""Several servers of one model behind a real HAProxy: stand-ins for vLLM, two of them, of which one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.engine_programs import PATH
from support.servers.replicated import Clients, Replicated, Stream, noted_as_run, stopped_at_last
from support.servers.served import wait_for

from deployment.arguments import EngineArguments
from deployment.life.background_probe import BackgroundProbe
from deployment.life.restart_request import RestartRequest
from deployment.processes.linux import command_line
from deployment.replicas import health, rolling
from deployment.replicas.haproxy import render
from deployment.replicas.health import Health
from deployment.replicas.replica import ChildReplica, Place, parts_of_cores
from deployment.replicas.router import Front, find_program
from deployment.replicas.summed import SummedPages
from handover.errors import ArtefactError, ConfigError, ServerError
from launcher.submit.restarting import restart

SERVICES = {"http": 8000, "grpc": 8001, "openai": 9000}
BODY = {"model": "org/tiny", "prompt": "abc", "max_tokens": 3, "temperature": 0}


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_haproxy_takes_the_configuration_without_a_warning(tmp_path: Path, host: str) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(render(Front(host, SERVICES, 8002, 8003, 3, "X-Session-Id"), tmp_path / "socket"))
    checked = subprocess.run(
        [find_program("haproxy", "HAProxy"), "-c", "-f", str(file)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stdout + checked.stderr
    assert file.read_text().count("server replica") == 3 * 2 * len(SERVICES)


def test_a_header_that_would_be_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="no name of a header"):
        render(Front("127.0.0.1", SERVICES, 8002, 8003, 2, "X } or { always_true"), Path("socket"))


PAGE = """\
# HELP nv_inference_count Number of inferences performed
# TYPE nv_inference_count counter
nv_inference_count{{model="gpt",version="1"}} {count}
# HELP vllm:e2e Seconds of a request
# TYPE vllm:e2e histogram
vllm:e2e_bucket{{le="1.0"}} {count}
vllm:e2e_bucket{{le="+Inf"}} {count}
vllm:e2e_sum {sum}
vllm:e2e_count {count}
# HELP vllm:kv_cache_usage_perc Share of the pages in use
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} {share}
"""


def test_metrics_are_sums_that_go_on_when_a_server_begins_again_and_gauges_with_a_number() -> None:
    summed = SummedPages()
    summed.add(0, "first", PAGE.format(count=3, sum=1.5, share=0.25))
    summed.add(1, "first", PAGE.format(count=4, sum=0.25, share=0.5))
    summed.add(1, "second", PAGE.format(count=1, sum=0.125, share=0.75))
    page = summed.render({0: True, 1: True})
    lines = page.splitlines()
    assert 'nv_inference_count{model="gpt",version="1"} 8' in lines
    assert {"vllm:e2e_sum 1.875", "vllm:e2e_count 8", 'vllm:e2e_bucket{le="+Inf"} 8'} <= set(lines)
    assert 'vllm:kv_cache_usage_perc{engine="0",replica="1"} 0.75' in lines
    assert "slipway_replicas_serving 2" in lines
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert "error" not in checked.stdout + checked.stderr, checked  # its advice on names is another matter
    gone = summed.render({0: True, 1: False})
    assert 'replica="1"' not in gone and 'nv_inference_count{model="gpt",version="1"} 8' in gone


def test_cores_are_divided_and_shared_where_they_are_too_few() -> None:
    cores = {0, 1, 2, 5, 6}
    assert parts_of_cores(2, cores) == [[0, 1], [2, 5]]
    assert parts_of_cores(6, cores) == [[]] * 6


class Silent(BackgroundProbe):
    """A server that takes connections and does not answer."""

    def _probe(self) -> None:
        raise ServerError("no generation came back in time")


def test_a_replica_is_sick_if_neither_answers_nor_a_generation_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_SILENT_S", 0.05)

    def problem(sent: list[int]) -> str:
        found, looked = Health(lambda: Silent(1)), time.monotonic()
        while time.monotonic() < looked + 0.5:
            if said := found.find_problem(sent[0]):
                return said
            sent[0] += sent[1]
            time.sleep(0.01)
        return ""

    assert problem([0, 0]) == "no generation came back in time"
    assert problem([0, 1]) == ""  # it is busy: a probe would only wait behind others


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicated]:
    place = tmp_path_factory.mktemp("replicas")
    model, deployment = place / "model", place / "deployment"
    model.mkdir()
    (model / "config.json").write_text("{}")
    files = deployment / "endpoint.json", deployment / "server.log"
    server = EngineArguments("vllm", model, "tiny", *files, data_type="fp32", restart=1, exit_timeout_s=5)
    stand_in = {"PATH": PATH, "STAND_IN": "counts"}
    with stopped_at_last(Replicated(server, BODY, stand_in, affinity_header="X-Session-Id", lasting=True)) as served:
        yield served


def test_requests_go_to_the_server_with_the_fewest_and_those_of_a_session_to_one(served: Replicated) -> None:
    streams = [Stream(served, max_tokens=8) for _ in range(4)]
    of_session = [Stream(served, header="tea", max_tokens=4) for _ in range(3)]
    for stream in (*streams, *of_session):
        stream.join()
    assert all(stream.is_whole for stream in (*streams, *of_session))
    assert sorted(Counter(stream.server for stream in streams).values()) == [2, 2]
    assert len({stream.server for stream in of_session}) == 1
    assert served.serving() == 2
    assert served.metrics()["vllm:requests_total"] >= 7  # and what proved each of the two
    with urllib.request.urlopen(f"{served.url.removesuffix('/v1')}/metrics", timeout=180) as page:
        assert b"slipway_replicas 2" in page.read()


def test_a_killed_server_costs_its_own_streams_and_is_replaced(served: Replicated) -> None:
    streams = [Stream(served, max_tokens=60) for _ in range(4)]
    wait_for(lambda: all(stream.server for stream in streams))
    victim, counted = streams[0].server, served.metrics()["vllm:requests_total"]
    os.kill(int(victim), signal.SIGKILL)
    wait_for(lambda: any(stream.error for stream in streams))
    assert served.is_answered()  # at once, and by the other server
    for stream in streams:
        stream.join()
        assert stream.is_whole == (stream.server != victim)
        assert bool(stream.error) == (stream.server == victim)
    assert [stream.is_whole for stream in streams].count(True) == 2
    wait_for(lambda: served.serving() == 2)
    assert served.metrics()["vllm:requests_total"] > counted
    ready = served.text.count("ready ")
    os.kill(served.pids_of("deployment.engines.serve")[0], signal.SIGKILL)
    wait_for(lambda: "replacing" in served.text and served.text.count("ready ") > ready)


def test_a_rolling_restart_loses_no_request(served: Replicated, tmp_path: Path) -> None:
    """By the command, which finds the deployment by what the runner has noted of its stages."""
    with pytest.raises(ArtefactError, match="no run"):
        list(restart(tmp_path))
    clients = Clients(served, 4, max_tokens=5)
    said = list(restart(noted_as_run(served)))
    streams = clients.end()
    assert all(stream.is_whole for stream in streams), {stream.error for stream in streams}
    assert said[-1].startswith("  restarted")
    assert len({stream.server for stream in streams}) == 4  # two processes before, two after


def test_a_router_that_dies_in_a_rolling_restart_is_started_again_with_the_servers_that_it_had(
    served: Replicated,
) -> None:
    over = served.text.count("restarted  every replica")
    streams, request = [Stream(served, max_tokens=60) for _ in range(4)], RestartRequest(served.file)
    wait_for(lambda: all(stream.server for stream in streams))
    request.make()
    wait_for(lambda: served.text.count("restarting every replica") == over + 1)
    os.kill(served.pids_of("haproxy")[0], signal.SIGKILL)
    wait_for(lambda: "router     HAProxy was killed by SIGKILL; started again, 1 of 3" in served.text)
    wait_for(served.is_answered)
    wait_for(lambda: served.text.count("restarted  every replica") == over + 1)
    for stream in streams:
        stream.join()
    assert served.is_answered()


def test_one_that_is_left_alone_is_not_restarted(served: Replicated) -> None:
    """The supervisor of the other is killed until it is out of restarts."""
    while "given up" not in served.text:
        wait_for(lambda: "given up" in served.text or served.serving() == 2)
        for pid in served.pids_of("deployment.engines.serve"):
            if any("/replica-0/" in word for word in command_line(pid)):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: served.serving() < 2)
    with pytest.raises(ServerError, match="replica 1 alone is left"):
        list(restart(served.place.parent))
    assert served.is_answered()


class OneReplica(ChildReplica):
    """One that serves until it is asked to leave, without a process."""

    def __init__(self, number: int) -> None:
        self.number, self.place, self.has_left = number, Place.SERVING, False

    def leave(self) -> None:
        self.has_left = True


@pytest.mark.parametrize(("counts", "is_over"), [((3, 0), True), ((None,), True), ((ServerError("away"), 0), True),
                                                 ((ServerError("away"),), False)])  # fmt: skip
def test_a_replica_leaves_once_its_requests_are_known_to_be_answered(
    counts: tuple[Any, ...], is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rolling, "_LEAST_S", 0.0)
    router, replicas = Mock(**{"in_flight.side_effect": [*counts, counts[-1]]}), [OneReplica(0), OneReplica(1)]
    restarted = rolling.RollingRestart(replicas, (), router, 60)
    for _ in range(1 + len(counts)):
        assert not replicas[0].has_left
        restarted.step()
    assert replicas[0].has_left == is_over and not replicas[1].has_left


def test_a_replica_that_is_given_up_ends_a_restart_of_the_others() -> None:
    given_up = set[int]()
    restarted = rolling.RollingRestart([OneReplica(0), OneReplica(1)], given_up, Mock(), 60)
    given_up.add(1)
    assert restarted.step() and restarted.problem.startswith("replica 1 was given up meanwhile; 2 were not")
