"""What the login side says about a load before anything is submitted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from evaluation.speed.prompts.workload import Workload
from handover.errors import ConfigError
from launcher.config.choices import Stage
from launcher.config.schema import PROJECT_DIR, Config, register, to_typed
from launcher.plan.checks import check
from launcher.plan.paths import RunPaths
from launcher.plan.stages.benchmark import load_arguments


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


@pytest.mark.parametrize(
    ("preset", "samples", "limits"),
    [  # of loadgen/mlperf.conf in MLCommons' inference repository
        ("mlperf_llama3_1_8b_server", 13368, (("ttft", 2000), ("tpot", 100))),
        ("mlperf_llama3_1_8b_interactive", 13368, (("ttft", 500), ("tpot", 30))),
        ("mlperf_llama2_70b_server", 24576, (("ttft", 2000), ("tpot", 200))),
        ("mlperf_llama2_70b_interactive", 24576, (("ttft", 450), ("tpot", 40))),
        ("mlperf_gptj_server", 13368, (("e2e", 20000),)),
    ],
)
def test_presets_have_the_shape_of_mlperf_and_say_that_they_are_none(
    tmp_path: Path, preset: str, samples: int, limits: tuple[tuple[str, float], ...]
) -> None:
    config = compose(tmp_path, f"benchmark={preset}")
    check(config, RunPaths.of(config), [Stage.benchmark])
    arguments = load_arguments(config, RunPaths.of(config))
    assert (arguments.slos, arguments.samples) == (limits, samples)
    assert (arguments.search_percentile, arguments.search_duration_s, arguments.arrival) == (99, 600, "poisson")
    assert arguments.remark.startswith("not an MLPerf result")
    assert len(set(map(Workload.parse, arguments.lengths))) == 1


def test_the_check_needs_no_heavy_library() -> None:
    heavy = ["numpy", "pandas", "matplotlib", "tritonclient", "grpc"]
    code = f"import evaluation.speed.load_arguments, sys; print([name for name in {heavy!r} if name in sys.modules])"
    listed = subprocess.run([sys.executable, "-c", code], cwd=PROJECT_DIR, capture_output=True, text=True, check=True)
    assert listed.stdout.strip() == "[]"
