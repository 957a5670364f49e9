"""Every key of NeMo-Megatron-Launcher's conf/evaluation for GPT, T5 and mT5 works here or says what to use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from launcher.config import wording
from launcher.config.nemo_keys import option_hint
from launcher.config.schema import PROJECT_DIR, register, to_typed
from launcher.plan.paths import RunPaths
from launcher.plan.stages.evaluate import task_arguments

KEYS = (Path(__file__).parents[1] / "data" / "nemo_launcher_evaluation_keys.txt").read_text().split()
WORK = {"model.eval_batch_size", "run.name", "run.results_dir", "run.tasks", "run.time_limit"}


def compose(*overrides: str) -> object:
    register()
    with hydra.initialize_config_dir(str(PROJECT_DIR / "conf"), version_base="1.3"):
        return hydra.compose("config", overrides=list(overrides))


@pytest.fixture(scope="module")
def composed() -> Any:
    return compose()


@pytest.mark.parametrize("key", [key for key in KEYS if key not in WORK])
def test_a_key_without_a_meaning_says_what_to_use(key: str, composed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    override = f"evaluation.{key}=1"
    monkeypatch.setattr("sys.argv", ["main.py", override])
    parsed = OverridesParser.create().parse_override(override)
    with pytest.raises((HydraException, OmegaConfBaseException)) as refused:
        ConfigLoaderImpl._apply_overrides_to_config([parsed], composed)  # the last that composing does
    worded = wording.explain(refused.value)
    assert worded.problem.startswith("unknown key '") and worded.hint
    assert "legal:" not in worded.hint, "this key's own hint, not the list of all"


@pytest.mark.parametrize("key", sorted(WORK))
def test_a_key_with_a_meaning_is_taken(key: str) -> None:
    compose(f"evaluation.{key}=1")


def test_the_launchers_batch_size_is_that_of_every_evaluation() -> None:
    config = to_typed(compose("evaluation=[lambada,squad]", "evaluation.model.eval_batch_size=5"))  # type: ignore[arg-type]
    paths = RunPaths.of(config)
    given = [task_arguments(config, paths, *task).to_argv() for task in config.evaluation.tasks.items()]
    assert len(given) == 2 and all("--batch-size=5" in argv for argv in given)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("gpt3/evaluate_lambada", "evaluation=lambada"),
        ("gpt3/evaluate_all", "evaluation.harness"),
        ("prompt_gpt3/squad", "evaluation.squad.taskname=squad"),
        ("t5/squad", "squad_t5.yaml"),
        ("t5/custom_task", "translation"),
        ("lambda", ""),
    ],
)
def test_an_option_of_the_launcher_is_named(option: str, words: str) -> None:
    assert words in option_hint(option) and bool(words) == bool(option_hint(option))
