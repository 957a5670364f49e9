"""What all ranks fail at alike fails one request; a lost rank fails the requests that have begun, and is restarted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines.faulty_ranks import FAILS_EVERYWHERE, FAILS_IN_RANK_1, PROJECT
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from support.shards.llama_shards import served_of

PROGRAM = PROJECT / "tests" / "support" / "engines" / "faulty_ranks.py"


class Talk:
    """The program of faulty_ranks.py."""

    def __init__(self, directory: Path, device: str = "cpu", model_type: str = "GPT", ranks: int = 2) -> None:
        count = 30 if device == "cpu" else 4000  # long enough to be harmed under way
        if model_type == "GPT":
            shards = write_shards(random_gpt2(n_positions=count + 8, n_head=max(4, ranks)), directory, ranks)
        else:
            shards, _ = served_of("gemma2", directory, 2)
        self.device, self.said = device, directory / "said"
        environment = {**os.environ, "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with self.said.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(shards), str(ranks), device, str(count), model_type],
                cwd=PROJECT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )

    def tell(self, *lines: str) -> None:
        assert self.process.stdin
        self.process.stdin.write("".join(f"{line}\n" for line in lines))
        self.process.stdin.flush()

    def ask(self, line: str) -> Any:
        assert self.process.stdout
        self.tell(line)
        answer = self.process.stdout.readline()
        assert answer, self.said.read_text()
        return json.loads(answer)


@pytest.fixture(scope="module", params=["cpu"])
def talk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    """One engine of each kind, which goes on after what a test did to its ranks: that is what is tested."""
    directory = tmp_path_factory.mktemp("ranks")
    ranks = 8 if request.param == "8 GPUs" else 2
    if request.param in ("cuda", "8 GPUs") and torch.cuda.device_count() < ranks:
        pytest.skip("no GPU for each rank")
    if request.param == "llama":
        talk = Talk(directory, "cpu", "Llama")
    else:
        talk = Talk(directory, "cpu" if request.param == "cpu" else "cuda", ranks=ranks)
    yield talk
    try:
        assert talk.process.stdin
        talk.process.stdin.close()
        assert talk.process.wait(240) == 0, talk.said.read_text()
    finally:
        talk.process.kill()


def test_what_every_rank_fails_at_fails_that_request_alone(talk: Talk) -> None:
    talk.tell("ask first 5 6 7")
    first, workers = talk.ask("wait first"), talk.ask("workers")
    talk.tell(f"ask bad 5 {FAILS_EVERYWHERE}", "ask good 5 6 7")
    assert "this token is poison" in talk.ask("wait bad")["problem"]
    assert talk.ask("wait good") == first and len(first["tokens"]) == 33
    assert talk.ask("workers") == workers


@pytest.mark.parametrize("talk", ["cpu", pytest.param("llama", marks=pytest.mark.long)], indirect=True)
def test_where_one_rank_fails_the_others_are_started_anew(talk: Talk) -> None:
    talk.tell("ask first 5 6 7")
    first, workers = talk.ask("wait first"), talk.ask("workers")
    talk.tell(f"ask bad 5 {FAILS_IN_RANK_1}", "ask good 5 6 7")
    assert "rank 1 is lost" in talk.ask("wait bad")["problem"]
    assert talk.ask("wait good") == first
    assert talk.ask("workers") not in ([], workers)
    assert "this token is poison" in talk.said.read_text()


@pytest.mark.parametrize(
    ("talk", "harm"),
    [
        *product(["cpu", "cuda", "8 GPUs"], [signal.SIGKILL, signal.SIGSTOP]),
        pytest.param("llama", signal.SIGSTOP, marks=pytest.mark.long),
    ],
    indirect=["talk"],
)
def test_a_rank_that_dies_or_hangs_is_started_anew(talk: Talk, harm: signal.Signals) -> None:
    before = talk.ask("metrics")
    talk.tell("ask first 5 6 7")
    first, workers = talk.ask("wait first"), talk.ask("workers")
    talk.tell("ask begun 5 6 7", "begun begun", "ask waiting 5 6 7", f"kill {int(harm)}")
    # Sums in GPUs' memory may be the first to notice one that hangs, and do not know which it is.
    is_named = talk.device == "cpu" or harm == signal.SIGKILL
    problem = talk.ask("wait begun")["problem"]
    assert "rank 1 is lost" in problem or (not is_named and "rank is lost" in problem)
    assert talk.ask("wait waiting") == first
    assert talk.ask("workers") not in ([], workers)
    after, more = talk.ask("metrics"), {"stop": 0, "length": 2, "abort": 0, "error": 1}
    assert after["finished"] == {reason: before["finished"][reason] + more[reason] for reason in more}
    assert after["prompts"] == before["prompts"] + 3 * 3 and after["waiting"] == 0


def test_a_rank_that_dies_between_requests_is_restarted(talk: Talk) -> None:
    said = []
    for name in ("undisturbed", "talk"):
        talk.tell(f"start {name} 5 6 7")
        said.append(talk.ask(f"wait {name}"))
    assert said[0] == said[1]
    talk.tell("continue undisturbed 8", "ask first 5 6 7")
    said, first, workers = talk.ask("wait undisturbed"), talk.ask("wait first"), talk.ask("workers")
    for _ in range(2):
        talk.tell(f"kill {int(signal.SIGKILL)}")
        while (now := talk.ask("workers")) in ([], workers):
            time.sleep(0.1)
        workers = now
        talk.tell("ask next 5 6 7")
        assert talk.ask("wait next") == first
    talk.tell("continue talk 8")
    assert talk.ask("wait talk") == said  # its keys and values were computed again
