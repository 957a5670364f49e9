"""Let SGLang itself load directories and compute logits of them; run by the interpreter of its environment.

Each line of standard input names a directory, token ids and how many of them are read at once; the others are decoded
one by one. The logits behind each prefix are appended to the file that is given, as JSON, a line for each directory.
Each directory has a child of its own: SGLang's modules keep the settings of one model, and importing them takes long.
Before the weights come, every parameter is filled with NaN: what no tensor reached is told by name.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from array import array
from pathlib import Path
from typing import Any

import torch
from plain_weights import allow_quantization, make_plain
from sglang.benchmark import one_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

SMALL = {
    "device": "cpu",
    "mem_fraction_static": 0.5,
    "max_total_tokens": 256,
    "max_running_requests": 4,
    "disable_radix_cache": True,
    "log_level": "warning",
}


def parameters_without_weights(model: torch.nn.Module) -> list[str]:
    """Return the names of floating point parameters that hold a NaN."""
    floats = ((name, value) for name, value in model.named_parameters() if value.is_floating_point())
    return sorted(name for name, value in floats if bool(value.float().isnan().any()))


def load(question: dict[str, Any], loaded: dict[str, Any]) -> Any:
    """Return SGLang's runner of a directory, and say in ``loaded`` what its files filled."""
    chosen = {"dtype": question["data_type"], "attention_backend": question["attention"]}
    arguments = ServerArgs(model_path=question["folder"], **chosen, **SMALL)
    world_rank = one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    ranks = one_batch.SpawnRanks(world_rank=world_rank, gpu_id=0)
    one_batch.publish(arguments, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    their_own = DefaultModelLoader.load_weights_only
    allow_quantization()

    def filled(model: torch.nn.Module, weights: Any, target_device: torch.device) -> None:
        for value in model.parameters():
            if value.is_floating_point():
                value.data.fill_(float("nan"))
        their_own(model, weights, target_device)
        loaded["class"] = f"{type(model).__module__}.{type(model).__name__}"
        loaded["missing"] = parameters_without_weights(model)
        loaded["quantized"] = make_plain(model)
        loaded["magnitude"] = sum(float(value.detach().double().abs().sum()) for value in model.parameters())

    DefaultModelLoader.load_weights_only = staticmethod(filled)
    return one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)[0]


def logits(runner: Any, tokens: list[int], at_once: int) -> list[list[float]]:
    """Return the logits behind each prefix of ``tokens`` with at least ``at_once`` of them."""
    request = Req(
        rid="0",
        origin_input_text="",
        origin_input_ids=array("q", tokens[:at_once]),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=len(tokens)),
    )
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    request.extend_end = at_once
    _, found, batch = runner.extend([request])
    rows = [found[0].tolist()]
    for token in tokens[at_once:]:
        _, found = runner.decode(torch.tensor([token]), batch)
        rows.append(found[0].tolist())
    return rows


def compute(question: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"folder": question["folder"]}
    try:
        runner = load(question, answer)
        with torch.no_grad():
            answer["logits"] = logits(runner, question["tokens"], question["at_once"])
    except BaseException:  # whatever it is, the test that asked shows it
        answer["error"] = traceback.format_exc()
    return answer


def main() -> None:
    ModelRegistry.get_supported_archs()  # imports every model
    for line in sys.stdin:
        question = json.loads(line)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        with Path(sys.argv[1]).open("a") as stream:
            stream.write(json.dumps(compute(question)) + "\n")
        os._exit(0)


main()
