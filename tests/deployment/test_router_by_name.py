"""HAProxy as it stands before pods: its servers are whoever a name has the addresses of, and answers for its health."""

from __future__ import annotations

import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.kubernetes.names import Names
from support.servers.served import wait_for
from support.slurm.slurm_files import free_ports

from deployment.replicas.haproxy import ROUTERS_HEALTH, render_for_names
from deployment.replicas.router import Front, find_program

NAME = "demo-pods.${NAMESPACE}.svc.cluster.local"
PODS = ("127.0.3.1", "127.0.3.2")


class Pods:
    """Servers of one port on addresses of their own, and the name that has those which are ready."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.ready: list[str] = []
        self.sick: set[str] = set()
        ports = {"openai": self.port, "grpc": self.port}
        self.names = Names(lambda name: self.ready if name == "demo-pods.ml.svc.cluster.local" else None, ports)
        self._servers = [self._serve(address) for address in PODS]

    def _serve(self, address: str) -> ThreadingHTTPServer:
        pods = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_sick = self.path == "/health" and address in pods.sick
                self.send_response(503 if is_sick else 200)
                self.send_header("Content-Length", str(len(address)))
                self.end_headers()
                self.wfile.write(address.encode())

            def log_message(self, format: str, *words: object) -> None: ...

        server = ThreadingHTTPServer((address, self.port), Handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self.names.close()


@pytest.fixture
def pods() -> Iterator[Pods]:
    found = Pods()
    yield found
    found.close()


@pytest.fixture
def router(pods: Pods, tmp_path: Path) -> Iterator[str]:
    """The address of a HAProxy that runs what is rendered; the name server alone is named otherwise."""
    services = {"openai": pods.port, "grpc": free_ports(1)[0]}
    front = Front("127.0.0.1", services, 0, 0, len(PODS), "X-Session-Id")
    text = render_for_names(front, NAME, ("openai", "/health"))
    file = tmp_path / "haproxy.cfg"
    file.write_text(text.replace("parse-resolv-conf", f"nameserver test 127.0.0.1:{pods.names.port}"))
    argv = [find_program("haproxy", "HAProxy"), "-db", "-f", str(file)]
    said = tmp_path / "said"
    with said.open("wb") as stream:
        process = subprocess.Popen(argv, env={"NAMESPACE": "ml"}, stderr=stream)
    base = f"http://127.0.0.1:{pods.port}"
    wait_for(lambda: ask(base, ROUTERS_HEALTH)[0] == 200)
    yield base
    process.terminate()
    process.wait()
    assert "UP/READY" in said.read_text() and "Socket error" not in said.read_text(), "gRPC's servers are asked by HTTP"


def ask(base: str, path: str = "/v1/models", session: str = "") -> tuple[int, str]:
    request = urllib.request.Request(base + path, headers={"X-Session-Id": session} if session else {})
    try:
        with urllib.request.urlopen(request, timeout=180) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def answering(base: str, session: str = "") -> set[str]:
    return {ask(base, session=session)[1] for _ in range(6)}


def test_requests_go_to_whom_the_name_has_and_who_is_well(router: str, pods: Pods) -> None:
    status, said = ask(router)
    assert status == 503 and "no server is ready" in said
    assert ask(router, "/metrics")[0] == 404, "one server's would be taken for those of all"
    pods.ready = list(PODS)
    wait_for(lambda: answering(router) == set(PODS))
    of_sessions = {session: answering(router, session) for session in map(str, range(8))}
    assert all(len(found) == 1 for found in of_sessions.values())
    assert set.union(*of_sessions.values()) == set(PODS)
    pods.ready = [PODS[1]]  # as a rolling update ends a pod: it is not ready, and still answers
    wait_for(lambda: answering(router) == {PODS[1]})
    pods.ready = list(PODS)
    pods.sick = {PODS[1]}
    wait_for(lambda: answering(router) == {PODS[0]})
    assert answering(router, "1") == {PODS[0]}, "a session whose server is away has another"
