"""llama.cpp's side of benchmarks.peers.compare_cpu, which starts this by the Python that has llama-cpp-python.

usage: python3 llama_cpp_side.py MODEL.gguf THREADS ROWS TOKENS

Each line of its input is a JSON object of ``prompts``, lists of tokens of one length, and ``count``; each line of its
output says the ``tokens`` that follow greedily, and its processor time so far. Rows are decoded in one batch.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from importlib import import_module
from typing import Any

import numpy as np


class Peer:
    """A model in a context with room for some rows.

    Args:
        api: llama_cpp, the package.
        model: a GGUF file.
        threads: of prompts and of single tokens.
        rows: at most.
        longest: tokens of a row at most.
    """

    def __init__(self, api: Any, model: str, threads: int, rows: int, longest: int) -> None:
        self._api = api
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        options = api.llama_context_default_params()
        options.n_ctx = options.n_batch = rows * (longest + 28)
        options.n_ubatch = 512  # llama.cpp's own choice
        options.n_seq_max = rows
        options.n_threads = options.n_threads_batch = threads
        self._context = api.llama_init_from_model(self._model, options)
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(rows * longest, 0, 1)

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Continue prompts greedily."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        length = len(prompts[0])
        entries = [(token, at, row) for row, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        found = [self._step(entries, length - 1)]
        for at in range(length, length + count - 1):
            found.append(self._step([(token, at, row) for row, token in enumerate(found[-1])], at))
        return [list(row) for row in zip(*found, strict=True)]

    def _step(self, entries: list[tuple[int, int, int]], last: int) -> list[int]:
        """Run tokens, each with its position and row; returns the token that follows each one at position ``last``."""
        batch: Any = self._batch
        batch.n_tokens = len(entries)
        for index, (token, at, row) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, at, 1
            batch.seq_id[index][0], batch.logits[index] = row, at == last
        if status := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {status}")
        rows = sum(at == last for _, at, _ in entries)
        logits = ctypes.cast(self._api.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(logits, (rows, self._vocab)).argmax(axis=1).tolist()


def main() -> None:
    """Answer until the input ends."""
    if "--help" in sys.argv:
        print(__doc__)  # noqa: T201
        raise SystemExit
    model, *numbers = sys.argv[1:]
    api = import_module("llama_cpp")
    peer = Peer(api, model, *map(int, numbers))
    print(json.dumps({"version": api.__version__}), flush=True)  # noqa: T201 (read by the parent)
    for line in sys.stdin:
        tokens = peer.generate(**json.loads(line))
        print(json.dumps({"tokens": tokens, "processor_s": time.process_time()}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
