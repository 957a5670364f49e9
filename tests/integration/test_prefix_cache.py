"""A few-shot task is scored the same with and without the prefix cache, to the last digit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.engines.asking import CPU, ask
from support.measurements.task_runs import OUTPUT_LEN, SQUAD
from support.servers.served import PROJECT, Deployment

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.settings import Settings
from evaluation import squad
from evaluation.client.tokenizer import load_tokenizer
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository

DEMO = PROJECT / "examples" / "llama_demo" / "checkpoints" / "llama_demo.nemo"
FEW_SHOT = PROJECT / "evaluation" / "prompts" / "squad_few_shot.yaml"
PAGE = 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("llama") / "1-gpu"
    convert(ConvertArguments(DEMO, output, 1, "fp32"))
    return output


def scored(checkpoint: Path, root: Path, has_prefix_cache: bool) -> tuple[Any, str, str]:
    """Serve the checkpoint and score it; gives the figures, the samples and the answers."""
    repository = root / "model_repo"
    build_repository(ExportArguments(checkpoint, repository, "demo", 1, 1, "fp32", 0, 0, max_batch_size=8))
    (repository / "manifest.json").unlink()  # config.pbtxt is edited
    with (repository / "fastertransformer" / "config.pbtxt").open("a") as config:
        value = int(has_prefix_cache)
        config.write(f'parameters {{ key: "enable_prefix_cache" value {{ string_value: "{value}" }} }}\n')
    deployment = Deployment(repository, root / "run")
    deployment.wait_until_published()
    output = root / "squad"
    output.mkdir()
    given = [f"--data-path={SQUAD}", f"--prompt={FEW_SHOT}", f"--tokens-to-generate={OUTPUT_LEN}"]
    squad.main([f"--endpoint={deployment.endpoint_file}", f"--output={output}", *given])
    deployment.begin_to_stop()
    metrics = json.loads((output / "metrics.json").read_text())["metrics"]
    return metrics, (output / "samples.csv").read_text(), (output / "predictions.json").read_text()


@pytest.mark.long
def test_a_few_shot_task_has_the_same_figures_with_and_without_it(checkpoint: Path, tmp_path: Path) -> None:
    found = [scored(checkpoint, tmp_path / str(has_it), has_it) for has_it in (True, False)]
    assert found[0] == found[1]
    assert len(json.loads(found[0][2])) == 14


def test_the_tasks_examples_are_found_again(checkpoint: Path) -> None:
    """The pages that hold nothing but examples are computed once, whatever is asked behind them."""
    template = yaml.safe_load(FEW_SHOT.read_text())
    form = template["prompt_template"]
    head = load_tokenizer(checkpoint).encode("\n\n".join(form.format(**each) for each in template["examples"]))
    engine = open_engine(Settings(checkpoint, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 26), CPU)
    for token in range(5):
        engine.generate([engine.parse(ask([[*head, token]], 2))])
    assert engine._steps.cache.allocator.prefixes.found == 4 * (len(head) // PAGE) * PAGE > 0
    engine.close()
