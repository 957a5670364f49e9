"""vLLM's side of benchmarks.peers.compare, which starts this in a process of its own, with the Python that has vLLM.

    python3 -m benchmarks.peers.vllm --job=job.json

Whole answers come from ``vllm.LLM``, streams from ``AsyncLLM``, whose engine core has a process of its own as it has
when it is served; it gives whole answers too where one start measures both. Its settings are vLLM's own choice but for
those that the job names: number format, length, memory.
"""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.peers.vllm_weights import make_weights_random
from benchmarks.peers.workloads import OFFLINE, ONLINE, Ask, Job, Record, run_offline, run_online
from handover.arguments import ScriptArguments
from handover.errors import exit_status

_TYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class JobArguments(ScriptArguments):
    """What to measure."""

    job: Path = field(metadata={"help": "file that benchmarks.peers.compare has written"})


def engine_settings(job: Job) -> dict[str, Any]:
    """Settings of either form of the engine; what the job gives by name goes before ours."""
    ours = {
        "model": job.model,
        "skip_tokenizer_init": True,
        "load_format": "dummy" if job.is_made_up else "auto",
        "dtype": _TYPES[job.data_type],
        "tensor_parallel_size": job.tensor_para_size,
        "max_model_len": job.longest,
        "gpu_memory_utilization": job.memory,
        "seed": 0,
    }
    return ours | {name: _value(text) for name, text in (pair.split("=", 1) for pair in job.peer_settings)}


def _value(text: str) -> Any:
    """What JSON makes of a setting's text; a plain word stays one."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def describe_peer(job: Job) -> dict[str, str]:
    """Return what runs here: versions, vLLM's commit where its build says it, and the GPU."""
    import torch
    import vllm

    try:
        commit = getattr(import_module("vllm._version"), "__commit_id__", None)
    except ImportError:
        commit = None
    gpu = job.name_gpus(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "gpu": gpu}
    return versions | {"version": vllm.__version__, "commit": commit or ""}


def sampling(count: int, **more: Any) -> Any:
    """Greedy generation that ends at no token."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, **more)


def measure_offline(job: Job) -> None:
    """Measure whole answers by ``vllm.LLM``."""
    from vllm import LLM

    engine = LLM(**engine_settings(job))
    if job.is_made_up:
        engine.apply_model(make_weights_random)
    job.add("engine", **describe_peer(job), settings=str(engine_settings(job)))

    def answer(asks: Sequence[Ask]) -> list[Sequence[int]]:
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        answers = engine.generate(prompts, [sampling(ask.count) for ask in asks], use_tqdm=False)
        return [each.outputs[0].token_ids for each in answers]

    run_offline(job, answer, answer)


class Client:
    """Asks AsyncLLM.

    Args:
        engine: started.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._requests = engine, 0

    async def answer(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        """Answer requests that arrive at once, each by one whole answer."""
        from vllm.sampling_params import RequestOutputKind

        async def whole(ask: Ask) -> Sequence[int]:
            parameters = sampling(ask.count, output_kind=RequestOutputKind.FINAL_ONLY)
            (answer,) = [each async for each in self._generate(ask, parameters)]
            return answer.outputs[0].token_ids  # type: ignore[no-any-return]

        return list(await asyncio.gather(*map(whole, asks)))

    async def stream(self, ask: Ask, record: Record) -> None:
        """Answer a request token by token; see ``Streams``."""
        from vllm.sampling_params import RequestOutputKind

        got = 0
        async for answer in self._generate(ask, sampling(ask.count, output_kind=RequestOutputKind.DELTA)):
            tokens = len(answer.outputs[0].token_ids)
            got += tokens
            if tokens:
                record.times.append((perf_counter(), got))

    def _generate(self, ask: Ask, parameters: Any) -> AsyncIterator[Any]:
        self._requests += 1
        prompt = {"prompt_token_ids": ask.prompt}
        return self._engine.generate(prompt, parameters, f"request-{self._requests}")  # type: ignore[no-any-return]


async def measure_online(job: Job) -> None:
    """Measure streams by ``AsyncLLM``, behind whole answers if the job has them too."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(**engine_settings(job), disable_log_stats=True)
    engine = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
    try:
        if job.is_made_up:
            await engine.collective_rpc("apply_model", args=(make_weights_random,))
        job.add("engine", **describe_peer(job), settings=str(engine_settings(job)))
        client, loop = Client(engine), asyncio.get_running_loop()

        def answer(asks: Sequence[Ask]) -> list[Sequence[int]]:
            return asyncio.run_coroutine_threadsafe(client.answer(asks), loop).result()

        if OFFLINE in job.parts:
            await asyncio.to_thread(run_offline, job, answer, answer)
        await run_online(job, client)
    finally:
        engine.shutdown()


def main(argv: Sequence[str]) -> None:
    """Measure the job's parts."""
    job = Job.read(JobArguments.from_argv(argv, description=__doc__).job)
    if ONLINE not in job.parts:
        measure_offline(job)
        return
    try:
        import uvloop
    except ImportError:
        asyncio.run(measure_online(job))
    else:
        uvloop.run(measure_online(job))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.peers.vllm"))
