"""Parity against served models: the models, the fake server over their shards, and a run of the comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.settings import Settings
from evaluation.parity.arguments import LIMITS, PRECISIONS, ParityArguments
from evaluation.parity.run import main
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.endpoint import Endpoint
from handover.errors import ServerError
from support.servers.fake_triton import FakeTriton, Tensors
from support.tiny_models.huggingface_models import HEADS, HIDDEN

GPT_INPUTS = ("input_ids", "is_return_context_log_probs")
T5_INPUTS = ("input_ids", "sequence_length", "max_output_len")
PROMPTS = [[11, 3, 95, 0, 42, 17, 8, 77], [1, 2, 30], [64]]
LENGTH, RANKS, SIZE = 6, 2, HIDDEN // HEADS
SOUND = (0.01, 0.001, 1.0, 0.001)


def limits(*numbers: float) -> tuple[tuple[str, tuple[tuple[str, float], ...]], ...]:
    return tuple((precision, tuple(zip(LIMITS, numbers, strict=True))) for precision in PRECISIONS)


def prompts_file(directory: Path) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input_ids": prompt}) + "\n" for prompt in PROMPTS))
    return path


def shards_of(checkpoint: Path, output: Path, data_type: str = "fp32", ranks: int = RANKS) -> Path:
    convert(ConvertArguments(checkpoint, output, ranks, data_type, processes=1))
    return output


def serve(
    shards: Path,
    model_type: str = "GPT",
    inputs: tuple[str, ...] = GPT_INPUTS,
    data_type: str = "fp32",
    **changes: Any,
) -> FakeTriton:
    """A server of these shards; it answers as the real one does, one request after another."""
    settings = Settings(shards, RANKS, 1, data_type, 1, model_type, kv_cache_bytes=1 << 22, **changes)
    engine: Engine = open_engine(settings, torch.device("cpu"))
    parameters = {
        "model_checkpoint_path": str(shards),
        "data_type": settings.data_type,
        "int8_mode": str(settings.int8_mode),
        **({"quantization": settings.quantization} if settings.quantization else {}),
        **({"kv_cache_dtype": "fp8"} if settings.has_fp8_cache else {}),
    }

    def answer(tensors: Tensors) -> Tensors:
        return engine.generate([engine.parse(tensors)])[0]

    return FakeTriton(answer, inputs, parameters)


def run(fake: FakeTriton, checkpoint: Path, directory: Path, **changes: Any) -> dict[str, Any]:
    """The comparison's summary of a server of the drop-in engine; ``main`` raises where parity fails."""
    output, endpoint = directory / "parity", directory / "endpoint.json"
    Endpoint("127.0.0.1", grpc_port=fake.port, engine="slipway").write(endpoint)
    given = {"data_path": prompts_file(directory), "output_length": LENGTH, "limits": limits(*SOUND), "batch_size": 2}
    arguments = ParityArguments(str(endpoint), output, checkpoint, **{**given, **changes})
    try:
        main(arguments.to_argv())
    except ServerError as error:
        assert "is not its source" in error.problem
        return {"error": error.problem, **json.loads((output / "summary.json").read_text())}
    return dict(json.loads((output / "summary.json").read_text()))
