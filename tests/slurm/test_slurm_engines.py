"""Another project's server as a job of the real cluster: a stand-in for its program, everything else real."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.engine_programs import PLACE
from support.slurm.cluster import SlurmCluster, wait_until
from support.slurm.launches import (
    PROJECT,
    Launched,
    assert_clean,
    launch,
    node_of,
    override,
)

LLAMA = PROJECT / "examples" / "llama_demo" / "checkpoints"
SMALL = ("evaluation.lambada.samples=4", "export.run.model_train_name=tiny", "export.model.weight_data_type=fp32")
ENGINE = ("deployment.engine=vllm", override("deployment.command", f"{sys.executable} {PLACE}/vllm"))
MODEL = (override("export.model.checkpoint_path", LLAMA), "export.triton_deployment.data_type=fp32")


@pytest.fixture(scope="module")
def evaluated(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    results = tmp_path_factory.mktemp("engines") / "re sults"
    launched = launch(slurm, results, "stages=[export,deploy,evaluate]", *ENGINE, *MODEL, *SMALL)
    slurm.wait_for_end(*launched.ids, timeout_s=240)
    return launched


def test_the_server_and_its_clients_are_one_job(slurm: SlurmCluster, evaluated: Launched) -> None:
    assert [job.stages for job in evaluated.jobs] == ["convert", "deploy+evaluate+report"]
    assert set(slurm.states(*evaluated.ids).values()) == {"COMPLETED"}, evaluated.jobs[-1].errors
    assert {stage["state"] for stage in evaluated.stages.values()} == {"done"}
    (metrics,) = evaluated.results.glob("*/*/evaluation/lambada/metrics.json")
    assert json.loads(metrics.read_text())["samples"] == 4
    for node in ("node1", "node2"):
        assert_no_engine(slurm, node)


def test_a_server_alone_is_reached_at_its_nodes_address_and_cancelled(slurm: SlurmCluster, evaluated: Launched) -> None:
    """scancel leaves it Slurm's KillWait; its children take no notice of SIGTERM."""
    launched = launch(slurm, evaluated.results, "stages=[deploy]", *ENGINE, *MODEL, *SMALL)
    file = evaluated.results / "tiny" / "export_tp1_pp1_fp32_fp32_vllm" / "deployment" / "endpoint.json"
    wait_until(file.exists, 90, lambda: f"no {file}; {launched.jobs[0].errors}")
    endpoint = json.loads(file.read_text())
    node = node_of(slurm, launched)
    assert endpoint["job_id"] == launched.ids[0]
    assert endpoint["openai_url"] == f"http://{endpoint['host']}:{endpoint['openai_port']}/v1"
    assert endpoint["host"].startswith("127.0.1.")
    slurm.run("scancel", *launched.ids)
    assert list(slurm.wait_for_end(*launched.ids).values()) == ["CANCELLED"]
    assert_clean(slurm, node)
    assert_no_engine(slurm, node)
    assert not file.exists()


def assert_no_engine(slurm: SlurmCluster, node: str) -> None:
    """The nodes of the test cluster are this host: no stand-in runs on it, whatever it calls itself."""
    names = []
    for entry in Path("/proc").glob("[0-9]*/comm"):
        try:
            names.append(entry.read_text().strip())
        except OSError:
            continue
    assert "STAND-IN::Core" not in names, node
