"""A served model against itself: a sound engine is consistent, and each fault is named by the way that shows it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.measurements.parity_runs import GPT_INPUTS, serve, shards_of
from support.servers.fake_triton import FakeTriton, Tensors
from support.servers.openai_stand_in import NAME, StandIn, serving
from support.tiny_models.huggingface_models import VOCAB, save

from evaluation.arguments import ConsistencyArguments
from evaluation.consistency import BATCH, PRESSURE, PROMPT, WARM, main
from evaluation.tasks.metric import FAILS, HOLDS
from handover.errors import ConfigError, ServerError

WAYS = (WARM, BATCH, PRESSURE, PROMPT)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpt2")
    save("gpt2", directory / "source")
    shards_of(directory / "source", directory / "shards")
    rng = np.random.default_rng(5)
    lines = [json.dumps({"input_ids": rng.integers(3, VOCAB, 400).tolist()}) + "\n" for _ in range(3)]
    (directory / "texts.jsonl").write_text("".join(lines))
    return directory


def run(url: str, gpt2: Path, output: Path, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    """The summary, and the ways that fail."""
    given = {"data_path": gpt2 / "texts.jsonl", "samples": 6, "output_length": 8, "pressure": 2, "batch_size": 3}
    try:
        main(ConsistencyArguments(url, output, **{**given, **changes}).to_argv())
    except ServerError as error:
        assert "not consistent with itself" in error.problem
    with (output / "ways.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["way"] for row in rows] == list(WAYS)
    return json.loads((output / "summary.json").read_text()), [row["way"] for row in rows if row["verdict"] == FAILS]


def test_a_sound_engine_is_consistent(gpt2: Path, tmp_path: Path) -> None:
    with serve(gpt2 / "shards", inputs=GPT_INPUTS) as fake:
        summary, failing = run(fake.url, gpt2, tmp_path / "out")
    assert summary["verdict"] == HOLDS and not failing and summary["batch_identical"] == 1
    assert summary["prompt_difference"] < 1e-5


Spoil = Callable[[Tensors, dict[str, Any], int, bool], None]


def stale(tensors: Tensors, outputs: dict[str, Any], rows: int, is_known: bool) -> None:
    """A prompt that was asked before is answered with what belongs to another."""
    if is_known and rows == 1:
        outputs["output_log_probs"] = outputs["output_log_probs"] - 0.5


def crowded(tensors: Tensors, outputs: dict[str, Any], rows: int, is_known: bool) -> None:
    """Rows of a batch reach each other."""
    if rows > 1 and "context_log_probs" not in outputs:
        outputs["output_log_probs"] = outputs["output_log_probs"] - 0.02


def other_prefill(tensors: Tensors, outputs: dict[str, Any], rows: int, is_known: bool) -> None:
    """A pass over a prompt computes something else than decode steps."""
    if "context_log_probs" in outputs:
        outputs["context_log_probs"] = outputs["context_log_probs"] * 1.05


def other_tokens(tensors: Tensors, outputs: dict[str, Any], rows: int, is_known: bool) -> None:
    """One prompt of some that were asked before is continued by other tokens from the first on."""
    if is_known and rows == 1 and "context_log_probs" not in outputs and tensors["input_ids"].sum() % 3 == 0:
        given = tensors["input_ids"].shape[1]
        outputs["output_ids"] = outputs["output_ids"].copy()
        outputs["output_ids"][..., given:] = (outputs["output_ids"][..., given:] + 7) % VOCAB


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [(stale, [WARM, PRESSURE]), (crowded, [BATCH]), (other_prefill, [PROMPT]), (other_tokens, [WARM, PRESSURE])],
)
def test_a_fault_fails_in_the_way_that_shows_it(spoil: Spoil, expected: list[str], gpt2: Path, tmp_path: Path) -> None:
    with serve(gpt2 / "shards", inputs=GPT_INPUTS) as fake:
        spoil_answers(fake, spoil)
        summary, failing = run(fake.url, gpt2, tmp_path / "out")
    assert summary["verdict"] == FAILS and failing == expected
    assert [reason.split(":")[0] for reason in summary["reasons"]] == expected


def spoil_answers(fake: FakeTriton, spoil: Spoil) -> None:
    answer, seen = fake.answer, set[bytes]()

    def spoilt(tensors: Tensors) -> Tensors:
        outputs = answer(tensors)
        assert isinstance(outputs, dict)
        known = tensors["input_ids"].tobytes() in seen
        seen.add(tensors["input_ids"].tobytes())
        found = dict(outputs)
        spoil(tensors, found, len(tensors["input_ids"]), known)
        return found

    fake.answer = spoilt


def test_an_openai_api_is_enough(gpt2: Path, tmp_path: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(gpt2 / "source", dtype=torch.float32).eval()

    def forward(ids: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
        return found

    with serving(StandIn(forward=forward, max_model_len=24)) as served:
        summary, failing = run(served.url, gpt2, tmp_path / "out", model=NAME)
    assert summary["verdict"] == HOLDS and not failing
    silent = serving(StandIn(forward=forward, max_model_len=24, echoes=False))
    with silent as served, pytest.raises(ConfigError, match="does not score"):
        run(served.url, gpt2, tmp_path / "none", model=NAME)
