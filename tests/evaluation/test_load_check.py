"""What the login side says about a load before anything is submitted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from handover.errors import ConfigError
from launcher.config.schema import PROJECT_DIR, Config, Stage, register, to_typed
from launcher.plan.checks import check
from launcher.plan.paths import RunPaths


@pytest.fixture(autouse=True)
def schema() -> Iterator[None]:
    register()
    yield
    GlobalHydra.instance().clear()


def compose(results: Path, *overrides: str) -> Config:
    given = [f"base_results_dir={results}", "cluster_type=interactive", "cluster=interactive", "benchmark=load"]
    with hydra.initialize_config_dir(str(PROJECT_DIR / "conf"), version_base="1.3"):
        return to_typed(hydra.compose("config", overrides=[*given, "deployment.endpoint=server:8001", *overrides]))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("benchmark.load.lengths=[60]", "no pair of lengths"),
        ("benchmark.load.lengths=[uniform:9:3/20]", "uniform:LOW:HIGH"),
        ("benchmark.load.concurrencies=[]", "concurrencies or request rates"),
        ("benchmark.load.arrival=burst", "legal: constant, poisson"),
        ("benchmark.load.lengths=[shared_gpt]", "a workload is INPUT/OUTPUT"),
        ("benchmark.load.trace=/nowhere/trace.jsonl", "/nowhere/trace.jsonl"),
        ("benchmark.load.trace_speed=0", "trace_speed"),
        ("benchmark.load.prompt_file=/nowhere/talks.jsonl", "/nowhere/talks.jsonl"),
        ("benchmark.slos.ttft_ms=-5", "ttft"),
    ],
)
def test_a_mistake_is_named_before_anything_is_submitted(tmp_path: Path, override: str, words: str) -> None:
    config = compose(tmp_path, override)
    with pytest.raises(ConfigError) as raised:
        check(config, RunPaths.of(config), [Stage.benchmark])
    assert words in str(raised.value)


def test_a_load_that_can_be_measured_passes(tmp_path: Path) -> None:
    config = compose(tmp_path, "benchmark.load.request_rates=[0.5]", "benchmark.slos.e2e_ms=2000")
    check(config, RunPaths.of(config), [Stage.benchmark])


def test_the_check_needs_no_heavy_library() -> None:
    heavy = ["numpy", "pandas", "matplotlib", "tritonclient", "grpc"]
    code = f"import evaluation.speed.load_arguments, sys; print([name for name in {heavy!r} if name in sys.modules])"
    listed = subprocess.run([sys.executable, "-c", code], cwd=PROJECT_DIR, capture_output=True, text=True, check=True)
    assert listed.stdout.strip() == "[]"
