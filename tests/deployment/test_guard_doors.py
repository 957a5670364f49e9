"""When the guard stands in front of Triton, which server is taken, and what is said of its version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployment.arguments import ServeArguments
from deployment.doors.doors import find_doors, is_guarded
from deployment.doors.known_faults import FAULTS, describe, faults_of, find_version, reachable
from deployment.doors.ports import Ports, choose_ports
from deployment.guard.frames import BrokenConnectionError
from deployment.guard.headers import NAME, HeaderWatch
from deployment.triton.installation import locate
from handover.errors import ServerError

PROJECT = Path(__file__).resolve().parents[2]


def arguments(**settings: Any) -> ServeArguments:
    return ServeArguments(Path("/r"), Path("/e/endpoint.json"), Path("/e/server.log"), **settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"host": "localhost"}, False),
        ({"host": "127.0.0.2"}, False),
        ({"host": "::1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "192.0.2.7"}, True),
        ({"host": "0.0.0.0", "guard": "never"}, False),
        ({"guard": "always"}, True),
        ({"server_args": ("--http-address=127.0.0.1", "--allow-vertex-ai=false", "--log-verbose=1")}, False),
    ],
)
def test_the_guard_stands_wherever_others_reach_the_server(settings: dict[str, Any], expected: bool) -> None:
    assert is_guarded(arguments(**settings)) is expected
    public = Ports(1, 2, 3)
    doors = find_doors(arguments(**settings), public)
    assert doors.is_guarded is expected and (doors.ports == public) is not expected
    if expected:
        assert doors.host == "127.0.0.1"


@pytest.mark.parametrize(
    "settings",
    [
        {"guard": "sometimes"},
        {"server_args": ("--http-address=0.0.0.0",)},
        {"server_args": ("--grpc-addr", "192.0.2.7")},  # Triton takes the beginning of a flag, and two words
        {"server_args": ("--allow-sagemaker=true",)},
        {"server_args": ("--allow-vertex=1",)},
        {"guard": "always", "server_args": ("--http-port=9000",)},
        {"host": "0.0.0.0", "server_args": ("--grpc-use-ssl=true",)},
        {"host": "0.0.0.0", "server_args": ("--reuse-grpc-port=true",)},
    ],
)
def test_what_would_open_a_way_around_the_guard_is_refused_before_the_start(settings: dict[str, Any]) -> None:
    with pytest.raises(ServerError) as refused:
        is_guarded(arguments(**settings))
    assert refused.value.hint
    if settings.get("guard") != "sometimes":
        assert is_guarded(arguments(**{**settings, "guard": "never"})) is False


def test_a_name_that_no_host_can_have_is_refused_as_an_unknown_one_is() -> None:
    for host in ("a" * 100, "a..b"):
        assert is_guarded(arguments(host=host))
        with pytest.raises(ServerError, match="cannot listen on host"):
            choose_ports(host, {"http": 0})


@pytest.mark.parametrize("port", [0, 8000])
def test_an_address_of_another_machine_is_not_called_a_port_in_use(port: int) -> None:
    with pytest.raises(ServerError, match="cannot listen on host '192.0.2.1'") as refused:  # of documentation, RFC 5737
        choose_ports("192.0.2.1", {"http": port})
    assert "deployment.host" in refused.value.hint


def test_a_name_is_found_wherever_a_connection_states_or_repeats_it() -> None:
    def text(value: bytes) -> bytes:
        return bytes([len(value)]) + value

    watch = HeaderWatch()
    path = b"\x04" + text(b"/x")  # a name of the fixed table, not kept
    assert not watch.has_name(b"\x83\x86" + path + b"\x40" + text(b"te") + text(b"trailers"))
    assert watch.has_name(b"\x83\x40" + text(NAME) + text(b"true"))
    assert watch.has_name(b"\x83\xbe") and not watch.has_name(b"\x83\xbf")  # the newest entry, and the one before
    assert watch.has_name(b"\x7e" + text(b"false"))  # its name with another value, kept as another entry
    assert not watch.has_name(b"\x40" + text(b"a") + text(b"b"))
    assert [watch.has_name(bytes([0x80 | index])) for index in (62, 63, 64, 65)] == [False, True, True, False]
    for broken in (b"\x40\x05ab", b"\x7f\xff\xff\xff\xff\xff\x01", b"\x00"):
        with pytest.raises(BrokenConnectionError):
            watch.has_name(broken)


def installation(
    directory: Path, stub: bytes = b"", flags: str = "--model-repository\n--http-address\n--grpc-port"
) -> Path:
    """A stand-in for another tritonserver with what lies beside it."""
    binary, python = directory / "bin" / "tritonserver", directory / "backends" / "python"
    binary.parent.mkdir(parents=True)
    binary.write_text(f"#!/bin/sh\necho '{flags}'\n")
    binary.chmod(0o755)
    if stub:
        python.mkdir(parents=True)
        (python / "libtriton_python.so").touch()
        (python / "triton_python_backend_stub").write_bytes(stub)
    return binary


def test_another_tritonserver_is_looked_at_before_it_is_started(tmp_path: Path) -> None:
    cases = {
        "is no program": tmp_path / "none",
        "does not name Triton's flags": installation(tmp_path / "a", flags="--help"),
        "there is no Python backend": installation(tmp_path / "b"),
        "is built for Python 3.7": installation(tmp_path / "c", stub=b"\0libpython3.7m.so.1.0\0"),
    }
    for problem, binary in cases.items():
        with pytest.raises(ServerError, match=problem):
            locate("slipway", binary)
    other = installation(tmp_path / "d")
    assert locate("fastertransformer", other).binary == other
    (tmp_path / "d" / "TRITON_VERSION").write_text("2.70.0\n")
    assert find_version(other) == "2.70.0" and find_version(cases["there is no Python backend"]) == ""
    own = locate("slipway").binary
    assert locate("slipway", own).binary == own.absolute()


def test_what_is_known_follows_the_version() -> None:
    assert set(faults_of("2.51.0")) == set(faults_of("")) == set(FAULTS)
    assert {fault.fixed_in for fault in faults_of("2.68.0")} == {None}
    assert "CVE-2025-23310" in describe("2.59.0", False) and "CVE-2025-23310" not in describe("2.59.1", False)
    assert set(reachable("2.51.0", True)) < set(reachable("2.51.0", False))
    assert all(fault.tests for fault in FAULTS if fault.stopped_by == "the guard")


def test_the_page_on_security_has_every_known_fault() -> None:
    page = (PROJECT / "SECURITY.md").read_text()
    for fault in FAULTS:
        for name in fault.names:
            assert name in page or f"-{name.rpartition('-')[2]}" in page, name
        if fault.fixed_in:
            assert ".".join(map(str, fault.fixed_in)) in page
