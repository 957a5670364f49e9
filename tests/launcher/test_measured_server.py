"""What was measured of one server is not taken for that of another: the fingerprint holds what decides the figures."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from support.runs.composed import compose, plans_of

from handover.endpoint import Endpoint
from handover.errors import ConfigError
from launcher.config.choices import DataType, Engine, Stage, TritonApi
from launcher.config.schema import Config, register
from launcher.plan.paths import RunPaths
from launcher.plan.stages.clients import check_server

RUN = ["stages=[deploy,evaluate,benchmark]", "export.run.model_train_name=m", "cluster_type=bcp"]


@pytest.fixture(autouse=True)
def schema() -> Iterator[None]:
    register()
    yield
    GlobalHydra.instance().clear()


def fingerprints(config: Config, changes: Mapping[str, Any] = MappingProxyType({})) -> dict[str, str]:
    """Of what clients measure in a run with some keys changed."""
    changed = copy.deepcopy(config)
    for key, value in changes.items():
        *sections, name = key.split(".")
        setattr(functools.reduce(getattr, sections, changed), name, value)
    return {plan.stage: plan.fingerprint for plan in plans_of(changed) if plan.independent}


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        (
            Engine.slipway,
            {
                "deployment.engine": Engine.fastertransformer,
                "deployment.container": "other",
                "deployment.server_args": ["--x"],
                "deployment.torch_kernels": True,
                "deployment.edited_files": ["a"],
                "cluster.one_task_per_rank": False,
            },
        ),
        (Engine.fastertransformer, {"deployment.gemm_autotune": True}),
        (
            Engine.vllm,
            {
                "deployment.engine": Engine.sglang,
                "deployment.command": ["other"],
                "deployment.max_model_len": 9,
                "deployment.max_num_seqs": 9,
                "deployment.gpu_memory_utilization": 0.5,
                "deployment.engine_args": ["--x"],
                "export.triton_deployment.data_type": DataType.bf16,
            },
        ),
    ],
)
def test_what_decides_the_answers_and_the_speed_of_the_server_is_in_it(
    engine: Engine, changes: Mapping[str, Any]
) -> None:
    config = compose([*RUN, "export.model.tensor_model_parallel_size=2", f"deployment.engine={engine}"])
    known = [fingerprints(config), *(fingerprints(config, {key: value}) for key, value in changes.items())]
    for stage in ("evaluate", "benchmark"):
        assert len({each[stage] for each in known}) == 1 + len(changes)


def test_where_and_how_long_it_listens_is_not_nor_whether_it_was_there_already() -> None:
    other = {"host": "0.0.0.0", "http_port": 8000, "grpc_port": 8001, "start_timeout_s": 9, "exit_timeout_s": 9}
    other |= {"restart": 2, "openai_port": 0, "openai_max_requests": 9, "open_apis": [TritonApi.trace]}
    config = compose(RUN)
    assert fingerprints(config) == fingerprints(config, {f"deployment.{key}": value for key, value in other.items()})
    assert fingerprints(config) == fingerprints(config, {"stages": [Stage.evaluate, Stage.benchmark]})


def test_another_server_under_the_same_endpoint_file_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "endpoint.json"
    config, found = compose([*RUN, f"deployment.endpoint={file}"]), []
    for host, engine, digest in (("a", "slipway", "1"), ("b", "slipway", "1"), ("b", "vllm", "1"), ("b", "vllm", "2")):
        Endpoint(host, grpc_port=1, engine=engine, model_digest=digest).write(file)
        found.append(fingerprints(config))
    assert found[0] == found[1] and len({each["benchmark"] for each in found}) == 3


def test_a_server_that_stands_is_not_noted_as_another_engine(tmp_path: Path) -> None:
    config = compose(["stages=[evaluate]", f"base_results_dir={tmp_path}", "deployment.engine=fastertransformer"])
    paths = RunPaths.of(config)
    paths.endpoint.parent.mkdir(parents=True)
    Endpoint("127.0.0.1", grpc_port=1, engine="slipway").write(paths.endpoint)
    with pytest.raises(ConfigError, match="stands is slipway, and deployment.engine=fastertransformer") as refused:
        check_server(config, paths, [Stage.evaluate])
    assert "deployment.engine=slipway" in refused.value.hint
