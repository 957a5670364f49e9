"""The clients on the real server and engine; the oracle is Hugging Face's forward pass of the same weights."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.servers.served import Deployment, wait_for
from support.shards.gpt2_checkpoint import write_shards
from support.tiny_models.learnt_gpt2 import POSITIONS, LearntModel, expected_figures, short_texts

from evaluation import benchmark, generate, lambada
from evaluation import load as load_sweep
from evaluation.arguments import LambadaArguments
from evaluation.client.client import SCORES_INPUT, Client, ModelInterface
from evaluation.client.request_tensors import GREEDY_UNDER_THE_MODEL, prepare_ids
from evaluation.report import write as report
from evaluation.speed.tables.table import LOAD_TABLE, STATIC_TABLE
from evaluation.tasks.lambada.score import Verdict
from evaluation.tasks.lambada.span_scoring import SpanScorer
from evaluation.tasks.lambada.spans import prepare_sample
from evaluation.tasks.target import find_target, find_tokenizer
from export_scripts.arguments import ExportArguments
from export_scripts.repository.model_repository import build_repository
from ft_format.tensors import NO_TOKEN
from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError
from handover.manifest import Manifest, record_files

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LearntModel:
    return LearntModel(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def repository(model: LearntModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The learnt model's shards, written by the tests' own writer and exported, for two tensor-parallel ranks."""
    root = tmp_path_factory.mktemp("export")
    checkpoint = write_shards(model.model, root, ranks=2)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(model.directory / name, checkpoint)
    Manifest("ft_checkpoint", record_files(checkpoint), {"checkpoint": "learnt_gpt2"}).write(checkpoint)
    build_repository(ExportArguments(checkpoint, root / "model_repo", "learnt", 2, 1, "fp32", 0, 0, max_batch_size=16))
    return root / "model_repo"


@pytest.fixture(scope="module")
def deployment(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    running = Deployment(repository, tmp_path_factory.mktemp("results") / "deployment")
    running.wait_until_published()
    yield running
    running.begin_to_stop()


@pytest.fixture(scope="module")
def endpoint(deployment: Deployment) -> Endpoint:
    return Endpoint.read(deployment.endpoint_file)


def results_of(deployment: Deployment) -> Path:
    return deployment.directory.parent


def write_data(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("name", ["ensemble", "fastertransformer"])
def test_lambada_through_the_server_equals_hugging_face(
    model: LearntModel, deployment: Deployment, name: str, tmp_path: Path
) -> None:
    texts = short_texts()
    output = results_of(deployment) / "evaluation" / "lambada"
    lambada.main(
        [
            f"--endpoint={deployment.endpoint_file}",
            f"--output={output}",
            f"--data-path={write_data(tmp_path / 'd.jsonl', texts)}",
            "--data-sha256=any",
            "--batch-size=5",
            f"--model={name}",
        ]
    )
    expected = expected_figures(model, texts)
    metrics = {
        metric["name"]: metric["value"] for metric in json.loads((output / "metrics.json").read_text())["metrics"]
    }
    assert metrics["last_token_accuracy"] == pytest.approx(statistics.mean(expected["token"]))
    assert metrics["last_word_accuracy_greedy"] == pytest.approx(statistics.mean(expected["word"]))
    assert metrics["lambada_openai_accuracy"] == pytest.approx(statistics.mean(expected["openai"]))
    with (output / "samples.csv").open(newline="") as stream:
        log_probs = [float(row["openai_log_prob"]) for row in csv.DictReader(stream)]
    assert log_probs == pytest.approx(expected["log_prob"], abs=1e-3)


def test_lambada_by_generation_gives_the_same_verdicts_as_in_one_pass(deployment: Deployment, tmp_path: Path) -> None:
    """How FasterTransformer's own engine, which scores no text in one pass, is asked: here the same engine is."""
    arguments = LambadaArguments(str(deployment.endpoint_file), tmp_path, tmp_path, batch_size=5)
    target = find_target("lambada", arguments)
    tokenizer = find_tokenizer(target, None)
    samples = [prepare_sample(index, text, tokenizer, None) for index, text in enumerate(short_texts())]
    spans = {span: True for sample in samples for span in sample.spans}
    scored = SpanScorer(target, arguments, tokenizer).score(spans)
    assert isinstance(target.interface, ModelInterface)
    unable = replace(target, interface=replace(target.interface, inputs=target.interface.inputs - {SCORES_INPUT}))
    generated = SpanScorer(unable, arguments, tokenizer).score(spans)
    assert {verdict.is_hit for verdict in scored.values() if isinstance(verdict, Verdict)} == {True, False}
    for span, verdict in generated.items():
        other = scored[span]
        assert isinstance(verdict, Verdict) and isinstance(other, Verdict) and verdict.gram_hits is None
        assert (verdict.is_hit, verdict.log_prob) == (other.is_hit, pytest.approx(other.log_prob, abs=1e-3))


def test_log_probabilities_of_prompt_and_generation_are_teacher_forced_ones(
    model: LearntModel, endpoint: Endpoint
) -> None:
    prompts = [model.encode(text)[:length] for text, length in zip(short_texts(), (3, 9, 17), strict=False)]
    with Client(endpoint.grpc_url) as client:
        generations = client.generate(
            prepare_ids(prompts, [4, 2, 3], sampling=GREEDY_UNDER_THE_MODEL, end_id=NO_TOKEN, context_log_probs=True)
        )
    for prompt, generation, length in zip(prompts, generations, (4, 2, 3), strict=True):
        assert len(generation.tokens) == length
        sequence = [*prompt, *generation.tokens]
        forced = model.log_probs(sequence)
        expected = [float(forced[at, token]) for at, token in enumerate(sequence[1:])]
        assert generation.log_probs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-3)
        assert generation.cum_log_prob == pytest.approx(sum(expected), abs=1e-3)
        assert [int(forced[at].argmax()) for at in range(len(prompt) - 1, len(sequence) - 1)] == list(generation.tokens)


def test_completions_are_hugging_faces(
    model: LearntModel, deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [text.rpartition(" ")[0] for text in short_texts()[1:3]]
    expected = []
    for prompt in prompts:
        ids = model.encode(prompt)
        for _ in range(5):
            ids.append(int(model.log_probs(ids)[-1].argmax()))
        expected.append(model.tokenizer.decode(ids)[len(prompt) :])
    for name in ("ensemble", "fastertransformer", "learnt"):
        generate.main(
            ["--prompts", *prompts, "--endpoint", str(deployment.endpoint_file), "--output-len", "5", "--model", name]
        )
        printed = capsys.readouterr().out
        assert printed == "\n\n".join(f"> {p}\n{e}" for p, e in zip(prompts, expected, strict=True)) + "\n"


def test_a_sweep_measures_what_fits_and_says_what_does_not(deployment: Deployment) -> None:
    output = results_of(deployment) / "benchmark" / "static"
    benchmark.main(
        [
            f"--endpoint={deployment.endpoint_file}",
            f"--output={output}",
            "--batch-sizes=[1, 4, 32]",
            f"--lengths=[[8, 4], [{POSITIONS}, 4]]",
            "--repeats=2",
        ]
    )
    rows = {
        (row.batch_size, row.input_length, row.output_length): row
        for row in STATIC_TABLE.read(output / "benchmark.csv")
    }
    digest = Manifest.read(deployment.repository).digest
    for point in ((1, 8, 4), (4, 8, 4)):
        assert rows[point].state == "ok"
        assert (rows[point].model, rows[point].tensor_para_size, rows[point].model_digest) == ("learnt", "2", digest)
    assert "must be <= 16" in rows[32, 8, 4].error
    assert "max_pos_seq_len" in rows[1, POSITIONS, 4].error
    assert rows[1, POSITIONS, 4].figures["e2e_mean_ms"] is None


@pytest.mark.clock
def test_a_load_is_measured_from_both_sides(deployment: Deployment) -> None:
    output = results_of(deployment) / "benchmark" / "load"
    shutil.rmtree(output, ignore_errors=True)  # of a try before, which a sweep would go on with
    load_sweep.main(
        [
            f"--endpoint={deployment.endpoint_file}",
            f"--output={output}",
            f"--model-repository={deployment.repository}",
            "--concurrencies=[1, 4]",
            '--lengths=["8/24"]',  # long enough that most of a request's time is the server's on busy cores too
            "--requests=20",
            "--repeats=3",
        ]
    )
    one, four = LOAD_TABLE.read(output / "load.csv")
    digest = Manifest.read(deployment.repository).digest
    for row in (one, four):
        figures = row.figures
        assert (row.state, row.failed_requests, row.model_digest) == ("ok", 0, digest)
        # What the server saw is part of what the client saw. Its counters are read beside the load, whose first and
        # last requests may have been counted by then or not.
        assert figures["e2e_mean_ms"] * 0.3 < figures["server_request_mean_ms"] < figures["e2e_mean_ms"] * 1.5
        assert row.requests / 2 < figures["server_requests"] < row.requests * 3 / 2
        assert figures["server_memory_peak_bytes"] > 50e6
        assert figures["server_cpu_cores"] > 0
        assert 0 < figures["server_load_s"] < figures["server_start_s"] < 60
    # Little's law ties the two loads to their figures.
    assert four.figures["requests_per_s"] * four.figures["e2e_mean_ms"] / 1e3 == pytest.approx(4, rel=0.2)


def test_a_load_through_the_ensemble_sends_texts_of_the_wanted_length(
    model: LearntModel, deployment: Deployment, tmp_path: Path
) -> None:
    given = [f"--endpoint={deployment.endpoint_file}", "--model=ensemble", "--concurrencies=[2]", "--requests=4"]
    load_sweep.main([*given, f"--output={tmp_path / 'out'}", '--lengths=["8/4"]', "--repeats=1", "--warmup=1"])
    (row,) = LOAD_TABLE.read(tmp_path / "out" / "load.csv")
    content = json.loads((tmp_path / "out" / row.directory / "summary.json").read_text())
    assert (row.state, row.failed_requests) == ("ok", 0)
    assert set(content["input_lens"]) <= {7, 8} and set(content["output_lens"]) == {4}
    # Ids say nothing to an ensemble.
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2], "output_length": 3}\n')
    with pytest.raises(ConfigError, match="takes text, but .*ids.jsonl holds token ids"):
        load_sweep.main([*given, f"--output={tmp_path / 'ids'}", f"--prompt-file={tmp_path / 'ids.jsonl'}"])


def test_conversations_are_asked_through_the_served_models_tokenizer(
    model: LearntModel, deployment: Deployment, tmp_path: Path
) -> None:
    prompt, answer = short_texts()[0][:20], " and so it was"
    talk = {"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]}
    (tmp_path / "talks.jsonl").write_text(json.dumps(talk) + "\n")
    given = [f"--endpoint={deployment.endpoint_file}", f"--output={tmp_path / 'out'}", "--request-rates=[20]"]
    load_sweep.main([*given, f"--prompt-file={tmp_path / 'talks.jsonl'}", "--requests=4", "--repeats=1", "--warmup=1"])
    (row,) = LOAD_TABLE.read(tmp_path / "out" / "load.csv")
    content = json.loads((tmp_path / "out" / row.directory / "summary.json").read_text())
    assert set(content["input_lens"]) == {len(model.encode(prompt))}
    assert set(content["output_lens"]) == {len(model.encode(answer))}


def test_the_report_of_these_results_names_their_model(
    deployment: Deployment, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = results_of(deployment)
    shutil.copytree(repository, results / "model_repo", dirs_exist_ok=True)
    report.main(
        [f"--results={results}", f"--output={results / 'report'}", "--title=learnt", f"--stages={results / 'none'}"]
    )
    page = (results / "report" / "report.html").read_text()
    assert "not all of one model" not in page
    assert Manifest.read(repository).digest in page
    assert "tensor parallelism 2" in page
    assert "Under load: load" in page
    assert "Recommendation" in page
    assert capsys.readouterr().out.splitlines()[-1] == str(results / "report" / "report.html")


def test_a_repository_replaced_behind_a_running_server_is_refused(deployment: Deployment, tmp_path: Path) -> None:
    changed = tmp_path / "model_repo"
    shutil.copytree(deployment.repository, changed)
    (changed / "ensemble" / "extra").write_text("x")
    Manifest("model_repository", record_files(changed)).write(changed)
    told = json.loads(deployment.endpoint_file.read_text()) | {"model_repository": str(changed)}
    (tmp_path / "endpoint.json").write_text(json.dumps(told))
    with pytest.raises(ServerError, match="now holds"):
        benchmark.main([f"--endpoint={tmp_path}", f"--output={tmp_path / 'out'}"])


def test_a_server_killed_in_the_middle_ends_the_client_with_one_error(deployment: Deployment, tmp_path: Path) -> None:
    """The last test of the server."""
    arguments = [
        f"--endpoint={deployment.endpoint_file}",
        f"--output={tmp_path / 'out'}",
        "--batch-sizes=[1, 2]",
        "--lengths=[[8, 4]]",
        "--repeats=100000",
    ]
    with ThreadPoolExecutor(1) as pool:
        sweep = pool.submit(
            subprocess.run,
            [sys.executable, "-m", "evaluation.benchmark", *arguments],
            cwd=PROJECT,
            capture_output=True,
            text=True,
        )
        wait_for(lambda: (tmp_path / "out").exists() or sweep.done())
        for pid in deployment.pids_of("tritonserver"):
            os.kill(pid, signal.SIGKILL)
        finished = sweep.result(timeout=180)
    assert finished.returncode == 1
    assert "benchmark: no server answers at" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()
