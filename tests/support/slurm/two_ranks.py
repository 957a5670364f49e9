"""What servers of two ranks are asked, and what one process answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.settings import Settings
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.endpoint import Endpoint
from support.slurm.launches import NEMO

OUTPUT = 24
PROMPTS = np.array([[5, 6, 7, 8], [40, 30, 20, 10]], np.uint32)


def tokens_of_one_process(directory: Path) -> list[list[int]]:
    """Compute with one shard, which is written to the directory."""
    shards = directory / "1-gpu"
    convert(ConvertArguments(NEMO, shards, 1, "fp32"))
    engine = open_engine(Settings(shards, 1, 1, "fp32", cpu_threads=1))
    (answer,) = engine.generate([engine.parse(request())])
    tokens: list[list[int]] = answer["output_ids"][:, 0].tolist()
    return tokens


def request() -> dict[str, np.ndarray]:
    rows = len(PROMPTS)
    return {
        "input_ids": PROMPTS,
        "input_lengths": np.full((rows, 1), PROMPTS.shape[1], np.uint32),
        "request_output_len": np.full((rows, 1), OUTPUT, np.uint32),
    }


def ask(endpoint: Endpoint) -> list[list[int]]:
    inputs = []
    for name, values in request().items():
        inputs.append(triton.InferInput(name, list(values.shape), "UINT32"))
        inputs[-1].set_data_from_numpy(values)
    with triton.InferenceServerClient(endpoint.grpc_url) as client:
        tokens: list[list[int]] = client.infer("fastertransformer", inputs).as_numpy("output_ids")[:, 0].tolist()
    return tokens
