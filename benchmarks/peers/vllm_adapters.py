"""vLLM's side of benchmarks.gpu.adapters, which starts this in a process of its own, with the path that has vLLM.

    python3 -m benchmarks.peers.vllm_adapters --directory=DIR --cases='[["a0", ""]]' --lengths='[64, 32, 160]'

DIR has a config.json, for random weights, and adapters/NAME. Writes DIR/steps.json: ms of a decode step of each case.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from benchmarks.peers.vllm import sampling
from benchmarks.peers.vllm_weights import make_weights_random
from handover.arguments import ScriptArguments
from handover.errors import exit_status


@dataclass(frozen=True)
class AdapterCases(ScriptArguments):
    """What to measure."""

    directory: Path = field(metadata={"help": "with config.json and adapters/NAME"})
    cases: tuple[tuple[str, ...], ...] = field(metadata={"help": "JSON list of lists: the rows' adapters; '': none"})
    lengths: tuple[int, int, int] = field(default=(64, 32, 160), metadata={"help": "input, and two outputs, in tokens"})
    repeats: int = field(default=3, metadata={"help": "measurements of each; the median counts"})
    vocab: int = field(default=32000, metadata={"help": "ids below it are drawn"})
    rank: int = field(default=16, metadata={"help": "of the adapters"})


def measure(arguments: AdapterCases) -> list[float]:
    """Return the ms of a decode step of each case."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    names = sorted({name for case in arguments.cases for name in case} - {""})
    settings = {"model": str(arguments.directory), "skip_tokenizer_init": True, "load_format": "dummy", "seed": 0}
    settings |= {"enable_prefix_caching": False, "max_model_len": 1024, "gpu_memory_utilization": 0.85}
    room = {"enable_lora": True, "max_loras": len(names), "max_lora_rank": arguments.rank}
    # Rows decode together, so that graphs of other batches only take time at the start.
    rows = max(map(len, arguments.cases))
    sizes = sorted({2**power for power in range(rows.bit_length())} | {rows})
    settings["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    engine = LLM(**settings, **(room if names else {}))
    engine.apply_model(make_weights_random)
    requests = {
        name: LoRARequest(name, number + 1, str(arguments.directory / "adapters" / name))
        for number, name in enumerate(names)
    }
    draw, steps = random.Random(0), []
    for case in arguments.cases:
        adapters = [requests.get(name) for name in case]
        times = []
        for output in arguments.lengths[1:]:
            took = []
            for _ in range(arguments.repeats + 2):
                prompts = [
                    {"prompt_token_ids": [draw.randrange(arguments.vocab) for _ in range(arguments.lengths[0])]}
                    for _ in case
                ]
                begin = perf_counter()
                answers = engine.generate(prompts, sampling(output), use_tqdm=False, lora_request=adapters)
                took.append(perf_counter() - begin)
                assert all(len(each.outputs[0].token_ids) == output for each in answers)
            times.append(1e3 * statistics.median(took[2:]))
        steps.append((times[1] - times[0]) / (arguments.lengths[2] - arguments.lengths[1]))
        print(f"vLLM: {len(case)} rows, {len({*case} - {''})} adapters: {steps[-1]:.3f} ms", flush=True)
    return steps


def main(argv: Sequence[str]) -> None:
    """Measure the cases."""
    arguments = AdapterCases.from_argv(argv, __doc__)
    (arguments.directory / "steps.json").write_text(json.dumps(measure(arguments)))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "vllm_adapters"))
