"""An engine of two ranks, and tokens at which its network fails: in every rank, or in the second one alone.

As ``faulty_ranks.py worker`` it is the second rank; else, given shards, the number of ranks, a device, how many tokens
are generated and the model's type, it does what a test writes to its standard input, a line each: ``ask NAME TOKEN...``
submits a request, ``start`` and ``continue`` do in a conversation, ``begun NAME`` waits for its first token,
``wait NAME`` prints its answer, ``kill SIGNAL`` sends the second rank one, ``workers`` prints the process ids of the
others, ``metrics`` what the engine has counted. On a GPU nothing is poison.
"""

from __future__ import annotations

import json
import os
import queue
import sys
from pathlib import Path
from typing import Any

import numpy as np

PROJECT = Path(__file__).resolve().parents[3]
FAILS_EVERYWHERE, FAILS_IN_RANK_1 = 13, 14


def break_network(network: Any, tokens: tuple[int, ...]) -> None:
    extend = network.extend

    def broken(self: Any, given: Any, *rest: Any) -> Any:
        if any(bool((given[0] == token).any()) for token in tokens):
            raise ValueError("this token is poison")
        return extend(self, given, *rest)

    network.extend = broken


def work() -> int:
    sys.path.insert(0, str(PROJECT / "backends"))
    from fastertransformer import worker
    from fastertransformer.engine.model.network import Network

    break_network(Network, (FAILS_EVERYWHERE, FAILS_IN_RANK_1))
    return worker.main()


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Asked:
    """A request that was submitted, and its answers."""

    def __init__(self, engine: Any, tokens: list[int], count: int, session: str | None = None, start: int = 0) -> None:
        ids = np.array([tokens], np.uint32)
        tensors = {"input_ids": ids, "input_lengths": np.array([[len(tokens)]], np.uint32)}
        tensors |= {"request_output_len": np.array([[count]], np.uint32), "end_id": np.array([[1000]], np.uint32)}
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if session:
            tensors |= {"START": np.array([start], np.int32)}
        engine.submit(engine.parse(tensors), self.answers.put, is_streaming=True, session=session)

    def wait(self) -> dict[str, Any]:
        while not (answer := self.answers.get()).is_final:
            pass
        if hasattr(answer, "problem"):
            return {"problem": answer.problem}
        return {"tokens": answer.tensors["output_ids"][0, 0].tolist()}


def lead(shards: str, ranks: str, device: str, count: str, model_type: str) -> None:
    sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]
    from backends.fastertransformer.engine.engine import open_engine
    from backends.fastertransformer.engine.model.network import Network
    from backends.fastertransformer.engine.parallel import workers
    from backends.fastertransformer.engine.settings import Settings
    from support.engines.rank_processes import workers_of

    if device == "cpu":
        workers.WORKER = (__file__, "worker")
        break_network(Network, (FAILS_EVERYWHERE,))
    settings = Settings(
        Path(shards),
        int(ranks),
        1,
        "fp32",
        1,
        model_type,
        has_process_per_rank=True,
        kv_cache_bytes=1 << 26,
    )
    engine, asked = open_engine(settings, max_rows=1), dict[str, Asked]()
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "ask":
            asked[rest[0]] = Asked(engine, [int(token) for token in rest[1:]], int(count))
        elif word in ("start", "continue"):  # a conversation, which is named like the request
            asked[rest[0]] = Asked(engine, [int(token) for token in rest[1:]], 3, rest[0], int(word == "start"))
        elif word == "begun":
            asked[rest[0]].answers.get()
        elif word == "wait":
            say(asked[rest[0]].wait())
        elif word == "workers":
            say(workers_of(Path(os.environ["TMPDIR"])))
        elif word == "metrics":
            counted = engine.metrics
            say({"finished": counted.finished, "prompts": counted.prompt_tokens, "waiting": counted.waiting})
        elif word == "kill":
            os.kill(workers_of(Path(os.environ["TMPDIR"]))[0], int(rest[0]))
    engine.close()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        status = work()
        sys.stderr.flush()
        os._exit(status)
    lead(*sys.argv[1:])
