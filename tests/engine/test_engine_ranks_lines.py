"""How ranks connect to rank 0, what they send over their control connections, and how they notice a loss."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import closing, suppress
from itertools import count
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.parallel import group
from backends.fastertransformer.engine.parallel.control import ControlChannel
from backends.fastertransformer.engine.parallel.group import Group
from backends.fastertransformer.engine.parallel.handshake import connect
from backends.fastertransformer.engine.parallel.rank import Ranks, read_ranks
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.ranks import packed, unpacked


def place(directory: Path, **changes: object) -> Ranks:
    values = {"rank": 0, "world_size": 4, "local_rank": 0, "local_size": 4, "run": "now", "timeout_s": 1.0}
    return Ranks(**(values | {"rendezvous": str(directory / "rendezvous")} | changes))  # type: ignore[arg-type]


def begin_rank_0(directory: Path) -> tuple[threading.Thread, list[ControlChannel], dict[str, Any]]:
    """Let rank 0 wait for another: the thread, its channel as soon as that has connected, and the address it gives."""
    channels: list[ControlChannel] = []
    ranks = place(directory, world_size=2, timeout_s=60)
    first = threading.Thread(target=lambda: channels.append(ControlChannel(ranks, b"value")))
    first.start()
    while not (directory / "rendezvous").exists():
        time.sleep(0.01)
    return first, channels, json.loads((directory / "rendezvous").read_text())


def test_another_number_of_processes_is_refused_in_fastertransformers_words(tmp_path: Path) -> None:
    words = r"world_size \(4\) should equal to tensor_para_size_ \* pipeline_para_size_ \(2 \* 1 here\)"
    with pytest.raises(EngineError, match=words):
        Group(place(tmp_path), torch.device("cpu"), Settings(tmp_path, 2, 1, "fp32"))


def test_a_group_knows_whether_its_rank_0_has_begun_another_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_group_numbers", count())
    found = []
    for _ in range(2):
        ranks = place(tmp_path, world_size=1, local_size=1, timeout_s=60)
        joined = Group(ranks, torch.device("cpu"), Settings(tmp_path, 1, 1, "fp32"))
        found.append(joined.is_first)
        joined.close()
    assert found == [True, False]


def test_a_rank_finds_rank_0_that_comes_after_one_that_is_gone(tmp_path: Path) -> None:
    """The same run again, as after a requeue: the port in the file is closed until rank 0 has come."""
    (tmp_path / "rendezvous").write_text('{"host": "127.0.0.1", "port": 1, "run": "now"}')
    found: list[ControlChannel] = []
    seeker = threading.Thread(
        target=lambda: found.append(ControlChannel(place(tmp_path, rank=1, world_size=2, timeout_s=60)))
    )
    seeker.start()
    time.sleep(1)
    channel = ControlChannel(place(tmp_path, world_size=2, timeout_s=60), b"value")
    seeker.join(240)
    assert found and found[0].startup_message == b"value"
    for one, other in ((channel, found[0]), (found[0], channel)):
        one.send(b"word")
        assert other.receive(10) == [b"word"]
        one.announce_shutdown()
    channel.close(), found[0].close()
    assert not channel.lost and not found[0].lost


def test_rank_0_is_not_disturbed_by_strangers(tmp_path: Path) -> None:
    first, channels, address = begin_rank_0(tmp_path)
    with socket.create_connection((address["host"], address["port"])) as one:
        one.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        with socket.create_connection((address["host"], address["port"])):  # says nothing
            second = ControlChannel(place(tmp_path, rank=1, world_size=2, timeout_s=60))
    first.join(240)
    assert second.startup_message == b"value" and not channels[0].lost
    second.close()
    channels[0].close()


def test_slow_strangers_keep_no_rank_waiting(tmp_path: Path) -> None:
    """They announce an answer of 255 bytes and send one each half second; a handshake as a whole has three seconds."""
    first, channels, address = begin_rank_0(tmp_path)
    place_of_door = (address["host"], address["port"])
    strangers = [socket.create_connection(place_of_door) for _ in range(5)]
    is_over = threading.Event()

    def talk_slowly(stranger: socket.socket) -> None:
        with suppress(OSError):
            stranger.sendall(b"\0\0\0\xff")
            while not is_over.wait(0.5):
                stranger.sendall(b"x")

    threads = [threading.Thread(target=talk_slowly, args=(stranger,)) for stranger in strangers]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    second = ControlChannel(place(tmp_path, rank=1, world_size=2, timeout_s=10))
    first.join(240)
    assert second.startup_message == b"value" and channels
    for stranger in strangers:
        stranger.settimeout(20)
        with suppress(ConnectionError):
            while stranger.recv(100):  # the challenge, until they are hung up on
                pass
    is_over.set()
    for thread, stranger in zip(threads, strangers, strict=True):
        thread.join()
        stranger.close()
    second.close()
    channels[0].close()


def test_the_secret_is_its_owners_alone(tmp_path: Path) -> None:
    first, channels, address = begin_rank_0(tmp_path)
    assert (tmp_path / "rendezvous").stat().st_mode & 0o777 == 0o600
    other = dict(address, key="00" * 16)
    with pytest.raises(OSError, match="hung up"):
        connect(other, 1, 0)
    second = ControlChannel(place(tmp_path, rank=1, world_size=2, timeout_s=60))
    first.join(240)
    late, _ = connect(address, 1, 0)  # a process that knows the key, when all ranks have connected
    with late, pytest.raises(EOFError):
        assert late.poll(10) and late.recv_bytes()
    assert not channels[0].lost
    second.close()
    channels[0].close()


def test_a_rank_that_gives_a_call_up_and_calls_again_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlChannel, "_end_process", lambda channel: None)
    first, channels, address = begin_rank_0(tmp_path)
    key = bytes.fromhex(address["key"])
    for purpose in (0, 1):  # as a rank does that rank 0 has kept waiting for its startup message
        with closing(Client((address["host"], address["port"]), authkey=key)) as connection:
            connection.send_bytes(json.dumps([purpose, 1]).encode())
    second = ControlChannel(place(tmp_path, rank=1, world_size=2, timeout_s=20))
    first.join(240)
    with closing(second), closing(channels[0]):
        channels[0].send(b"word")
        assert second.receive(10) == [b"word"] and not channels[0].wait_for_loss()
        second.announce_shutdown()


def test_all_that_is_to_be_done_at_a_loss_is_done_though_some_of_it_fails(tmp_path: Path) -> None:
    found: list[ControlChannel] = []
    seeker = threading.Thread(
        target=lambda: found.append(ControlChannel(place(tmp_path, rank=1, world_size=2, timeout_s=60)))
    )
    seeker.start()
    channel = ControlChannel(place(tmp_path, world_size=2, timeout_s=60))
    seeker.join(240)
    is_called = threading.Event()
    channel.at_loss += [lambda: 1 / 0, is_called.set]
    channel.is_fatal = False
    found[0].close()
    assert channel.wait_for_loss(10) == "rank 1 is lost: it has hung up"
    assert is_called.wait(240)
    channel.close()


@pytest.mark.parametrize("content", [None, "", "{}", '{"host": "127.0.0.1", "port": 1, "run": "before"}'])
def test_a_rank_waits_for_rank_0_of_its_own_run_only(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "rendezvous").write_text(content)
    with pytest.raises(EngineError, match="rank 1: rank 0 has not come within 1 s"):
        ControlChannel(place(tmp_path, rank=1))


@pytest.mark.parametrize("size", [1, 200, 5000])
def test_a_step_is_read_as_it_was_written(size: int) -> None:
    numbers = np.arange(size, dtype=np.int64) - 2**62
    floats = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)
    floats[0, 0] = np.nan
    arguments = (7, numbers, None, floats, np.zeros((0, 3), np.int64), 2**40)
    kind, found = unpacked(packed(3, arguments))
    assert kind == 3 and len(found) == len(arguments)
    for ours, theirs in zip(found, arguments, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert np.shape(ours) == np.shape(theirs)
            np.testing.assert_array_equal(ours, theirs)


def test_what_the_environment_says() -> None:
    assert read_ranks({}) is None
    with pytest.raises(EngineError, match="SLIPWAY_RANKS = nonsense"):
        read_ranks({"SLIPWAY_RANKS": "nonsense"})
