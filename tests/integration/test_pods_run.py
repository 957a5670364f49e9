"""What ``cluster_type=kubernetes`` renders, run: pods as processes of this machine (``support/kubernetes``).

Kubernetes itself is not here. The kubelet and the controllers are stand-ins, the outermost boundary of these tests; all
that a pod runs is real: the runner, the stages, tritonserver.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from support.kubernetes.controllers import Cluster
from support.kubernetes.kubelet import Pod
from support.runs.composed import compose, plans_of
from support.servers.prometheus import Prometheus
from support.servers.served import PROJECT, generate, wait_for
from tritonclient.utils import InferenceServerException

from handover.endpoint import Endpoint
from launcher.clusters.kubernetes import Kubernetes
from launcher.config.schema import register
from launcher.pipeline import executor_for, make_jobs
from launcher.plan.paths import RunPaths
from launcher.run.results import StageResult, write_results

NEMO = PROJECT / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"


@pytest.fixture(autouse=True)
def schema() -> Iterator[None]:
    register()
    yield
    GlobalHydra.instance().clear()


def render(results: Path, *settings: str) -> Path:
    """Write a run's manifests; their directory. The checkout is where the image would have the code."""
    places = [f"kubernetes.volumes={{results: {results}}}", f"base_results_dir={results}"]
    own = ["cluster_type=kubernetes", "container=registry.example/slipway:1", f"launcher_scripts_path={PROJECT}"]
    types = ["export.model.weight_data_type=fp32", "export.triton_deployment.data_type=fp32"]
    config = compose([*own, *places, *types, *settings], "kubernetes")
    Kubernetes().fill_in(config)
    paths, jobs = RunPaths.of(config), make_jobs(config, RunPaths.of(config), plans_of(config))
    executor = executor_for(config, paths)
    executor.check(jobs)
    write_results(paths.stages, [StageResult(plan.stage, plan.name) for job in jobs for plan in job.plans])
    assert executor.submit(jobs, ()) == 0
    return paths.results / "kubernetes"


def states(manifests: Path) -> dict[str, str]:
    """How the stages ended, as the runners noted it."""
    noted = json.loads((manifests.parent / "logs" / "stages.json").read_text())
    return {each["stage"]: each["state"] for each in noted}


def checkpoint(results: Path) -> str:
    """A checkpoint that pods see: on the claim."""
    link = results / NEMO.name
    link.write_bytes(NEMO.read_bytes())
    return f"export.model.checkpoint_path={link}"


def test_the_jobs_of_a_jobset_run_in_their_order_in_pods(tmp_path: Path) -> None:
    manifests = render(
        tmp_path, "stages=[convert,export]", checkpoint(tmp_path), "kubernetes.secrets={HF_TOKEN: hf/token}"
    )
    with Cluster(manifests, tmp_path / "node", {("hf", "token"): "hidden"}) as cluster:
        assert cluster.run_job_set() == {"convert": 0, "export": 0}, [pod.output for pod in cluster.pods]
    model = manifests.parent / "model_repo" / "gpt3_demo"
    assert (model / "fastertransformer" / "config.pbtxt").is_file() or (model / "config.pbtxt").is_file()
    assert not list((tmp_path / "node").glob("*.json"))


def test_a_stage_that_fails_is_not_repeated_and_the_next_is_not_begun(tmp_path: Path) -> None:
    manifests = render(tmp_path, "stages=[convert,export]", checkpoint(tmp_path))
    (tmp_path / NEMO.name).write_bytes(b"damaged")
    with Cluster(manifests, tmp_path / "node") as cluster:
        assert cluster.run_job_set() == {"convert": 1}
        (pod,) = cluster.pods
        assert "convert" in pod.output and "Traceback" not in pod.output
    assert states(manifests)["convert"] == "failed"


@pytest.mark.long  # what pods do with stages is in the tests above
def test_five_stages_end_to_end(tmp_path: Path) -> None:
    stages = "stages=[convert,export,deploy,evaluate,benchmark]"
    manifests = render(
        tmp_path, stages, "cluster.gpus_per_node=0", checkpoint(tmp_path), "benchmark.lengths=[[8,4]]",
        "evaluation.lambada.samples=4", "kubernetes.memory.deploy=4Gi",
    )  # fmt: skip
    with Cluster(manifests, tmp_path / "node") as cluster:
        ended = cluster.run_job_set()
        assert set(ended.values()) == {0}, [pod.output for pod in cluster.pods]
        assert list(ended) == ["convert", "export", "deploy"]
    done = states(manifests)
    assert set(done.values()) == {"done"} and {"deploy", "evaluate", "benchmark", "report"} <= set(done)
    assert (manifests.parent / "report" / "report.md").is_file()


@pytest.mark.long  # the server is that of other tests; what a pod adds to it is in test_pods_end.py
def test_a_server_in_a_pod_is_ready_by_its_probe_and_ends_in_its_time_of_grace(tmp_path: Path) -> None:
    settings = [checkpoint(tmp_path), "cluster.gpus_per_node=0"]
    with Cluster(render(tmp_path, "stages=[convert,export]", *settings), tmp_path / "node") as cluster:
        assert set(cluster.run_job_set().values()) == {0}
    manifests = render(tmp_path, "stages=[deploy]", *settings, "deployment.openai_port=0")
    with Cluster(manifests, tmp_path / "server") as cluster:
        (pod,) = cluster.start_deployment()
        file = manifests.parent / "deployment" / "endpoint.json"
        wait_for(lambda: pod.is_ready and file.exists())
        assert pod.address in file.read_text() and generate(Endpoint.read(file), "the world", 8)
        pod.delete()
        assert not pod.ended_hard and pod.status == 0, pod.output
    assert not file.exists()


@pytest.mark.long  # the ranks are those of test_ranks.py, by LWS_WORKER_INDEX
def test_two_pods_of_a_leaderworkerset_serve_one_model_and_are_made_again_together(tmp_path: Path) -> None:
    settings = [checkpoint(tmp_path), "export.model.tensor_model_parallel_size=2", "cluster.gpus_per_node=1"]
    with Cluster(render(tmp_path, "stages=[convert,export]", *settings), tmp_path / "node") as cluster:
        assert set(cluster.run_job_set().values()) == {0}
    manifests = render(tmp_path, "stages=[deploy]", *settings)
    file = manifests.parent / "deployment" / "endpoint.json"
    with Cluster(manifests, tmp_path / "server") as cluster:
        groups = cluster.keep_group()
        first = next(groups)
        assert len(first) == 2
        said = _answer(first, file)
        assert "LWS_WORKER_INDEX and LWS_GROUP_SIZE" not in first[1].output
        first[1].kill()
        second = next(groups)
        assert not set(second) & set(first)
        assert _answer(second, file) == said
    assert not file.exists()


@pytest.mark.long  # HAProxy's part is in test_router_by_name.py, the manifests are in tests/golden
def test_several_servers_behind_a_router_are_replaced_without_a_lost_request(tmp_path: Path) -> None:
    settings = [checkpoint(tmp_path), "cluster.gpus_per_node=0"]
    with Cluster(render(tmp_path, "stages=[convert,export]", *settings), tmp_path / "node") as cluster:
        assert set(cluster.run_job_set().values()) == {0}
    replicas = ["deployment.replicas=2", "kubernetes.router=true", "deployment.openai_port=0"]
    manifests = render(tmp_path, "stages=[deploy]", *settings, *replicas)
    with Cluster(manifests, tmp_path / "servers") as cluster:
        (router,), pods = cluster.start_deployment("router"), cluster.start_deployment()
        wait_for(lambda: router.is_ready and all(pod.is_ready for pod in pods))
        files = sorted((manifests.parent / "deployment").glob("replica-*/endpoint.json"))
        assert {Endpoint.read(file).host for file in files} == {pod.address for pod in pods}
        assert not (manifests.parent / "deployment" / "endpoint.json").exists()
        before = Endpoint(router.address, grpc_port=8001)
        wait_for(lambda: _works(before))
        with Prometheus(_monitored(cluster, pods), tmp_path) as prometheus:
            _check_sums(prometheus, before)
        said, failures, is_over = generate(before, "the world", 8), list[str](), threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                try:
                    assert generate(before, "the world", 8) == said
                except Exception as error:
                    failures.append(str(error))

        asking = threading.Thread(target=ask)
        asking.start()
        made = cluster.roll(pods)
        is_over.set()
        asking.join()
        assert not failures, failures
        assert all(pod.status == 0 and not pod.ended_hard for pod in pods), [pod.output for pod in pods]
        assert all(pod.is_ready and not pod.restarts for pod in made)
    assert not list((manifests.parent / "deployment").glob("replica-*/endpoint.json"))


def _monitored(cluster: Cluster, pods: list[Pod]) -> list[dict[str, Any]]:
    """What the Prometheus operator makes of the PodMonitor: a target for each of its pods, which has its name."""
    spec = cluster.found("PodMonitor")["spec"]
    (asked,) = spec["podMetricsEndpoints"]
    assert asked["path"] == "/metrics" and all(
        spec["selector"]["matchLabels"].items() <= pod.labels.items() for pod in pods
    )
    ports = cluster.found("Deployment")["spec"]["template"]["spec"]["containers"][0]["ports"]
    (port,) = [each["containerPort"] for each in ports if each["name"] == asked["port"]]
    return [{"targets": [f"{pod.address}:{port}"], "labels": {"pod": pod.name}} for pod in pods]


def _check_sums(prometheus: Prometheus, router: Endpoint) -> None:
    """Of what the router is asked both servers count a part, and the sum is all of it."""
    counted = 'vllm:request_success_total{finished_reason="length"}'
    wait_for(lambda: prometheus.query("up") == [1.0, 1.0])
    wait_for(lambda: len(prometheus.query(counted)) == 2)
    parts, (total,) = prometheus.query(counted), prometheus.query(f"sum without (pod, instance) ({counted})")
    assert total == sum(parts)
    for _ in range(6):
        generate(router, "the world", 8)
    wait_for(lambda: prometheus.query(f"sum without (pod, instance) ({counted})") == [total + 6])
    assert all(now > then for now, then in zip(prometheus.query(counted), parts, strict=True))


def _works(endpoint: Endpoint) -> bool:
    """Whether a generation comes back."""
    try:
        return bool(generate(endpoint, "the world", 8))
    except InferenceServerException:
        return False


def _answer(pods: list[Pod], file: Path) -> str:
    """What the group answers once its leader is ready."""
    deadline = time.monotonic() + 180
    while not (pods[0].is_ready and file.exists()):  # the server takes requests before it has proved that it generates
        assert time.monotonic() < deadline and not any(pod.restarts for pod in pods), [pod.output for pod in pods]
        time.sleep(0.2)
    return generate(Endpoint.read(file), "the world", 8)
