"""A deployment's own requests scored again: a sound one raises no alarm, and a planted defect does, and soon.

The engine answers behind a fake Triton and the OpenAI endpoint, which notes the requests; transformers is the oracle of
what was noted.
"""

from __future__ import annotations

import asyncio
import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.measurements.parity_runs import serve, shards_of
from support.servers.openai_endpoint import application_of
from support.tiny_models.huggingface_models import VOCAB, save

from evaluation.divergence.streamed import stream
from evaluation.monitor import run
from evaluation.monitor.arguments import MonitorArguments
from evaluation.monitor.bets import Bets, score_of
from evaluation.monitor.run import main
from evaluation.tasks.metric import FAILS, HOLDS
from handover.errors import ConfigError, ServerError

INPUTS = ("input_ids", "input_lengths", "request_output_len", "is_return_raw_log_probs", "num_top_log_probs")
NORM = "model.layers.1.post_attention_layernorm.weight.bin"
RATIO, LIMIT = 2.0, 1000.0


def squares(rng: np.random.Generator, tokens: int, factor: float = 1.0) -> float:
    """Mean squared difference of log probabilities, whose tails are heavy: few tokens have most of it."""
    return float((rng.standard_t(3, tokens) ** 2).mean()) * factor


@pytest.mark.parametrize(("tokens", "factor"), [(1, RATIO), (24, 1.8)])
def test_a_sound_deployment_hardly_ever_raises_the_alarm(tokens: int, factor: float) -> None:
    """At the limit of what is sound too; the bound is Ville's: of 200, with a limit of 20, 10 at most on average."""
    rng, limit, alarms = np.random.default_rng(3), 20.0, 0
    for _ in range(200):
        bets = Bets()
        for _ in range(120):
            bets = bets.after(score_of(squares(rng, tokens, factor), squares(rng, tokens), RATIO, 0))
        alarms += bets.most >= limit
    assert alarms <= 10


@pytest.mark.parametrize(("sound", "factor", "most"), [(0, 10.0, 50), (0, 100.0, 30), (1000, 100.0, 60)])
def test_a_defect_raises_it_soon_behind_a_long_sound_time_too(sound: int, factor: float, most: int) -> None:
    rng = np.random.default_rng(7)
    for _ in range(10):
        bets, count = Bets(), 0
        for _ in range(sound):
            bets = bets.after(score_of(squares(rng, 24), squares(rng, 24), RATIO, 0))
        assert bets.most < LIMIT
        while bets.most < LIMIT:
            bets, count = bets.after(score_of(squares(rng, 24, factor), squares(rng, 24), RATIO, 0)), count + 1
        assert count <= most


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpt2")
    save("gpt2", directory / "source")
    shards_of(directory / "source", directory / "shards", "bf16")
    (directory / "vocab.json").write_text(json.dumps({chr(33 + number): number for number in range(90)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    damaged = shutil.copytree(directory / "shards", directory / "damaged")
    numbers = torch.frombuffer(bytearray((damaged / NORM).read_bytes()), dtype=torch.bfloat16)
    (damaged / NORM).write_bytes((numbers.float() * 1.2).bfloat16().view(torch.uint8).numpy().tobytes())
    return directory


def note(gpt2: Path, shards: str, log: Path, count: int, seed: int) -> None:
    """Have clients ask a deployment of these shards, which notes all requests; some are sampled, some greedy."""
    rng = np.random.default_rng(seed)

    async def inside(url: str) -> None:
        async with application_of(url, gpt2, sample_log=log, sample_share=1) as client:
            for number in range(count):
                prompt = rng.integers(3, VOCAB, int(rng.integers(2, 8))).tolist()
                body = {
                    "prompt": prompt,
                    "max_tokens": 8,
                    "ignore_eos": True,
                    "temperature": number % 2,
                    "seed": number,
                }
                answer = await client.post("/v1/completions", json=body)
                assert answer.status == 200, await answer.text()

    with serve(gpt2 / shards, inputs=INPUTS, data_type="bf16") as fake:
        asyncio.run(inside(fake.url))


def monitor(gpt2: Path, directory: Path, shards: str = "shards", **changes: Any) -> dict[str, Any]:
    with serve(gpt2 / shards, inputs=INPUTS, data_type="bf16") as fake:
        given = (directory / "log", directory / "state.json", gpt2 / "source")
        arguments = MonitorArguments(fake.url, directory / "out", *given, references=gpt2 / "references")
        try:
            main(replace(arguments, **changes).to_argv())
        except ServerError as error:
            assert "are not those of its source" in error.problem
    return dict(json.loads((directory / "out" / "summary.json").read_text()))


def test_a_sound_deployment_is_quiet_and_requests_count_once(gpt2: Path, tmp_path: Path) -> None:
    import transformers

    log = tmp_path / "log"
    note(gpt2, "shards", log, 12, 1)
    first = monitor(gpt2, tmp_path, metrics_file=tmp_path / "metrics" / "monitor.prom")
    assert first["verdict"] == HOLDS and first["requests"] == 12 and first["evidence"] < 1
    assert 0.5 < first["rms_difference"] / first["rms_of_formats"] < 1.4
    metrics = (tmp_path / "metrics" / "monitor.prom").read_text()
    assert 'slipway_monitor_alarm{model_name="fastertransformer"} 0.0' in metrics
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o600
    # What is told of the first request, by transformers.
    entry = json.loads(log.read_text().splitlines()[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(gpt2 / "source", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*entry["prompt"], *entry["tokens"]]])).logits[0].double().log_softmax(-1)
    places = torch.arange(len(entry["tokens"])) + len(entry["prompt"]) - 1
    expected = logits[places, torch.tensor(entry["tokens"])].numpy() - np.array(entry["log_probs"])
    with (tmp_path / "out" / "requests.csv").open() as stream:
        (row, *_) = csv.DictReader(stream)
    assert float(row["square"]) == pytest.approx((expected**2).mean(), rel=1e-3)
    assert not list((gpt2 / "references").rglob("*.f32"))  # hidden states of what clients wrote
    # Nothing new; then what was asked before, by a later request, and a line that a full disk has cut.
    with log.open("a") as stream:
        stream.write(json.dumps({**entry, "time_ns": entry["time_ns"] + 10**12}) + '\n{"time_ns": 17, "pro')
    again = monitor(gpt2, tmp_path)
    assert again["requests"] == 12 and again["rms_difference"] is None
    left = json.loads((tmp_path / "out" / "metrics.json").read_text())["left_out"]
    assert left == {"that are a repetition": 1, "that are damaged": 1}


def test_a_defect_that_comes_later_raises_the_alarm_which_stays(gpt2: Path, tmp_path: Path) -> None:
    note(gpt2, "shards", tmp_path / "log", 10, 2)
    assert monitor(gpt2, tmp_path)["verdict"] == HOLDS
    note(gpt2, "damaged", tmp_path / "log", 40, 3)
    found = monitor(gpt2, tmp_path, metrics_file=tmp_path / "monitor.prom")
    assert found["verdict"] == FAILS and "of 50 requests" in found["reasons"][0]
    assert found["rms_difference"] > 4 * found["rms_of_formats"]
    assert 'slipway_monitor_alarm{model_name="fastertransformer"} 1.0' in (tmp_path / "monitor.prom").read_text()
    assert monitor(gpt2, tmp_path)["verdict"] == FAILS
    # Other limits are another test, which begins with the requests that are still in the log.
    assert monitor(gpt2, tmp_path, most_ratio=1000.0)["verdict"] == HOLDS


def test_a_log_probability_that_is_no_number_raises_it_at_once(gpt2: Path, tmp_path: Path) -> None:
    entry = {"time_ns": 5, "prompt": [4, 5], "tokens": [6], "log_probs": [float("nan")], "model_digest": ""}
    (tmp_path / "log").write_text(json.dumps(entry) + "\n")
    assert monitor(gpt2, tmp_path)["reasons"] == ["a log probability is not a finite number"]


def test_a_reference_that_its_number_format_cannot_hold_is_no_evidence(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(gpt2, "shards", tmp_path / "log", 2, seed=1)

    def overflowing(model: Any, rows: Any, top: int, work: Path, label: str) -> Any:
        scores = stream(model, rows, top, work, label)
        return replace(scores, log_probs=scores.log_probs * np.nan) if "bf16" in label else scores

    monkeypatch.setattr(run, "stream", overflowing)
    with pytest.raises(ConfigError, match="2 of 2 requests the reference in bf16"):
        monitor(gpt2, tmp_path)
    assert not (tmp_path / "state.json").exists()


def test_bad_input_is_refused_by_name(gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file .* with the deployment's requests"):
        monitor(gpt2, tmp_path)
    (tmp_path / "log").touch()
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not what a monitor keeps"):
        monitor(gpt2, tmp_path)
    with pytest.raises(ConfigError, match="precision is 'fp17'"):
        monitor(gpt2, tmp_path, precision="fp17")
