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

import pytest
from support.engine_programs import PATH
from support.servers.replicated import Clients, Replicated, Stream, noted_as_run, stopped_at_last
from support.servers.served import wait_for

from deployment.arguments import EngineArguments
from deployment.life.background_probe import BackgroundProbe
from deployment.replicas import health
from deployment.replicas.haproxy import render
from deployment.replicas.health import Health
from deployment.replicas.replica import parts_of_cores
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


def test_a_router_that_dies_is_started_again_with_the_servers_that_it_had(served: Replicated) -> None:
    os.kill(served.pids_of("haproxy")[0], signal.SIGKILL)
    wait_for(lambda: "router     HAProxy was killed by SIGKILL; started again, 1 of 3" in served.text)
    wait_for(served.is_answered)
