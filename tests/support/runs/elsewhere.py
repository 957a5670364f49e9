"""Jobs that ``plans=export`` writes, of two runs: stages on one node, and a server over two that stays."""

from __future__ import annotations

import functools
from pathlib import Path

from launcher.config.schema import Config
from launcher.pipeline import executor_for, make_jobs
from launcher.plan.paths import RunPaths
from launcher.submit.elsewhere.executor import ElsewhereExecutor
from support.runs.composed import compose, plans_of

CASES = {
    "stages": ["stages=[convert,export,deploy,evaluate]", "cluster.account=us"],
    "two_nodes": [
        *("stages=[deploy]", "export.model.tensor_model_parallel_size=16", "cluster.account=us"),
        *("cluster.partition=gpu", "kubernetes.memory.deploy=64Gi"),
        *("kubernetes.secrets={HF_TOKEN: huggingface/token}", "env_vars.NCCL_DEBUG=INFO"),
    ],
}  # fmt: skip
ASKED = ["plans=export", "cluster.gpu_type=H100", "container=registry/slipway:1"]


@functools.cache
def exported(case: str, results: Path | str) -> tuple[Config, ElsewhereExecutor, str]:
    """Compose a case; its executor, and the text of its files."""
    places = [f"kubernetes.volumes={{results: {results}}}", f"base_results_dir={results}"]
    config = compose([*ASKED, *places, *CASES[case]])
    paths = RunPaths.of(config)
    executor = executor_for(config, paths)
    assert isinstance(executor, ElsewhereExecutor)
    jobs = make_jobs(config, paths, plans_of(config))
    executor.check(jobs)
    return config, executor, executor.preview(jobs, ())


def write(case: str, results: Path) -> Path:
    """Write the files of a case; the directory with a folder for each launcher."""
    config, executor, _ = exported(case, results)
    assert executor.submit(make_jobs(config, RunPaths.of(config), plans_of(config)), ()) == 0
    return executor.directory
