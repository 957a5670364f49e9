"""Launch main.py on the login node of the test cluster, and look at what it started."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.slurm.cluster import SlurmCluster, wait_until

PROJECT = Path(__file__).resolve().parents[3]
NEMO = PROJECT / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"
DEMONSTRATION = PROJECT / "examples" / "gpt3_demo" / "checkpoints" / "gpt3_demo.nemo"
SMALL = ("benchmark.lengths=[[8,8]]", "benchmark.batch_sizes=[1,2]", "evaluation.lambada.samples=20")
FIVE_STAGES = "stages=[convert,export,deploy,evaluate,benchmark]"
HOSTILE = """it's "quoted"; touch x"""

_LINE = re.compile(r"(?P<stages>\S+) +submitted +job (?P<job>\d+) +(?P<dependency>\S*) +log (?P<log>.*)")


@dataclass(frozen=True)
class Submitted:
    """One line of what main.py printed."""

    stages: str
    job: str
    dependency: str
    log: Path

    @property
    def errors(self) -> str:
        return self.log.with_suffix(".err").read_text()


@dataclass(frozen=True)
class Launched:
    results: Path
    jobs: list[Submitted]

    @property
    def ids(self) -> list[str]:
        return [job.job for job in self.jobs]

    @property
    def stages(self) -> dict[str, dict[str, str]]:
        """What the runners noted about each stage."""
        (file,) = self.results.glob("*/*/logs/stages.json")
        return {entry["stage"]: entry for entry in json.loads(file.read_text())}


def override(key: str, value: str | Path) -> str:
    """Quote a value for Hydra's command-line grammar."""
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}="{escaped}"'


def run_main(slurm: SlurmCluster, results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """cluster_type is left at auto: that a controller answers decides."""
    return subprocess.run(
        [sys.executable, str(PROJECT / "main.py"), override("base_results_dir", results), *arguments],
        cwd=results.parent,
        env=slurm.client_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


def launch(slurm: SlurmCluster, results: Path, *arguments: str) -> Launched:
    result = run_main(slurm, results, *arguments)
    # A checkpoint of another family than the default's is named, and that is all that may be said beside the jobs.
    said = [line for line in result.stderr.splitlines() if ", the default, stays: " not in line]
    assert result.returncode == 0 and not said, result.stdout + result.stderr
    lines = [_LINE.fullmatch(line) for line in result.stdout.splitlines()]
    jobs = [
        Submitted(found["stages"], found["job"], found["dependency"], Path(found["log"])) for found in lines if found
    ]
    assert len(jobs) == len(lines), result.stdout
    return Launched(results, jobs)


def serve(slurm: SlurmCluster, finished: Launched, root: Path, *arguments: str, stages: str = "deploy") -> Launched:
    """Start a server job of its own on the exported model."""
    (repository,) = finished.results.glob("*/*/model_repo")
    places = (
        override("export.triton_deployment.triton_model_dir", repository / "tiny"),
        "export.run.model_train_name=tiny",
        f"deployment.run.name={root.name}",  # another name: singleton makes jobs of one name wait for each other
    )
    return launch(slurm, root / "results", f"stages=[{stages}]", *places, *arguments)


def endpoint_of(launched: Launched) -> Path:
    (directory,) = launched.results.glob("*/export_*")
    return directory / "deployment" / "endpoint.json"


def wait_for_endpoint(launched: Launched) -> None:
    endpoint = endpoint_of(launched)
    log = launched.jobs[0].log
    wait_until(endpoint.exists, lambda: f"no {endpoint}; {log.read_text() if log.exists() else 'the job is pending'}")


def is_running(launched: Launched, stage: str) -> bool:
    return bool(list(launched.results.glob("*/*/logs/stages.json"))) and launched.stages[stage]["state"] == "running"


def node_of(slurm: SlurmCluster, launched: Launched) -> str:
    return slurm.run("squeue", "-h", "-o", "%N", "-j", launched.ids[0]).strip()


def assert_clean(slurm: SlurmCluster, *nodes: str) -> None:
    """No process of a job is left on the nodes, and nothing in shared memory."""
    for node in nodes:
        _wait_until_clean(slurm, node)
        shared = slurm.shared_memory_of(node)
        assert not shared, f"left in shared memory of {node}: {shared}"


def _wait_until_clean(slurm: SlurmCluster, node: str) -> None:
    wait_until(lambda: not slurm.processes_on(node), lambda: f"left on {node}: {slurm.processes_on(node)}")
