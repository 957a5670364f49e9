"""Evaluations through Slipway's own OpenAI endpoint, on a real tritonserver, beside the same evaluations by gRPC."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers.served import Deployment
from support.tiny_models.learnt_gpt2 import POSITIONS, LearntModel, expected_figures, short_texts

from evaluation import lambada, summarization
from evaluation.client.served_model import open_target
from evaluation.parity.arguments import PRECISIONS
from evaluation.parity.run import main as parity
from evaluation.tasks.outcome import ORIGIN_COLUMNS
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from handover.endpoint import Endpoint

LIMITS = [
    ["max_log_prob_difference", 0.01],
    ["mean_log_prob_difference", 0.001],
    ["greedy_agreement", 1.0],
    ["tie", 0.001],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LearntModel:
    made = LearntModel(tmp_path_factory.mktemp("model"))
    made.model.save_pretrained(made.directory / "source")
    for name in ("vocab.json", "merges.txt"):
        (made.directory / "source" / name).write_bytes((made.directory / name).read_bytes())
    return made


@pytest.fixture(scope="module")
def endpoint(model: LearntModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    root = tmp_path_factory.mktemp("export")
    convert(ConvertArguments(model.directory / "source", root / "1-gpu", 1, "fp32", processes=1))
    built = root / "model_repo"
    build_repository(
        ExportArguments(root / "1-gpu", built, "learnt", 1, 1, "fp32", 0, 0, max_batch_size=16, decoupled=True)
    )
    running = Deployment(built, root / "deployment", openai_port=0)
    yield running.wait_until_published()
    running.begin_to_stop()


@pytest.fixture(scope="module")
def url(endpoint: Endpoint) -> str:
    return f"http://127.0.0.1:{endpoint.openai_port}/v1"


def figures(directory: Path) -> dict[str, Any]:
    content = json.loads((directory / "metrics.json").read_text())
    return {metric["name"]: (metric["value"], metric["stderr"], metric["n"]) for metric in content["metrics"]}


def samples(directory: Path) -> list[dict[str, str]]:
    """Read the rows of samples.csv, but for where they are from: an API does not say the model's digest."""
    with (directory / "samples.csv").open(newline="") as stream:
        return [{key: row[key] for key in row.keys() - set(ORIGIN_COLUMNS)} for row in csv.DictReader(stream)]


def test_what_the_own_endpoint_can_do(endpoint: Endpoint, url: str) -> None:
    target = open_target(url, "learnt")
    can = target.capabilities
    assert can is not None and not can.refusals
    assert can.takes_ids and can.scores_alone and can.names_ids and can.returns_ids and can.ignores_end
    assert (target.served.max_positions, target.served.endpoint.engine) == (POSITIONS, "slipway")
    told, known = target.served.endpoint.settings, {**endpoint.settings, "model_digest": endpoint.model_digest}
    names = ("tensor_para_size", "data_type", "weight_data_type", "weights_digest", "model_digest")
    assert {name: told[name] for name in names} == {name: known[name] for name in names}


def test_every_figure_of_lambada_is_the_one_by_grpc_to_the_last_digit(
    model: LearntModel, endpoint: Endpoint, url: str, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in short_texts()))
    rows = {}
    for name, source in (("grpc", endpoint.grpc_url), ("api", url)):
        flags = [f"--endpoint={source}", f"--output={tmp_path / name}", f"--data-path={data}", "--data-sha256=any"]
        # One row a request: rows of other lengths in a pass would change the last bits of a matrix product.
        lambada.main([*flags, f"--tokenizer={model.directory}", "--batch-size=1", "--concurrency=1"])
        rows[name] = samples(tmp_path / name)
    assert figures(tmp_path / "api") == figures(tmp_path / "grpc")
    assert rows["api"] == rows["grpc"]
    expected = expected_figures(model, short_texts())
    perplexity = math.exp(-statistics.mean(expected["log_prob"]))
    assert figures(tmp_path / "api")["lambada_openai_perplexity"][0] == pytest.approx(perplexity, rel=1e-3)


def test_generated_texts_are_those_by_grpc(model: LearntModel, endpoint: Endpoint, url: str, tmp_path: Path) -> None:
    data, prompt = tmp_path / "data.jsonl", tmp_path / "prompt.yaml"
    data.write_text("".join(json.dumps({"source": text, "reference": text}) + "\n" for text in short_texts()))
    prompt.write_text('prompt_template: "{source}"\n')
    for name, source in (("grpc", endpoint.grpc_url), ("api", url)):
        flags = [f"--endpoint={source}", f"--output={tmp_path / name}", f"--data-path={data}", f"--prompt={prompt}"]
        summarization.main([*flags, f"--tokenizer={model.directory}", "--max-output-len=6"])
    texts = [(tmp_path / name / "predictions.txt").read_text() for name in ("grpc", "api")]
    assert texts[0] == texts[1] and len(set(texts[0].splitlines())) > 5
    assert samples(tmp_path / "grpc") == samples(tmp_path / "api")


def test_parity_holds_through_the_api(model: LearntModel, url: str, tmp_path: Path) -> None:
    precisions = [[precision, LIMITS] for precision in PRECISIONS]
    parity(
        [
            *(f"--endpoint={url}", f"--output={tmp_path / 'out'}", f"--checkpoint={model.directory / 'source'}"),
            *(f"--prompts={json.dumps(short_texts()[:3])}", f"--tokenizer={model.directory}", "--output-length=8"),
            f"--limits={json.dumps(precisions)}",
        ]
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["verdict"] == "HOLDS" and 0 < summary["max_log_prob_difference"] < 1e-3
