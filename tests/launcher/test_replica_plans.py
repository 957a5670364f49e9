"""``deployment.replicas``: what its stage runs, or its jobs, and what several servers cannot share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from support.runs.composed import compose, plans_of

from deployment.arguments import ReplicasArguments, ServeArguments
from handover.errors import ConfigError
from launcher.config.choices import ClusterType, Engine, Router, TritonApi
from launcher.config.schema import Config, register
from launcher.pipeline import make_jobs
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan
from launcher.plan.stages import deploy_replicas

TWO = [
    *("stages=[deploy,evaluate]", "export.run.model_train_name=m", "cluster.gpus_per_node=8", "cluster_type=bcm"),
    *("deployment.replicas=2", "export.model.tensor_model_parallel_size=2", "deployment.replica_jobs=false"),
]
JOBS = {"deployment.replica_jobs": True, "cluster.exclusive": False}
SGLANG = {"deployment.engine": Engine.sglang, "deployment.router": Router.sglang}


@pytest.fixture(scope="module")
def two() -> Config:
    """Two servers of two GPUs each."""
    register()
    GlobalHydra.instance().clear()
    return compose(TWO)


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a configuration with other values."""
    config = copy.deepcopy(config)
    for key, value in changes.items():
        *sections, name = key.split(".")
        setattr(functools.reduce(getattr, sections, config), name, value)
    return config


def plan_of(config: Config, stage: str = "deploy", **changes: Any) -> StagePlan:
    """Return the plan of a stage, with other values below ``deployment``."""
    other = changed(config, {f"deployment.{name}": value for name, value in changes.items()})
    return next(plan for plan in plans_of(other) if plan.stage == stage)


def test_one_stage_starts_all_and_takes_the_gpus_of_all(two: Config) -> None:
    plan = plan_of(two, affinity_header="X-Session-Id", router_command="/opt/haproxy -q")
    assert (plan.resources.nodes, plan.resources.gpus_per_node, plan.replicas) == (1, 4, 1)
    (command,) = plan.commands
    assert command.argv[:3] == ("python3", "-m", "deployment.replicas.serve") and command.tasks_per_node == 1
    given = ReplicasArguments.from_argv(command.argv[3:])
    assert (given.replicas, given.gpus, given.router, given.lasting) == (2, 2, "haproxy", False)
    assert (given.affinity_header, given.router_command) == ("X-Session-Id", ("/opt/haproxy", "-q"))
    (single,) = plan_of(two, replicas=1).commands
    assert given.program == single.argv[2] and given.server == single.argv[3:]
    assert ServeArguments.from_argv(given.server).endpoint == plan.output / "endpoint.json"
    assert StagePlan.from_json(plan.to_json()) == plan


def test_jobs_of_their_own_are_the_plan_of_one_each_and_one_of_their_router(two: Config) -> None:
    config = changed(two, {**JOBS, "deployment.http_port": 9000, "deployment.run.time_limit": "1:00:00"})
    single = plan_of(config, replicas=1)
    *servers, router, _, _ = plans_of(config)
    for number, plan in enumerate(servers):
        assert plan.is_replica and (plan.stage, plan.output.name) == (f"replica-{number}", f"replica-{number}")
        assert (plan.resources, plan.inputs, plan.env) == (single.resources, single.inputs, single.env)
        (command,), (alone,) = plan.commands, single.commands
        assert command.tasks_per_node == alone.tasks_per_node == 2
        own = ServeArguments.from_argv(command.argv[3:])
        expected = ServeArguments.from_argv(alone.argv[3:])
        files = {"endpoint": plan.output / "endpoint.json", "log": plan.output / "server.log"}
        assert asdict(own) == {**asdict(expected), **files, "host": "node", "http_port": 0}
    assert (router.resources.gpus_per_node, router.resources.container, router.replicas) == (0, None, 2)
    given = ReplicasArguments.from_argv(router.commands[0].argv[3:])
    assert given.job_logs == router.log.parent and given.server == single.commands[0].argv[3:]
    jobs = make_jobs(config, RunPaths.of(config), plans_of(config))
    assert [job.plans[-1].stage for job in jobs] == ["replica-0", "replica-1", "report"]
    assert {job.time_limit for job in jobs} == {jobs[-1].time_limit} and jobs[-1].time_limit != "1:00:00"


def test_servers_over_several_nodes_can_be_jobs(two: Config) -> None:
    wide = changed(two, {"deployment.replica_jobs": True, "export.model.tensor_model_parallel_size": 16})
    deploy_replicas.check(wide)
    first = next(plan for plan in plans_of(wide) if plan.is_replica)
    assert (first.resources.nodes, first.resources.gpus_per_node) == (2, 8)


def test_what_is_measured_of_two_servers_is_not_taken_for_one(two: Config) -> None:
    client, of_one = plan_of(two, "evaluate"), plan_of(two, "evaluate", replicas=1)
    assert client.fingerprint != of_one.fingerprint
    assert client.fingerprint == plan_of(two, "evaluate", drain_timeout_s=5).fingerprint
    assert client.commands == of_one.commands  # they ask the same address


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"export.triton_deployment.interactive_sessions": 8}, "interactive_sessions=8 with deployment.replicas=2"),
        ({"deployment.openai_adapter_keys_file": "keys"}, "openai_adapter_keys_file with"),
        ({"deployment.open_apis": [TritonApi.trace]}, "open_apis=.'trace'. with"),
        ({"deployment.server_args": ["--model-control-mode=explicit"]}, "server_args=.*explicit.* with"),
        ({"deployment.replicas": 5}, "5 of 2 GPUs each are 10 GPUs, and a node has 8"),
        ({"export.model.tensor_model_parallel_size": 16}, "servers over 2 nodes each"),
        ({"deployment.replica_jobs": True}, "each would hold a node of 8 GPUs"),
        ({**JOBS, "deployment.gemm_autotune": True}, "each would write the model's file"),
        ({"cluster_type": ClusterType.interactive}, "replica_jobs=false with cluster_type=interactive"),
        ({"deployment.router": Router.vllm}, "router=vllm with deployment.engine=slipway"),
        ({**SGLANG, "deployment.engine": Engine.vllm}, "router=sglang with deployment.engine=vllm"),
        ({**SGLANG, "deployment.affinity_header": "X-A"}, "affinity_header with deployment.router=sglang"),
        ({"deployment.affinity_header": "X A"}, "no name of a header"),
        ({"deployment.router_command": []}, "deployment.router_command is empty"),
        (
            {**JOBS, "deployment.replicas": 1, "deployment.router": Router.vllm},
            "deployment.router is given with one server",
        ),
        ({"deployment.replicas": 1}, "deployment.replica_jobs is given with one server"),
        (
            {**JOBS, "deployment.replicas": 1, "deployment.affinity_header": "X-A"},
            "affinity_header is given with one server",
        ),
        (
            {**JOBS, "cluster_type": ClusterType.interactive, "deployment.router_command": "/no/such"},
            "there is no program '/no/such'",
        ),
    ],
)
def test_what_replicas_cannot_have_is_refused_by_name(two: Config, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        deploy_replicas.check(changed(two, changes))


def test_what_routers_can_do_is_taken(two: Config) -> None:
    deploy_replicas.check(changed(two, SGLANG))
