"""A draft model: rows say what they say without one, whatever it is, and it sees every token of theirs, once."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines.asking import CPU, ask, generated, prompts
from support.engines.draft_loads import loads
from support.engines.drafting_ranks import check_drafting_ranks
from support.engines.few_pages import Served
from support.engines.own_drafts import check_answers
from support.engines.paged_steps import paged_steps
from support.engines.rank_processes import answer_of
from support.shards.llama_shards import served_of
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.guided_model import END, guided, write_vocabulary
from support.tiny_models.llama_models import VOCAB, save

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.rows.answer import Failure
from backends.fastertransformer.engine.scheduling import proposers, speculation
from backends.fastertransformer.engine.scheduling.draft_costs import DraftCosts
from backends.fastertransformer.engine.scheduling.tuning import TUNING, Tuning
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps

DRAFTS = (6, True)
LONGER = {"max_position_embeddings": 256}


def with_draft(name: str, folder: Path, draft: str = "", **changes: Any) -> tuple[Any, Settings]:
    """A model with another one as its draft model, or with itself."""
    root, model = served_of(name, folder, 1, **LONGER, **changes)
    if draft:
        save(draft, root / "draft", **{"max_position_embeddings": 8192}, **changes)
    else:
        shutil.copytree(folder / "hub", root / "draft", ignore=shutil.ignore_patterns("draft"))
    return model, Settings(root, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22, speculation="draft")


def rewritten(settings: Settings, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change every number of the draft model."""
    path = settings.checkpoint / "draft/model.safetensors"
    save_file({name: change(each) for name, each in load_file(path).items()}, path, {"format": "pt"})


def noisy(settings: Settings) -> None:
    torch.manual_seed(3)
    rewritten(settings, lambda each: each + 0.1 * each.std() * torch.randn(each.shape))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have drafts in every step, as long as may be, whatever came of earlier ones."""
    monkeypatch.setattr(speculation, "TUNING", Tuning(draft_row_cost_cpu=0.0, acceptance_prior=0.9))
    monkeypatch.setattr(proposers, "numbers_read", Mock(side_effect=[0, 1] * 9))  # nor is anything timed then


_SHORT = (("llama", "", 16, 0, False),)
_MORE = (
    *(
        ("mistral", "llama", 60, 32, True),
        ("llama", "qwen3", 400, 32, False),
        ("gemma3", "", 100, 0, False),
        ("qwen3_moe", "", 60, 32, True),
    ),
    *(("deepseek_v3", "", 60, 0, False), ("llama", "deepseek_v3", 60, 32, True), ("mistral", "mistral", 60, 0, False)),
)


@pytest.mark.parametrize(
    ("name", "draft", "pages", "chunk_tokens", "is_gpu"),
    [*_SHORT, *(pytest.param(*each, marks=pytest.mark.long) for each in _MORE)],
)
def test_rows_answer_what_they_answer_without(
    name: str, draft: str, pages: int, chunk_tokens: int, is_gpu: bool,
    tmp_path: Path, always: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Beside beams, joining prompts, chunks, known pages and rows that are set back, on pages that are spoiled."""
    _, settings = with_draft(name, tmp_path, draft)
    noisy(settings)
    requests = loads(pages)[: 18 if pages == 16 else 9]
    check_answers(settings, DRAFTS, requests, pages, pages, chunk_tokens, is_gpu, monkeypatch)


def ran(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the tokens that inputs of a draft model have, and its decode steps."""
    counts, (extend, decode) = Counter[str](), (steps.extend, steps.decode)

    def counted(ids: Any, *more: Any) -> Any:
        counts["tokens"] += len(ids)
        return extend(ids, *more)

    def stepped(rows: int) -> Any:
        counts["steps"] += 1
        return decode(rows)

    monkeypatch.setattr(steps, "extend", counted)
    monkeypatch.setattr(steps, "decode", stepped)
    return counts


def test_a_model_that_drafts_for_itself_is_right_and_sees_each_token_once(
    tmp_path: Path, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several pages that others have begun with, and conversations, too."""
    model, settings = with_draft("llama", tmp_path)
    steps, rng = paged_steps(settings, 200), random.Random(5)
    assert steps.drafting
    counts, served = ran(steps.drafting, monkeypatch), Served(steps, drafts=DRAFTS)
    shared = [rng.randrange(3, VOCAB) for _ in range(96)]
    for part in (shared[:64], shared):
        lines = [[*part, *(rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 20])))] for _ in range(4)]
        answers = [served.submit(ask([line], 60, end_id=NEVER)) for line in lines]
        served.run()
        for line, each in zip(lines, answers, strict=True):
            said = generated(each[-1].tensors)
            assert said == argmaxes(model, line, said)
    metrics = served.scheduler.metrics
    assert metrics.accepted_tokens == metrics.draft_tokens > 350 and counts["steps"] < 120
    # A draft of six tokens: five are run by decode steps, and the last two that are then known by an input.
    new = sum(map(len, lines)) - 3 * 96  # at most, of the second four: the first of them may be run before the others
    assert counts["tokens"] < 4 * 84 + new + 96 + 2 * metrics.drafts + 32 * 4
    told: list[int] = []
    for turn, line in enumerate(prompts(9, 4, 30)):
        start = {"START": np.array([[1]], np.int32)} if turn == 0 else {}
        told += line
        said = served.say(ask([line], 9, end_id=NEVER) | start, "talk")
        assert said == argmaxes(model, told, said)
        told += said
    assert metrics.accepted_tokens == metrics.draft_tokens


def test_a_broken_draft_model_changes_no_answer(
    tmp_path: Path, always: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers that are none, and one that fails: no row fails, and where it fails no more is asked of it."""
    model, settings = with_draft("llama", tmp_path)
    rewritten(settings, lambda each: each * float("nan"))
    steps, line = paged_steps(settings, 60), [5, 9, 60]
    request = ask([line] * 3, 40, end_id=NEVER)
    served = Served(steps, drafts=DRAFTS)
    said = served.say(request)
    assert said == argmaxes(model, line, said) and served.scheduler.metrics.draft_tokens == 0
    assert all(block[:, 1:].isfinite().all() for block in (*steps.cache.kv, *steps.cache.beside))
    assert served.scheduler._speculation._overall.probability < 0.5
    assert steps.drafting
    failing = Mock(side_effect=torch.OutOfMemoryError("no room"))
    monkeypatch.setattr(steps.drafting, "extend", failing)
    assert Served(steps, drafts=DRAFTS).say(request) == said
    assert failing.call_count == 1 and "rows have no drafts any more" in caplog.text


def test_wrong_drafts_end_and_cost_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the costs of the tokens that both models run: a draft model of half the layers that is never right."""
    _, settings = with_draft("llama", tmp_path, "llama", num_hidden_layers=4)
    shutil.rmtree(settings.checkpoint / "draft")
    save("llama", settings.checkpoint / "draft", **LONGER)
    steps = paged_steps(settings, 100)
    assert steps.drafting
    counts, row_cost = ran(steps.drafting, monkeypatch), TUNING.draft_row_cost_cpu
    cost = proposers.numbers_read(steps.drafting.config) / proposers.numbers_read(steps.config)
    assert 0.4 < cost < 0.7
    for rows in (1, 5):
        counts.clear()
        served = Served(steps, drafts=(8, True))
        served.submit(ask([[5, 6, 7]] * rows, 250, end_id=NEVER))
        served.run()
        drafted = served.scheduler.metrics.draft_tokens
        assert drafted > 0 and served.scheduler.metrics.accepted_tokens <= drafted / 2
        passes = counts["steps"] * (1 + row_cost * rows) + served.scheduler.metrics.drafts + row_cost * counts["tokens"]
        assert drafted * row_cost + passes * cost < 0.08 * 250 * (1 + row_cost * rows)


@pytest.mark.parametrize("way", [{"runtime_top_p": 0.0}, {}])
def test_drafts_follow_grammars(way: dict[str, Any], always: None, tmp_path: Path) -> None:
    _, settings = with_draft("llama", tmp_path, vocab_size=END + 1)
    write_vocabulary(settings.checkpoint)
    engine = open_engine(settings, CPU)
    request = guided(["regex"], ["[ -~]{8,60}"], 60, **way)
    expected = answer_of(engine, request | {"max_speculative_tokens": np.array([[0]], np.int32)})
    assert engine.metrics.drafts == 0
    np.testing.assert_array_equal(answer_of(engine, request)["output_ids"], expected["output_ids"])
    assert engine.metrics.accepted_tokens > 0
    engine.close()


@pytest.mark.long
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_rank_0_drafts_for_all_ranks(tensor: int, pipeline: int, tmp_path: Path) -> None:
    root, model = served_of("llama", tmp_path, tensor, **LONGER)
    shutil.copytree(tmp_path / "hub", root / "draft")
    check_drafting_ranks(root, tmp_path, model, "draft", tensor, pipeline)


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    _, settings = with_draft("llama", tmp_path, "nemotron_h")
    for change, problem in (
        (None, "the draft model's layers keep states, which cannot go back"),
        ("llama", "the draft model has 119 tokens, and the model 120: the vocabulary must be one"),
        ("", "draft has no config.json: export it again with draft_model"),
    ):
        if change is not None:
            shutil.rmtree(settings.checkpoint / "draft")
        if change:
            save(change, settings.checkpoint / "draft", vocab_size=119)
        with pytest.raises(EngineError, match=problem):
            open_engine(settings, CPU)


def test_rows_that_begin_with_no_tokens_or_are_too_long_have_no_drafts(tmp_path: Path, always: None) -> None:
    _, settings = with_draft("llama", tmp_path)
    shutil.rmtree(settings.checkpoint / "draft")
    save("llama", settings.checkpoint / "draft", max_position_embeddings=48)
    served = Served(paged_steps(settings, 60), drafts=DRAFTS)
    (answer,) = served.submit(ask([[5] * 40], 60, end_id=NEVER)) or [None]
    served.run()
    assert not isinstance(answer, Failure) and served.scheduler.metrics.draft_tokens > 0
    assert served.scheduler.metrics.drafts < 9


def test_passes_cost_what_they_are_found_to_take() -> None:
    """A step of 8 ms, later of 4; passes of 1 ms, and one that has waited; a step with drafts takes 2 ms more."""
    times = iter(
        [0.0, 0.008, 0.01, 0.011, 0.021, 0.022, 0.024, 1.0, 1.5, 1.6, 2.0, 2.004, 3.0, 3.0001, 3.01, 4.0, 4.001]
    )
    costs = DraftCosts(0.05, lambda: next(times))
    assert not costs.are_known and costs.of_pass == 0.05
    costs.begin_step(1.0)
    costs.note_plain()
    costs.begin_step(1.0)
    assert costs.are_known and costs.of_pass == 0.05
    costs.note_drafted(costs.now(), 1.0, 1.0)
    assert costs.of_pass == pytest.approx(1 / 8) and costs.of_step == 0
    costs.begin_step(1.0)
    assert costs.of_step == pytest.approx((11 - 8 - 1) / 8)
    costs.note_drafted(costs.now(), 1.0, 2.0)
    assert costs.of_pass == pytest.approx(1 / 8)
    costs.note_drafted(costs.now(), 1.0, 1.0)
    assert costs.of_pass == pytest.approx(1.02 / 8)
    costs.begin_step(1.0)
    assert costs.of_step > 10
    costs.note_plain()
    costs.begin_step(1.0)
    assert costs.of_pass == pytest.approx(1.02 / 4)
    costs.note_drafted(costs.now(), 1.0, 1.0)
    assert costs.of_pass == 0.05
    costs.begin_step(1.0)
    assert costs.of_step == pytest.approx(10 / 4 - 1.05), "the middle one counts"
    found = costs.of_step
    costs.note_drafted(costs.now(), 1.0, 1.0)
    costs.note_arrival()
    costs.begin_step(1.0)
    assert costs.of_step == found, "no step ran until the next request came"
    assert DraftCosts(0.0).are_known and DraftCosts(0.0).of_pass == 0
