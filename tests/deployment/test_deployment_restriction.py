"""Which APIs of Triton are closed, by which flags, and to whom."""

from __future__ import annotations

import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deployment.doors.restriction import Restriction, header_file, known_flags
from deployment.processes.linux import blank_argument, command_line
from deployment.triton.installation import locate
from handover.errors import ServerError

BOTH = "--http-restricted-api <<string>:<string>=<string>>\n\tSpecify\n  --grpc-restricted-protocol <...>\n"


def server_that_says(directory: Path, text: str) -> Path:
    """A stand-in for a tritonserver of another release: all that is asked of it is its help."""
    (directory / "help.txt").write_text(text)
    binary = directory / "tritonserver"
    binary.write_text(f"#!/bin/sh\ncat '{directory}/help.txt' >&2\nexit 1\n")
    binary.chmod(0o755)
    return binary


def test_the_real_server_knows_the_flags() -> None:
    installation = locate("slipway")
    found = known_flags(installation.binary, installation.environment)
    assert {"http-restricted-api", "grpc-restricted-protocol", "model-repository", "http-port"} <= found


def test_a_server_of_fastertransformers_days_gets_no_flag_that_it_does_not_know(tmp_path: Path) -> None:
    old = Restriction(server_that_says(tmp_path, "  --http-port <integer>\n"), {}, (), ())
    assert (old.flags, old.secret) == ((), "")
    assert old.unknown == ("http-restricted-api", "grpc-restricted-protocol")
    half = Restriction(server_that_says(tmp_path, "  --grpc-restricted-protocol <...>\n"), {}, (), ())
    assert [flag.partition("=")[0] for flag in half.flags] == ["--grpc-restricted-protocol"]
    assert half.unknown == ("http-restricted-api",)
    assert known_flags(tmp_path / "none", {}) == frozenset()


def test_what_is_opened_is_not_closed(tmp_path: Path) -> None:
    binary = server_that_says(tmp_path, BOTH)
    names = [
        Restriction(binary, {}, opened, ()).flags[0].partition("=")[2].partition(":")[0]
        for opened in ((), ("shared_memory", "trace"))
    ]
    assert names == ["shared-memory,model-repository,logging,trace", "model-repository,logging"]
    everything = Restriction(binary, {}, ("shared_memory", "trace", "logging", "model_repository"), ())
    assert (everything.flags, everything.unknown) == ((), ())
    own = Restriction(binary, {}, (), ("--http-restricted-api=trace:a=b",))
    assert [flag.partition("=")[0] for flag in own.flags] == ["--grpc-restricted-protocol"]
    with pytest.raises(ServerError) as refused:
        Restriction(binary, {}, ("shared-memory",), ())
    assert "did you mean 'shared_memory'" in refused.value.hint


def test_the_secret_is_new_each_time_and_its_owners_alone(tmp_path: Path) -> None:
    binary, endpoint = server_that_says(tmp_path, BOTH), tmp_path / "endpoint.json"
    first, second = (Restriction(binary, {}, (), ()) for _ in range(2))
    assert first.secret != second.secret and len(first.secret) >= 32
    for each in (first, second):  # the file of one that was killed is replaced
        each.write(endpoint)
    file = header_file(endpoint)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == f"slipway-key: {second.secret}\n"
    assert all(flag.endswith(f":slipway-key={second.secret}") for flag in second.flags)


def test_a_secret_is_blanked_in_a_command_line(tmp_path: Path) -> None:
    program = "import sys; print(flush=True); sys.stdin.read(); print(sys.argv[1])"
    child = subprocess.Popen(
        [sys.executable, "-c", program, "--key=a-secret", "--other=kept"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout and child.stdout.readline() == "\n"
    assert command_line(child.pid)[-2:] == ["--key=a-secret", "--other=kept"]
    assert blank_argument(child.pid, "a-secret")
    assert command_line(child.pid)[-2:] == ["--key=xxxxxxxx", "--other=kept"]
    assert not blank_argument(child.pid, "a-secret")
    assert child.communicate(timeout=180)[0] == "--key=a-secret\n"  # which it had read before
    deadline = time.monotonic() + 240
    while Path(f"/proc/{child.pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not blank_argument(child.pid, "a-secret")
