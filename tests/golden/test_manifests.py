"""Manifests of Kubernetes: golden files, reviewed as diffs, and what is true of every set of them.

They are held against Kubernetes' own schemas as strictly as those can be, against reduced ones of custom resources, and
against rules of our own. Nothing is applied: there is no cluster.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from support.kubernetes.objects import Object, check_objects, job_templates, pod_templates, read_directory
from support.kubernetes.schemas import SCHEMAS
from support.runs.composed import FIVE, compare, compose, plans_of

from launcher.clusters.table import cluster_of
from launcher.config.schema import PROJECT_DIR, Config, register
from launcher.pipeline import executor_for, make_jobs
from launcher.plan.paths import RunPaths

HERE = Path(__file__).resolve().parent
VERSIONS = ("1.31.0", "1.37.0")  # the first in which all fields are stable that are written, and the newest known
GIVEN = [
    *("cluster_type=kubernetes", "container=registry.example/slipway:1.0", "kubernetes.volumes={results: /mount}"),
    *(f"launcher_scripts_path={PROJECT_DIR}", "export.model.checkpoint_path=/mount/126m.nemo"),
]
OPENAI = ["deployment.openai_port=0", "deployment.exit_timeout_s=120", "deployment.start_timeout_s=605"]
CASES = {
    "convert": [*GIVEN, "stages=[convert]", "kubernetes.pod_monitor=false", "export.run.time_limit=UNLIMITED"],
    "five": [
        *(*GIVEN, FIVE, "kubernetes.name=five", "kubernetes.namespace=ml", "kubernetes.queue=gpus"),
        *("kubernetes.secrets={HF_TOKEN: huggingface/token}", "kubernetes.memory.deploy=64Gi"),
        *("kubernetes.gpu_node_selector={nvidia.com/gpu.product: NVIDIA-L4}", "evaluation=[lambada,squad]"),
    ],
    "server": [*GIVEN, *OPENAI, "stages=[convert,export,deploy]", "kubernetes.secret_files={api: /secrets}"],
    "two_nodes": [
        *(*GIVEN, "stages=[deploy]", "cluster.gpus_per_node=1", "export.model.tensor_model_parallel_size=2"),
        *("kubernetes.queue=gpus", "kubernetes.gpu_resource=nvidia.com/mig-1g.10gb"),
    ],
    "vllm": [*GIVEN, "stages=[deploy]", "deployment.engine=vllm", "deployment.container=vllm/vllm-openai:v0.19.0"],
    "vllm_nodes": [
        *(*GIVEN, "stages=[export,deploy]", "deployment.engine=vllm", "export.model.tensor_model_parallel_size=16"),
        *("export.model.format=huggingface", "kubernetes.pod_monitor=false"),
    ],
    "replicas": [
        *(*GIVEN, *OPENAI, "stages=[convert,export,deploy]", "deployment.replicas=3", "kubernetes.router=true"),
        *("deployment.affinity_header=X-Session-Id", "kubernetes.secret_files={api: /secrets}"),
    ],
    "replicas_nodes": [
        *(*GIVEN, "stages=[deploy]", "cluster.gpus_per_node=1", "export.model.tensor_model_parallel_size=2"),
        "deployment.replicas=2",
    ],
    "attached": [*GIVEN, "stages=[evaluate,benchmark]", "deployment.endpoint=http://server:9000/v1"],
}


def rendered(overrides: list[str], directory: Path) -> tuple[Config, str]:
    """Write a case's directory; also what a dry run prints of it."""
    config = compose(overrides, "kubernetes")
    cluster_of(config).fill_in(config)
    cluster_of(config).check(config)
    config.kubernetes.directory = str(directory)
    paths = RunPaths.of(config)
    jobs = make_jobs(config, paths, plans_of(config))
    executor = executor_for(config, paths)
    executor.check(jobs)
    preview = executor.preview(jobs, ())
    files = executor.files(jobs, ())  # type: ignore[attr-defined]
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return config, preview.replace(str(directory), "<directory>")


@pytest.mark.parametrize("case", CASES)
def test_manifests_are_as_reviewed_and_hold(
    case: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, preview = rendered(CASES[case], tmp_path)
    plain = re.sub(r"(slipway/plans: )'?[0-9a-f]{16}'?", r"\1<digest>", preview)  # of plans, which name this checkout
    compare(plain, HERE / "kubernetes" / f"{case}.yaml", request)
    objects, maps = read_directory(tmp_path)
    check_objects(objects, maps)
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", _schemas)
    for each in objects:
        validate(each)
    jsonschema.validate(yaml.safe_load((tmp_path / "kustomization.yaml").read_text()), SCHEMAS["Kustomization"])
    served = [spec for each in objects for _, template in pod_templates(each) if "ports" in (spec := template["spec"])]
    serving = [spec for spec in served if "ports" in spec["containers"][0]]
    assert all(spec["terminationGracePeriodSeconds"] > config.deployment.exit_timeout_s + 40 for spec in serving)


_schemas = functools.cache(kubernetes_validate.utils.schema_contents)


def validate(found: Object) -> None:
    """Hold an object against its schema; the pods and jobs of a custom resource against those of Kubernetes."""
    if found["kind"] in SCHEMAS:
        jsonschema.validate(found, SCHEMAS[found["kind"]])
    known = [job for _, job in job_templates(found)] or [
        {"apiVersion": "v1", "kind": "Pod", **template} for _, template in pod_templates(found)
    ]
    for each in known if found["kind"] in SCHEMAS else [found]:
        for version in VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Object], dict[str, dict[str, str]]]:
    """A server with the stages before it."""
    register()
    directory = tmp_path_factory.mktemp("server")
    rendered(CASES["server"], directory)
    return read_directory(directory)


def break_(path: str, value: Any) -> Callable[[list[Object]], None]:
    """Return what sets a field of an object, by its kind and keys; a list's by number."""

    def do(objects: list[Object]) -> None:
        kind, *keys, last = path.split("/")
        place: Any = next(each for each in objects if each["kind"] == kind)
        for key in keys:
            place = place[int(key) if key.isdecimal() else key]
        place[last] = value

    return do


POD, SET = "Deployment/spec/template/spec", "JobSet/spec/replicatedJobs"
BROKEN = {
    "a volume that nothing mounts": break_(f"{POD}/containers/0/volumeMounts/1/name", "claim-1"),
    "a name that is none": break_("Service/metadata/name", "0server"),
    "two of a name": break_("PodMonitor/kind", "Service"),
    "a Service of no pod": break_("Service/spec/selector", {"app.kubernetes.io/component": "serve"}),
    "a Service of all pods": break_("Service/spec/selector", {"app.kubernetes.io/name": "slipway"}),
    "a port that is another": break_("Service/spec/ports/0/port", 80),
    "a probe of no port": break_(f"{POD}/containers/0/livenessProbe/httpGet/port", "health"),
    "metrics of no port": break_("PodMonitor/spec/podMetricsEndpoints/0/port", "prometheus"),
    "a deadline of what stays": break_(f"{POD}/activeDeadlineSeconds", 60),
    "a job that is started for ever": break_(f"{SET}/0/template/spec/template/spec/restartPolicy", "Always"),
    "a stage that waits for none": break_(f"{SET}/1/dependsOn", []),
    "a stage that waits for a beginning": break_(f"{SET}/1/dependsOn/0/status", "Ready"),
    "a plan that is none": break_(f"{POD}/containers/0/command", ["python3", "/etc/slipway/plans/x.plan.json"]),
    "a secret that is written": break_(f"{POD}/containers/0/env", [{"name": "HF_TOKEN", "value": "x"}]),
    "devices that are overcommitted": break_(f"{POD}/containers/0/resources/requests", {"nvidia.com/gpu": 0}),
}


@pytest.mark.parametrize("defect", BROKEN)
def test_the_rules_see_what_is_broken(defect: str, server: tuple[list[Object], dict[str, dict[str, str]]]) -> None:
    objects, maps = copy.deepcopy(server[0]), server[1]
    check_objects(objects, maps)
    BROKEN[defect](objects)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        check_objects(objects, maps)


def test_the_schemas_see_what_is_not_written(server: tuple[list[Object], dict[str, dict[str, str]]]) -> None:
    for each in copy.deepcopy(server[0]):
        each["spec"]["replica"] = 1
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            validate(each)
