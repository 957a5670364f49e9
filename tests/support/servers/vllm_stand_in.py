"""A stand-in for vLLM in tests of benchmarks.peers.compare: the part of vLLM's Python API that the benchmark uses.

Whole answers are transformers' greedy ones, an independent computation; streams are made-up tokens at a steady pace.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VERSION = "0.0 (a stand-in)"
_CHUNK, _PACE_S, _FINAL_ONLY = 4, 0.001, 2
_MODULES = {
    "__init__": f"from support.servers.vllm_stand_in import LLM, SamplingParams\n__version__ = {VERSION!r}\n",
    "_version": "import os\n__commit_id__ = os.environ['STAND_IN_COMMIT']\n",
    "sampling_params": "class RequestOutputKind:\n    DELTA = 1\n    FINAL_ONLY = 2\n",
    "engine/arg_utils": "from types import SimpleNamespace as AsyncEngineArgs\n",
    "usage/usage_lib": "class UsageContext:\n    OPENAI_API_SERVER = 1\n",
    "v1/engine/async_llm": "from support.servers.vllm_stand_in import AsyncLLM\n",
}


def write_package(directory: Path) -> Path:
    """Write a package ``vllm`` that forwards to this module; gives the directory to put on PYTHONPATH."""
    for name, text in _MODULES.items():
        file = directory / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory


class SamplingParams(SimpleNamespace):
    """Keeps what it is given."""


class LLM:
    """Answers by transformers."""

    def __init__(self, model: str, dtype: str, load_format: str, **settings: Any) -> None:
        import torch
        import transformers

        if os.environ.get("STAND_IN_FAILS"):
            raise RuntimeError("CUDA out of memory (the stand-in was told to fail)")
        assert (dtype, load_format) == ("float32", "auto")
        torch.set_num_threads(1)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def generate(self, prompts: Sequence[Any], parameters: Sequence[Any], use_tqdm: bool) -> list[Any]:
        """Continue each prompt greedily."""
        import torch

        answers = []
        for prompt, sampling in zip(prompts, parameters, strict=True):
            ids, count = torch.tensor([prompt["prompt_token_ids"]]), sampling.max_tokens
            found = self._model.generate(ids, do_sample=False, min_new_tokens=count, max_new_tokens=count)
            tokens = found[0, ids.shape[1] :].tolist()
            answers.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]))
        return answers


class AsyncLLM:
    """Streams made-up tokens."""

    @classmethod
    def from_engine_args(cls, arguments: Any, usage_context: int) -> AsyncLLM:
        """Start nothing."""
        return cls()

    async def generate(self, prompt: Any, sampling: Any, request_id: str) -> AsyncIterator[Any]:
        """Give a few tokens at a time, or all of them at last."""
        left = sampling.max_tokens
        if sampling.output_kind == _FINAL_ONLY:
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * left)])
            return
        while left:
            await asyncio.sleep(_PACE_S)
            count = min(_CHUNK, left)
            left -= count
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * count)])

    def shutdown(self) -> None:
        """Stop nothing."""
