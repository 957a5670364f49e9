"""A run on Kubernetes: what is refused, what is written, and status, logs and cancel by a STAND-IN of kubectl."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from support.runs.composed import compose

from handover.errors import ConfigError, SlipwayError
from launcher import pipeline
from launcher.clusters.table import cluster_of
from launcher.config.choices import ContainerRuntime, Engine, Router, Stage
from launcher.config.schema import PROJECT_DIR, Config, register
from launcher.plan.plan import Resources, StagePlan
from launcher.run import after, artefact
from launcher.run.results import StageResult, write_results
from launcher.submit import jobs
from launcher.submit.jobs import SubmittedJob
from launcher.submit.kubernetes.kubectl import job_id
from launcher.submit.restarting import restart

SEVERAL = {"deployment__replicas": 2}
CHECKPOINT = PROJECT_DIR / "examples" / "gpt3_demo" / "checkpoints"


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """A conversion on Kubernetes, as main.py composes it; its results are nowhere yet."""
    register()
    results = tmp_path_factory.mktemp("claim")
    yield compose(
        [
            *("cluster_type=kubernetes", "container=registry.example/slipway:1.0", f"base_results_dir={results}"),
            *(f"launcher_scripts_path={PROJECT_DIR}", f"export.model.checkpoint_path={CHECKPOINT}"),
            *(f"kubernetes.volumes={{results: {results}}}", "kubernetes.name=demo", "stages=[convert]"),
        ],
        "kubernetes",
    )
    GlobalHydra.instance().clear()


Settings = Callable[..., Config]


@pytest.fixture
def settings(composed: Config) -> Settings:
    """Returns the conversion with other values of some keys; stages by their names."""

    def changed(*stages: str, **values: object) -> Config:
        config = copy.deepcopy(composed)
        config.stages = [Stage[name] for name in stages] or config.stages
        for key, value in values.items():
            *sections, name = key.split("__")
            setattr(functools.reduce(getattr, sections, config), name, value)
        cluster_of(config).fill_in(config)
        return config

    return changed


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("container", None, "a pod has an image"),
        ("container", "two words", "no name of an image"),
        ("kubernetes__name", "GPT_126m", "kubernetes.name=GPT_126m"),
        ("kubernetes__name", "0gpt", "a letter first"),
        ("kubernetes__name", "a" * 40, "39 characters"),
        ("kubernetes__namespace", "My_Team", "RFC 1123"),
        ("kubernetes__queue", "a b", "RFC 1123"),
        ("kubernetes__gpu_resource", "gpu", "it has a domain"),
        ("kubernetes__gpu_node_selector", {"a b": "c"}, "no node has a label"),
        ("kubernetes__volumes", {}, "on none of kubernetes.volumes"),
        ("kubernetes__volumes", {"Results": "/mount"}, "RFC 1123"),
        ("kubernetes__volumes", {"results": "mount"}, "an absolute path"),
        ("kubernetes__volumes", {"results": "/mount/../etc"}, "an absolute path"),
        ("kubernetes__volumes", {"one": "/mount", "two": "/mount"}, "where pods have one"),
        ("kubernetes__volumes", {"one": "/dev/shm"}, "something else"),
        ("kubernetes__secret_files", {"api": "/etc/slipway/plans"}, "something else"),
        ("kubernetes__secrets", {"HF_TOKEN": "huggingface"}, "the secret and the key"),
        ("kubernetes__secrets", {"HF_TOKEN": "Hub/token"}, "RFC 1123"),
        ("kubernetes__secrets", {"POD_IP": "hub/address"}, "pods have that variable already"),
        ("deployment__endpoint_key_env", "API_KEY", "kubernetes.secrets={API_KEY: name/key}"),
        ("kubernetes__memory", {"convert": 512}, "a quantity of memory"),
        ("kubernetes__memory", {"convert": "half"}, "a quantity of memory"),
        ("kubernetes__memory", {"compile": "1Gi"}, "which is no stage"),
        ("kubernetes__shared_memory", "0", "a quantity of memory"),
        ("container_mounts", ["/data"], "kubernetes.volumes"),
        ("cluster__partition", "gpu", "cluster.partition=gpu"),
        ("cluster__srun_args", ["--mpi=none"], "cluster.srun_args"),
        ("cluster__container_runtime", ContainerRuntime.none, "a pod is a container"),
        ("export__model__checkpoint_path", "/elsewhere/126m.nemo", "/elsewhere"),
    ],
)
def test_what_is_refused_is_refused_before_anything_is_written(
    key: str, value: object, named: str, settings: Settings
) -> None:
    config = settings(**{key: value})
    with pytest.raises(SlipwayError) as caught:
        pipeline.launch(config)
    assert named in str(caught.value)
    assert list(Path(config.base_results_dir).iterdir()) == []


def test_files_of_the_checkout_in_the_image_are_those_of_this_one(settings: Settings) -> None:
    """main.py runs from a clone anywhere, as its page has it."""
    image, file = "/opt/slipway", "examples/data/lambada_subset.jsonl"
    config = settings("convert", "export", "deploy", "evaluate", launcher_scripts_path=image)
    config.kubernetes.volumes["examples"] = str(CHECKPOINT)
    config.evaluation.tasks["lambada"].data_path = f"{image}/{file}x"
    with pytest.raises(ConfigError, match=f"the LAMBADA file {image}/{file}x cannot be read"):
        pipeline.launch(config)
    config.evaluation.tasks["lambada"].data_path = f"{image}/{file}"
    pipeline.launch(config)
    (plan,) = Path(config.base_results_dir).glob("*/*/kubernetes/plans/evaluate_lambada.plan.json")
    assert f"--data-path={image}/{file}" in plan.read_text()
    shutil.rmtree(next(Path(config.base_results_dir).iterdir()))


@pytest.mark.parametrize(
    ("stages", "values", "named"),
    [
        (("export", "deploy"), {"force": [Stage.export]}, "stages=[deploy]"),
        (("deploy", "evaluate"), {"deployment__endpoint": "http://server:9000/v1"}, "in a run of its own"),
        (("deploy", "evaluate"), {"deployment__container": "vllm/vllm-openai:v1"}, "share a pod"),
        (("export", "deploy"), {"deployment__engine": Engine.fastertransformer}, "MPI"),
        (("export", "deploy", "evaluate"), {"cluster__gpus_per_node": 1}, "which each node runs"),
        (("export", "deploy"), {"kubernetes__router": True}, "before one pod"),
        (("export", "deploy"), {"deployment__host": "localhost"}, "the loopback of a pod"),
        (
            ("export", "deploy"),
            {"deployment__metrics_port": 8000},
            "http_port and deployment.metrics_port are both 8000",
        ),
        (("export", "deploy", "evaluate"), {"kubernetes__router": True, **SEVERAL}, "before one pod"),
        (("export", "deploy"), {"deployment__affinity_header": "X-Session-Id", **SEVERAL}, "kubernetes.router=true"),
        (("export", "deploy"), {"deployment__router_command": "haproxy -q", **SEVERAL}, "kubernetes.router=true"),
        (("export", "deploy"), {"deployment__router": Router.vllm, **SEVERAL}, "rights that are not rendered"),
    ],
)
def test_servers_that_no_pods_can_be_are_refused(
    stages: Sequence[str], values: dict[str, object], named: str, settings: Settings
) -> None:
    config = settings(
        *stages, **{"cluster__gpus_per_node": 4, "export__model__tensor_model_parallel_size": 8, **values}
    )
    with pytest.raises(ConfigError) as caught:
        pipeline.launch(config)
    assert named in str(caught.value)
    assert list(Path(config.base_results_dir).iterdir()) == []


def test_the_conversions_processes_fit_in_its_memory(settings: Settings) -> None:
    """512 MiB hold ten of the sixteen that are the default, each with a buffer of 32 MiB; the rest is reserve."""
    assert settings().export.model.processes == 10
    assert settings(export__model__processes=2).export.model.processes == 2
    assert settings(kubernetes__memory={"convert": "8Gi"}).export.model.processes == 16
    assert settings(kubernetes__memory={}).export.model.processes == 16


def test_a_directory_is_written_whole_over_one_of_ours_only(
    tmp_path: Path, composed: Config, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    results, directory = Path(composed.base_results_dir), tmp_path / "manifests"
    (directory / "mine").mkdir(parents=True)
    given = {"kubernetes__directory": str(directory)}
    with pytest.raises(SlipwayError, match="was not made by Slipway"):
        pipeline.launch(settings(**given))
    assert list(results.iterdir()) == []
    (directory / "mine").rmdir()
    try:
        pipeline.launch(settings("convert", "export", **given))
        assert {file.name for file in directory.iterdir()} == {"kustomization.yaml", "jobset.yaml", "plans"}
        pipeline.launch(settings(**given))
        assert {file.name for file in directory.iterdir()} == {"kustomization.yaml", "job.yaml", "plans"}
        assert capsys.readouterr().out.endswith(f"start it: kubectl apply -k {directory}\n")
        (logs,) = jobs.find_logs(results)
        plan = logs / "convert" / "convert.plan.json"
        assert (directory / "plans" / plan.name).read_text() == plan.read_text(), "the same as for any other cluster"
    finally:
        for entry in results.iterdir():
            shutil.rmtree(entry)


class Kubectl:
    """A STAND-IN: answers ``get`` with the objects that a test sets, and writes down all that it is asked."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        directory.mkdir()
        monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
        self.knows([])

    def knows(self, objects: list[dict[str, Any]]) -> None:
        (self.directory / "objects").write_text(json.dumps({"kind": "List", "items": objects}))
        self.says(f'test "$1" = get && cat {self.directory}/objects; test "$1" = logs && echo it began; exit 0')

    def says(self, script: str) -> None:
        program = self.directory / "kubectl"
        program.write_text(f'#!/bin/sh\necho "$@" >> {self.directory}/asked\n{script}\n')
        program.chmod(0o755)

    @property
    def asked(self) -> list[str]:
        return (self.directory / "asked").read_text().splitlines()


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    return Kubectl(tmp_path / "bin", monkeypatch)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A run of two stages in a JobSet and a server, of which nothing has run."""
    logs = tmp_path / "run" / "logs"
    stages = ("convert", "export", "deploy")
    write_results(logs / "stages.json", [StageResult(each, each, log=str(logs / f"{each}.log")) for each in stages])
    ids = [job_id("ml", "jobset", "demo-run", stage) for stage in stages[:2]]
    ids.append(job_id("ml", "deployment", "demo-server"))
    found = zip(ids, stages, strict=True)
    jobs.write_jobs(
        logs, [SubmittedJob(each, (stage,), "", str(logs / f"{stage}.log"), "kubernetes") for each, stage in found]
    )
    return logs.parent


def job(name: str, **status: object) -> dict[str, Any]:
    return {"kind": "Job", "metadata": {"name": name}, "status": status}


SET = {"kind": "JobSet", "metadata": {"name": "demo-run"}}
SERVER = {"kind": "Deployment", "metadata": {"name": "demo-server"}, "status": {"readyReplicas": 1}}
COMPLETE = [{"type": "Complete", "status": "True"}]


def test_status_says_what_kubernetes_says(kubectl: Kubectl, results: Path) -> None:
    began, ended = "2026-11-27T07:00:00Z", "2026-11-27T07:02:00Z"
    done = job("demo-run-convert-0", conditions=COMPLETE, startTime=began, completionTime=ended)
    kubectl.knows([SET, done, SERVER])
    lines = jobs.status(results)
    assert "COMPLETED 0:02:00" in lines[1] and "PENDING (Dependency)" in lines[2] and lines[3].endswith("RUNNING")
    assert all("--namespace=ml" in line for line in kubectl.asked)
    failed = [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}]
    queued = [{"type": "Suspended", "status": "True"}]
    kubectl.knows([SET, job("demo-run-convert-0", conditions=failed), job("demo-run-export-0", conditions=queued)])
    lines = jobs.status(results)
    assert "FAILED (PodFailurePolicy)" in lines[1] and "PENDING (Queued)" in lines[2] and "ABSENT" in lines[3]


def test_a_stage_whose_object_was_deleted_is_lost(kubectl: Kubectl, results: Path) -> None:
    write_results(
        results / "logs" / "stages.json",
        [StageResult("convert", "convert", "running", log=str(results / "logs" / "convert.log"))],
    )
    assert jobs.status(results)[1].split()[:2] == ["convert", "lost"]


def test_cancel_deletes_what_has_not_ended_once(kubectl: Kubectl, results: Path) -> None:
    kubectl.knows([SET, job("demo-run-convert-0", conditions=COMPLETE)])
    assert [line.split()[-1] for line in jobs.cancel(results)] == ["export"]
    deleted = [line for line in kubectl.asked if line.startswith("delete")]
    assert deleted == ["delete jobset/demo-run --namespace=ml --ignore-not-found --wait=false"]


def test_restart_of_pods_is_kubernetes_own(results: Path) -> None:
    with pytest.raises(ConfigError, match="are pods, which Kubernetes restarts") as refused:
        list(restart(results))
    assert refused.value.hint == "kubectl rollout restart deployment/demo-server --namespace=ml"


def test_logs_of_stages_without_one_are_kubectls(kubectl: Kubectl, results: Path) -> None:
    (results / "logs" / "convert.log").write_text("on the claim\n")
    lines = jobs.logs(results)
    assert "  on the claim" in lines and lines.count("  it began") == 2
    assert "==> kubectl logs job/demo-run-export-0" in lines and "==> kubectl logs deployment/demo-server" in lines


def test_a_cluster_that_does_not_answer_is_named(kubectl: Kubectl, results: Path) -> None:
    kubectl.says("echo 'Unable to connect to the server: EOF' >&2; exit 1")
    assert "unknown (Unable to connect to the server: EOF)" in jobs.status(results)[1]
    with pytest.raises(SlipwayError, match="Unable to connect to the server"):
        jobs.cancel(results)


def test_without_kubectl_status_is_what_is_on_disk_and_cancel_is_refused(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    line = jobs.status(results)[1]
    assert line.split()[:3] == ["convert", "not", "run"] and line.endswith("unknown (there is no kubectl here)")
    with pytest.raises(SlipwayError, match="there is no kubectl here"):
        jobs.cancel(results)


def test_a_server_waits_for_what_its_own_run_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older result, of another plan, does not count."""
    plan = StagePlan("export", "export", (), Resources(), (), tmp_path / "model", tmp_path / "logs" / "export.log")
    file = tmp_path / "export.plan.json"
    file.write_text(plan.to_json())
    sleeps: list[float] = []

    def publish(seconds: float) -> None:
        sleeps.append(seconds)
        older = replace(plan, env={"OLDER": "1"})
        with artefact.begin(plan if len(sleeps) == 2 else older) as work:
            (work.directory / "config.pbtxt").write_text("")
            work.publish()

    monkeypatch.setattr(after, "pause", publish)
    assert after.main([str(file)]) == 0
    assert len(sleeps) == 2 and capsys.readouterr().err.count("waiting for export") == 1
