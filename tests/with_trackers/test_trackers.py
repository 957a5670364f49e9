"""A run's figures as MLflow, Weights & Biases and NeMo Evaluator themselves read them; no network is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
import pytest
import wandb
import yaml
from nemo_evaluator.api.api_dataclasses import EvaluationConfig, EvaluationResult, EvaluationTarget
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore

from evaluation import track
from evaluation.arguments import TrackArguments
from evaluation.report import write
from handover.errors import ConfigError, ServerError


def metric(name: str, value: float | None, stderr: float | None, unit: str = "fraction") -> dict[str, Any]:
    meaning = {"definition": "as its source says", "better": "higher"}
    return {"name": name, "value": value, "unit": unit, "stderr": stderr, "n": 20, "failed": 0, **meaning}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow takes directories where it is told to; a server that is not there is asked once."""
    for name, value in {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A run of three evaluations, of which one has samples without a score."""
    tasks = {
        "lambada": ([metric("acc", 0.5, 0.1), metric("perplexity", 12.25, None, "perplexity per word")], 0),
        "squad": ([metric("f1", 0.25, 0.05), metric("exact_match", None, None)], 0),
        "translation": ([metric("bleu", 0.75, 0.05)], 3),
    }
    for name, (metrics, failed) in tasks.items():
        (place := tmp_path / "run" / "evaluation" / name).mkdir(parents=True)
        model = {"model": "demo", "model_digest": "sha256:abc"}
        content = {"task": name, "metrics": metrics, "samples": 20, "failed": failed, "model": model}
        content |= {"data": {"file": f"{name}.jsonl", "sha256": "d" * 64}, "commit": "c0ffee"}
        (place / "metrics.json").write_text(json.dumps(content))
    run = tmp_path / "run"
    given = [f"--results={run}", f"--output={run / 'report'}", "--title=demo", f"--stages={run / 'stages.json'}"]
    write.main(given)
    return run


FIGURES = {"lambada.acc": 0.5, "lambada.perplexity": 12.25, "squad.f1": 0.25}
"""The reliable ones: three of twenty translations have no score, and no answer had an exact match to count."""


def told(results: Path, **to: str) -> str:
    words = [f"--{name}={value}" for name, value in to.items()]
    given = {"results": results, "report": results / "report", "output": results / "tracking", "title": "demo"}
    track.main([*(f"--{name}={value}" for name, value in given.items()), *words])
    return (results / "tracking" / "tracking.json").read_text()


def test_nemo_evaluator_reads_its_results(results: Path) -> None:
    content = yaml.safe_load((results / "report" / "results.yml").read_text())
    found = EvaluationResult.model_validate(content["results"], strict=True)
    scores = {
        f"{task}.{name}": (score.value, score.stats.count, score.stats.stderr)
        for task, each in found.tasks.items()
        for name, figure in each.metrics.items()
        for score in figure.scores.values()
    }
    expected = {"lambada.acc": (0.5, 20, 0.1), "lambada.perplexity": (12.25, 20, None), "squad.f1": (0.25, 20, 0.05)}
    assert scores == expected
    assert EvaluationConfig.model_validate(content["config"]).type == "lambada,squad"
    assert EvaluationTarget.model_validate(content["target"]).api_endpoint.model_id == "demo"
    assert content["git_hash"] == "c0ffee"


def test_mlflow_has_the_figures_once(results: Path, tmp_path: Path) -> None:
    uri = (tmp_path / "mlruns").as_uri()
    first = told(results, mlflow=uri, experiment="nightly")
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("nightly")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics == FIGURES and run.info.status == "FINISHED" and run.info.run_name == "demo"
    assert run.data.params["model_digest"] == "sha256:abc" and run.info.run_id in first
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {"report.html", "report.md", "results.yml"}
    assert "as it was" in told(results, mlflow=uri, experiment="nightly")
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_weights_and_biases_has_the_figures_offline(results: Path) -> None:
    told(results, wandb="offline", experiment="nightly")
    wandb.teardown()  # its own process writes to the end, as it does when the program ends
    (file,) = (results / "wandb").rglob("*.wandb")
    store, summary, facts = DataStore(), dict[str, Any](), dict[str, Any]()
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for each in record.summary.update:
            summary[each.key or ".".join(each.nested_key)] = json.loads(each.value_json)
        for each in record.run.config.update:
            facts[each.key] = json.loads(each.value_json)
        if record.run.run_id:
            run = record.run
    figures = {name: value for name, value in summary.items() if not name.startswith("_")}
    assert figures == FIGURES and (run.project, run.display_name) == ("nightly", "demo")
    assert facts["model_digest"] == "sha256:abc"


def test_what_is_not_reliable_is_named_and_left_out(results: Path, tmp_path: Path, capsys: Any) -> None:
    told(results, mlflow=(tmp_path / "mlruns").as_uri())
    assert "left out: translation.bleu, 3 of 20 samples have no score" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_one_error(results: Path) -> None:
    with pytest.raises(ServerError, match="does not take the figures"):
        told(results, mlflow="http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"wandb": "on"}, "legal: online, offline"), ({"mlflow": "https://me:secret-1@host"}, "holds a password")],
)
def test_wrong_settings_and_secrets_are_refused(given: dict[str, str], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=expected) as refused:
        TrackArguments(tmp_path, tmp_path, tmp_path, "demo", **given)
    assert "secret-1" not in str(refused.value)
