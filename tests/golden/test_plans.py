"""Golden plans: one file a stage and case, reviewed as diffs. ``make golden`` rewrites them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from launcher.config import PROJECT_DIR, Config, register, to_typed
from launcher.paths import RunPaths
from launcher.pipeline import group, ordered_stages, plan_stages
from launcher.plan import StagePlan

HERE = Path(__file__).resolve().parent
PLACES = ["launcher_scripts_path=/opt/slipway", "base_results_dir=/mount/results"]
FIVE = "stages=[convert,export,deploy,evaluate,benchmark]"
CASES = {
    "one_gpu": [FIVE],
    "two_nodes": [
        *(FIVE, "cluster_type=bcm", "export.model.tensor_model_parallel_size=8", "container=nvcr.io/nvidia/nemo:24.05"),
        *("export.triton_deployment.pipeline_model_parallel_size=2", "container_mounts=[/mount/data]"),
    ],
    "hostile_name": [FIVE, 'export.run.model_train_name="it\'s; touch x"'],
    "attached": ["stages=[evaluate,benchmark]", "deployment.endpoint=server:8001"],
}


@pytest.fixture(autouse=True)
def schema() -> Iterator[None]:
    register()
    yield
    GlobalHydra.instance().clear()


def compose(overrides: list[str]) -> Config:
    with hydra.initialize_config_dir(str(PROJECT_DIR / "conf"), version_base="1.3"):
        return to_typed(hydra.compose("config", overrides=[*PLACES, *overrides]))


def plans_of(config: Config) -> list[StagePlan]:
    paths = RunPaths.of(config)
    return plan_stages(config, paths, ordered_stages(config, paths))


@pytest.mark.parametrize("case", CASES)
def test_plans_are_as_reviewed(case: str, request: pytest.FixtureRequest) -> None:
    config = compose(CASES[case])
    text = "".join(plan.to_json() for plan in plans_of(config)).replace(str(PROJECT_DIR), "<project>")
    golden = HERE / f"{case}.json"
    if request.config.getoption("--rewrite-golden"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_a_server_and_its_clients_are_one_job() -> None:
    jobs = group(plans_of(compose(CASES["one_gpu"])))
    assert [[plan.stage for plan in job] for job in jobs] == [
        ["convert"],
        ["export"],
        ["deploy", "evaluate", "benchmark", "report"],
    ]


def test_attached_clients_need_no_server() -> None:
    plans = plans_of(compose(CASES["attached"]))
    assert [(plan.stage, plan.needs_server) for plan in plans] == [
        ("evaluate", False),
        ("benchmark", False),
        ("report", False),
    ]


def test_the_results_layout_is_that_of_nemo_megatron_launcher() -> None:
    overrides = ["export.run.model_train_name=gpt3_5b", "export.model.tensor_model_parallel_size=8"]
    config = compose([*overrides, "export.triton_deployment.pipeline_model_parallel_size=2"])
    root = "/mount/results/gpt3_5b"
    assert config.export.model.checkpoint_path == f"{root}/checkpoints"
    expected = f"{root}/export_tp8_pp2_fp16_fp16/model_repo/gpt3_5b"
    assert config.export.triton_deployment.triton_model_dir == expected
    assert str(RunPaths.of(config).ft_checkpoint) == f"{root}/ft_tp8_fp16/8-gpu"
