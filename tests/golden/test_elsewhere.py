"""``plans=export``: the reviewed files of two runs, what each launcher's file says, and what is refused."""

from __future__ import annotations

import ast
import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.runs import elsewhere
from support.runs.composed import compare, compose, plans_of

from handover.errors import ConfigError
from launcher.clusters.elsewhere import Elsewhere
from launcher.clusters.table import cluster_of
from launcher.pipeline import executor_for, make_jobs
from launcher.plan.paths import RunPaths

HERE = Path(__file__).resolve().parent / "elsewhere"


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
TASK = _object(
    "name num_nodes resources run",
    name={"type": "string", "pattern": "^[a-z0-9-]+$"},
    num_nodes={"type": "integer", "minimum": 1},
    resources=_object(
        "cpus",
        cpus={"type": "string", "pattern": r"^\d+\+$"},
        memory={"type": "string", "pattern": r"^\d+\+$"},
        accelerators={"type": "string", "pattern": r"^[\w-]+:\d+$"},
        image_id={"type": "string", "pattern": "^docker:"},
    ),
    volumes=TEXTS,
    envs=TEXTS,
    secrets={"type": "object", "additionalProperties": {"type": "null"}},
    run={"type": "string"},
)
"""Of SkyPilot, in our words; ``make test-launchers`` asks SkyPilot itself."""
POD = _object("containers volumes", containers={"type": "array", "maxItems": 1}, volumes={"type": "array"})
HEAD = _object("rayStartParams template", rayStartParams=TEXTS, template=_object("spec", spec=POD))
RAY_JOB = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_object("name", name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 47}),
    spec=_object(
        "entrypoint rayClusterSpec",
        entrypoint={"type": "string"},
        entrypointNumGpus={"type": "number"},
        activeDeadlineSeconds={"type": "integer"},
        shutdownAfterJobFinishes={"type": "boolean"},
        rayClusterSpec=_object("headGroupSpec", headGroupSpec=HEAD),
    ),
)
"""Of KubeRay's CRD, in our words."""


@pytest.fixture(params=list(elsewhere.CASES))
def files(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param, elsewhere.exported(request.param, "/mount/results")[2]


def parts(text: str) -> dict[str, str]:
    """Files of a preview, by launcher and name."""
    pieces = [piece.partition("\n") for piece in text.split("=== ")[1:]]
    return {"/".join(Path(path).parts[-2:]): content for path, _, content in pieces}


def test_the_files_are_as_reviewed(files: tuple[str, str], request: pytest.FixtureRequest) -> None:
    case, text = files
    compare(text, HERE / f"{case}.txt", request)


def test_each_launchers_file_has_nodes_and_gpus_and_nothing_that_it_does_not_know(files: tuple[str, str]) -> None:
    case, text = files
    found = parts(text)
    jobs = ["1_deploy"] if case == "two_nodes" else ["1_convert", "2_export", "3_deploy"]
    expected = {"nemo_run": ".py", "skypilot": ".yaml", "lepton": ".json"} | (
        {"kuberay": ".yaml"} if case == "stages" else {}
    )
    assert set(found) == {f"{name}/{job}{end}" for name, end in expected.items() for job in jobs}
    nodes, gpus = (2, 8) if case == "two_nodes" else (1, 1)
    for job in jobs:
        of_job = gpus if job.endswith("deploy") else 0
        task = yaml.safe_load(found[f"skypilot/{job}.yaml"])
        jsonschema.Draft202012Validator(TASK).validate(task)
        assert task["num_nodes"] == nodes
        assert task["resources"].get("accelerators") == (f"H100:{of_job}" if of_job else None)
        assert json.loads(found[f"lepton/{job}.json"])["completions"] == nodes
        arguments = executor_arguments(found[f"nemo_run/{job}.py"])
        assert arguments["nodes"] == nodes and arguments.get("gpus_per_node") == (of_job or None)
        if case == "stages":
            ray = yaml.safe_load(found[f"kuberay/{job}.yaml"])
            jsonschema.Draft202012Validator(RAY_JOB).validate(ray)
            assert ray["spec"].get("entrypointNumGpus", 0) == of_job


def executor_arguments(program: str) -> dict[str, Any]:
    """Plain arguments of SlurmExecutor in a program for NeMo-Run."""
    calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    (call,) = [each for each in calls if isinstance(each.func, ast.Attribute) and each.func.attr == "SlurmExecutor"]
    plain = [each for each in call.keywords if each.arg not in ("tunnel", "packager")]
    return {str(each.arg): ast.literal_eval(each.value) for each in plain}


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_node_says_how_the_stages_end(rank: str, tmp_path: Path) -> None:
    config, executor, _ = elsewhere.exported("two_nodes", tmp_path)
    directory = elsewhere.write("two_nodes", tmp_path)
    task = yaml.safe_load((directory / "skypilot" / "1_deploy.yaml").read_text())
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$POD_IP $*"\n')
    (tmp_path / "python3").chmod(0o755)
    told = {"SKYPILOT_NODE_RANK": rank, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    script = task["run"].replace("cd /opt/slipway", "true")
    ended = subprocess.run(
        ["bash", "-c", script], env={**told, "PATH": f"{tmp_path}:{os.defpath}"}, capture_output=True, text=True
    )
    address, *words = ended.stdout.split()
    assert address == f"10.0.0.{int(rank) + 1}" and words[:2] == ["-m", "launcher.runner"]
    assert words[2:-1] == ([f"--stages-file={RunPaths.of(config).stages}"] if rank == "0" else [])
    assert words[-1].endswith("deploy.plan.json")


def test_the_run_is_on_no_cluster_of_ours_and_needs_the_gpus_name() -> None:
    config = compose(["plans=export", "stages=[deploy]"])
    cluster = cluster_of(config)
    assert isinstance(cluster, Elsewhere)
    with pytest.raises(ConfigError, match=r"plans=export without cluster\.gpu_type"):
        cluster.check(config)
    config.cluster.gpus_per_node = 0
    cluster.check(config)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("memory", {"convert": "12Q"}, "kubernetes.memory.convert is 12Q"),
        ("volumes", {"Results": "/mount"}, "kubernetes.volumes: 'Results'"),
        ("volumes", {"results": "mount"}, "kubernetes.volumes.results is mount"),
        ("secrets", {"HF_TOKEN": "hf"}, "kubernetes.secrets.HF_TOKEN"),
        ("secrets", {"POD_IP": "hf/token"}, "pods have that variable already"),
        ("gpu_resource", "gpu", "kubernetes.gpu_resource=gpu"),
        ("shared_memory", "lots", "kubernetes.shared_memory is lots"),
        ("queue", "team", "kubernetes.queue is given with plans=export"),
        ("secret_files", {"api": "/secrets"}, "kubernetes.secret_files is given with plans=export"),
    ],
)
def test_what_no_file_can_have_is_refused(key: str, value: object, named: str) -> None:
    config = copy.deepcopy(elsewhere.exported("stages", "/mount/results")[0])
    setattr(config.kubernetes, key, value)
    with pytest.raises(ConfigError) as refused:
        cluster_of(config).check(config)
    assert named in refused.value.problem and refused.value.hint


def test_kuberays_pods_have_what_their_job_reads_or_there_is_no_file() -> None:
    config = copy.deepcopy(elsewhere.exported("stages", "/mount/results")[0])
    paths, given = RunPaths.of(config), config.kubernetes

    def preview() -> str:
        return executor_for(config, paths).preview(make_jobs(config, paths, plans_of(config)), ())

    config.env_vars.update({"SHELL_PROMPT": "$(hostname)$$", "API_TOKEN": "of the environment"})
    assert "kuberay    no file of convert-gpt3-demo" in (text := preview())
    assert "kubernetes.secrets={API_TOKEN: SECRET/KEY}" in text and "kuberay" not in str(list(parts(text)))
    given.secrets["API_TOKEN"] = "hub/token"
    pod = yaml.safe_load(parts(preview())["kuberay/1_convert.yaml"])["spec"]["rayClusterSpec"]["headGroupSpec"]
    variables = {each["name"]: each for each in pod["template"]["spec"]["containers"][0]["env"]}
    assert variables["SHELL_PROMPT"]["value"] == "$$(hostname)$$$$"  # Kubernetes makes the given text of it
    assert variables["API_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    given.volumes = {"data": "/data"}
    assert "its pod would not see /mount/results" in preview()


def test_a_server_over_several_nodes_with_its_clients_is_refused() -> None:
    config = compose([*elsewhere.ASKED, "stages=[deploy,evaluate]", "export.model.tensor_model_parallel_size=16"])
    paths = RunPaths.of(config)
    with pytest.raises(ConfigError, match="with its clients in one run"):
        executor_for(config, paths).check(make_jobs(config, paths, plans_of(config)))
