"""Several models, versions and instances in one server; loading and unloading leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
from support.servers.served import Deployment, infer, wait_for
from support.shards.gpt2_checkpoint import random_gpt2, write_shards

from benchmarks.serving.load_unload import cycle
from benchmarks.serving.server_memory import look
from handover.endpoint import Endpoint

IDS, COUNT = [5, 6, 7], 8
OPTIONAL = [("end_id", "UINT32"), ("runtime_top_k", "UINT32"), ("runtime_top_p", "FP32"), ("temperature", "FP32"),
            ("repetition_penalty", "FP32"), ("random_seed", "UINT64")]  # fmt: skip
CONFIG = """
backend: "fastertransformer"
max_batch_size: 8
version_policy {{ all {{ }} }}
input [ {{ name: "input_ids" data_type: TYPE_UINT32 dims: [-1] }},
        {{ name: "input_lengths" data_type: TYPE_UINT32 dims: [1] }},
        {{ name: "request_output_len" data_type: TYPE_UINT32 dims: [-1] }},
        {optional} ]
output [ {{ name: "output_ids" data_type: TYPE_UINT32 dims: [-1, -1] }},
         {{ name: "sequence_length" data_type: TYPE_UINT32 dims: [-1] }} ]
instance_group [ {{ count: {instances} kind: KIND_CPU }} ]
parameters {{ key: "tensor_para_size" value {{ string_value: "1" }} }}
parameters {{ key: "data_type" value {{ string_value: "fp32" }} }}
"""


def add_model(repository: Path, name: str, versions: dict[int, int], instances: int = 1) -> None:
    """Write a model whose versions have weights of their own: version to seed."""
    for version, seed in versions.items():
        write_shards(random_gpt2(seed), repository / name / str(version), 1)
    optional = ", ".join(
        f'{{ name: "{key}" data_type: TYPE_{kind} dims: [1] optional: true }}' for key, kind in OPTIONAL
    )
    config = CONFIG.format(instances=instances, optional=optional)
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"\n{config}')


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    root = tmp_path_factory.mktemp("control")
    add_model(root / "repo", "plain", {1: 0})
    add_model(root / "repo", "two_versions", {1: 1, 2: 2})
    add_model(root / "repo", "two_instances", {1: 3}, instances=2)
    explicit = ("--model-control-mode=explicit", "--load-model=*")
    deployment = Deployment(root / "repo", root / "run", server_args=explicit, open_apis=("model_repository",))
    yield deployment.wait_until_published()
    deployment.begin_to_stop()


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> Iterator[Any]:
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as connected:
        yield connected


def ask(client: Any, model: str, version: str = "") -> list[int]:
    column = np.ones((1, 1), np.uint32)
    tensors = {
        "input_ids": np.array([IDS], np.uint32),
        "input_lengths": len(IDS) * column,
        "request_output_len": COUNT * column,
        "end_id": (2**31 - 1) * column,
    }
    answer = infer(client, triton_grpc, model, tensors, model_version=version)
    tokens: list[int] = answer.as_numpy("output_ids")[0, 0].tolist()
    return tokens


def greedy(seed: int) -> list[int]:
    """Hugging Face's tokens."""
    model, ids = random_gpt2(seed), torch.tensor([IDS])
    with torch.inference_mode():
        for _ in range(COUNT):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    tokens: list[int] = ids[0].tolist()
    return tokens


def test_models_and_versions_have_weights_of_their_own(client: Any) -> None:
    served = {("plain", "1"): 0, ("two_versions", "1"): 1, ("two_versions", "2"): 2, ("two_instances", "1"): 3}
    answers = {key: ask(client, *key) for key in served}
    assert answers == {key: greedy(seed) for key, seed in served.items()}
    assert len(set(map(tuple, answers.values()))) == len(served)
    assert ask(client, "two_versions") == greedy(2)  # the newest


def test_a_model_has_as_many_processes_as_instances(endpoint: Endpoint, client: Any) -> None:
    assert endpoint.pid and look(endpoint.pid).stubs == 1 + 2 + 2
    client.unload_model("two_instances")
    wait_for(lambda: look(endpoint.pid or 0).stubs == 1 + 2)
    assert ask(client, "plain") == greedy(0)


def test_loading_and_unloading_leaves_nothing_behind(endpoint: Endpoint) -> None:
    unloaded = [gone for _, gone in cycle(endpoint, "plain", 3)]
    for gone in unloaded[1:]:
        assert (gone.stubs, gone.regions) == (unloaded[0].stubs, unloaded[0].regions)
    assert unloaded[-1].server_mb - unloaded[1].server_mb < 8
