"""Steps of rows with a grammar: what is computed at one time, what a device is never asked, and what fails alone."""

from __future__ import annotations

import copy
import json
import queue
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, ask, generated
from support.engines.paged_steps import paged_steps
from support.tiny_models.guided_model import END, guided, guided_gpt2, texts

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.grammar import masks
from backends.fastertransformer.engine.grammar.compiled import Grammars
from backends.fastertransformer.engine.grammar.guided_row import Grammar, GuidedRow
from backends.fastertransformer.engine.ops.logits import NOT_FINITE
from backends.fastertransformer.engine.ops.ops import Ops
from backends.fastertransformer.engine.request.guides import Guide
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.request.sampling_params import SamplingParams
from backends.fastertransformer.engine.rows.answer import Answer
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.sampling.guided import GuidedRows
from backends.fastertransformer.engine.sampling.pending import PendingTokens
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.steps.steps import Steps

WAIT_S = 60
DEMONSTRATION = Path(__file__).resolve().parents[2] / "examples/gpt3_demo/checkpoints/gpt3_demo.nemo"
SUBWORDS = 8064  # of its vocabulary
REGEXES = ["[0-9]+", "(no|yes) (maybe|the) .{3,}", "[^a-z]{9,}", "ab|12"]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(guided_gpt2(tmp_path_factory.mktemp("grammars")).checkpoint, END + 1)


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Compile grammars for the demonstration's vocabulary."""
    directory = tmp_path_factory.mktemp("subwords")
    with tarfile.open(DEMONSTRATION) as archive:
        for member in archive.getmembers():
            for name in ("vocab.json", "merges.txt"):
                if member.name.endswith(name) and (file := archive.extractfile(member)):
                    (directory / name).write_bytes(file.read())
    return Grammars(directory, SUBWORDS)


def answer_of(scheduler: Scheduler, grammars: Grammars, steps: Steps, tensors: dict[str, Any]) -> Answer:
    answers: list[Answer] = []
    request = parse_request(tensors, steps.config)
    guides = [row.sampling.guide for row in request.rows]
    compiled = tuple(grammars.compile(guide) if guide else None for guide in guides)
    scheduler.add(Job(request, answers.append, grammars=compiled))
    while not scheduler.is_idle:
        scheduler.step()
    return answers[-1]


@pytest.mark.parametrize("top_p", [1.0, 0.0], ids=["drawn", "greedy"])
@pytest.mark.parametrize("is_on_host", [True, False], ids=["host", "device"])
def test_ahead_of_the_tokens_the_next_pass_is_launched_before_they_are_read(
    top_p: float, is_on_host: bool, grammars: Grammars, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a GPU computes logits while the host waits for the last tokens and computes masks.

    On a CPU the tokens are known at once, and followed at once.
    """
    monkeypatch.setattr(GuidedRows, "is_on_host", is_on_host)
    steps, events = paged_steps(guided_gpt2(tmp_path)), []

    def note(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def noted(*given: Any) -> Any:
            events.append(name)
            return original(*given)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in ((steps, "decode"), (PendingTokens, "by_sequence"), (PendingTokens, "wait")):
        note(owner, name)
    for name in ("follow", "compute", "resolve_without_mask", "take"):
        note(masks.RowMasks, name)
    note(steps.slots, "set_tokens")
    tensors = guided(["regex", ""], ["[0-9]{6}", ""], 6, runtime_top_p=top_p)
    assert answer_of(Scheduler(steps, 8, steps_ahead=True), grammars, steps, tensors).tensors
    later = ["compute", "take", "set_tokens"] if is_on_host else ["follow", "compute", "set_tokens"]
    if is_on_host and not top_p:  # some of the tokens need a mask
        events, later = [event for event in events if event not in later], ["resolve_without_mask"]
    first = ["follow", *later] if is_on_host else later
    step = ["decode", "by_sequence", *later, "wait"]  # this last one is of the step before
    assert events[: len(first)] == first and events[len(first) :][: len(step) * 5] == step * 5


def rows_on(device: torch.device, grammars: Grammars, tokens: int = 0) -> tuple[GuidedRows, list[GuidedRow | None]]:
    """Rows of which the one before the last has no grammar; each has the first tokens of a text that follows it."""
    rows = [grammars.compile(Guide("regex", regex)).begin([END]) for regex in REGEXES]
    given: list[GuidedRow | None] = [*rows[:3], None, rows[3]]
    followed = [np.frombuffer(b"12no the xyz+-"[at : at + tokens], np.uint8).tolist() for at in (0, 2, 12, 0, 0)]
    owners = [
        (SimpleNamespace(guided=row, sampling=SamplingParams(1, END), beams=[SimpleNamespace(tokens=list(own))]), 0)
        for row, own in zip(given, followed, strict=True)
    ]
    guided_rows = GuidedRows(Ops(device), END + 1, device)
    guided_rows.set_owners(owners)  # type: ignore[arg-type]
    return guided_rows, given


def test_a_device_is_never_asked_for_a_value(grammars: Grammars) -> None:
    """Tensors on "meta" have none: whatever reads one on the host fails."""
    device = torch.device("meta")
    logits, tokens = torch.empty(5, END + 1, device=device), torch.empty(5, dtype=torch.long, device=device)
    with pytest.raises((RuntimeError, NotImplementedError)):
        tokens.tolist()
    guided_rows, _ = rows_on(device, grammars)
    assert guided_rows.keep(logits, []).shape == logits.shape
    assert guided_rows.choose(logits, tokens, []).shape == tokens.shape


@pytest.mark.parametrize("worth_bits", [0, 1 << 20], ids=["threads", "alone"])
@pytest.mark.parametrize("seed", range(4))
def test_the_argmax_of_what_is_allowed_is_chosen(
    grammars: Grammars, seed: int, worth_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the library's other way, which asks token by token."""
    monkeypatch.setattr(masks, "_WORTH_BITS", worth_bits)
    (guided_rows, _), (masked_rows, rows) = (rows_on(CPU, grammars, tokens=seed % 3) for _ in range(2))
    logits = torch.randn(5, END + 1, generator=torch.Generator().manual_seed(seed))
    logits[2] += torch.arange(END + 1)  # its argmax is the end token, which may not come yet
    tokens = logits.argmax(-1)
    tokens[1] = NOT_FINITE
    chosen = guided_rows.choose(logits.clone(), tokens.clone(), []).tolist()
    masked = masked_rows.keep(logits.clone(), []).argmax(-1).tolist()
    assert chosen[1] == NOT_FINITE and chosen[3] == masked[3] == int(tokens[3])
    for slot in (0, 2, 4):
        row = rows[slot]
        assert row
        best = logits[slot].argsort(descending=True).tolist()
        is_complete = row.matcher.is_accepting()
        allowed = (token for token in best if (is_complete if token == END else row.matcher.validate_tokens([token])))
        assert chosen[slot] == masked[slot] == next(allowed)
        assert chosen[slot] != int(tokens[slot]) or slot != 2


def test_on_a_cpu_a_mask_is_computed_only_where_the_argmax_may_not_follow(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    guided_rows, _ = rows_on(CPU, grammars)
    computed, compute = list[object](), masks.RowMasks.compute

    def note(self: masks.RowMasks, rows: Any = None) -> None:
        computed.append(rows)
        compute(self, rows)

    monkeypatch.setattr(masks.RowMasks, "compute", note)
    tokens = torch.tensor(list(b"1nA?a"))
    logits = torch.nn.functional.one_hot(tokens, END + 1).float()
    assert guided_rows.choose(logits, tokens, []) is tokens and not computed
    logits[2, ord("z")], logits[2, ord("B")] = 3.0, 2.0
    guided_rows, _ = rows_on(CPU, grammars)
    assert guided_rows.choose(logits, logits.argmax(-1), []).tolist() == list(b"1nB?a") and computed == [{2}]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_drawn_among_few_tokens_is_what_is_drawn_among_all(
    seed: int, grammars: Grammars, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose grammars allow few tokens, many, or now few and now many; with all that limits or reads a draw."""
    steps = paged_steps(guided_gpt2(tmp_path))
    regexes = ["[ab]{60}", "(no|yes) (maybe|the) [^a-z]{50,}", ".{60,}", "", "(12|ab| the|[0-9])+", "[a-f]{60}"] * 2
    kinds = ["regex" if regex else "" for regex in regexes]
    tensors = guided(kinds, regexes, 40, seed=100 * seed)
    columns = {"temperature": (1, 0.7, 1.3), "runtime_top_k": (0, 3, 0, 0, 1), "min_p": (0, 0, 0, 0.05)}
    columns |= {"runtime_top_p": (1, 1, 0.8, 1, 1, 1, 1), "is_return_log_probs": (0, 0, 0, 0, 0, 1)}
    for name, values in columns.items():
        dtype = {"runtime_top_k": np.uint32, "is_return_log_probs": np.bool_}.get(name, np.float32)
        tensors[name] = np.resize(np.array(values, dtype), (len(kinds), 1))
    few, find_few = list[int](), masks.RowMasks.find_few
    monkeypatch.setattr(masks.RowMasks, "find_few", lambda *given: few.append(len(found := find_few(*given))) or found)
    here = answer_of(Scheduler(steps, 16), grammars, steps, tensors).tensors
    assert few.count(0) > 20 and len(few) - few.count(0) > 40
    monkeypatch.setattr(GuidedRows, "is_on_host", False)
    seen = len(few)
    there = answer_of(Scheduler(steps, 16), grammars, steps, tensors).tensors
    assert len(few) == seen and here and there
    for name in ("output_ids", "sequence_length", "output_log_probs"):
        np.testing.assert_array_equal(here[name], there[name])


def test_a_row_that_is_set_back_follows_its_grammar_anew(grammars: Grammars) -> None:
    """Also where it had followed a token that it then did not get, as tokens are followed when they are chosen."""
    row = grammars.compile(Guide("regex", "ab?c{2}")).begin([END])
    bits = np.zeros((1, masks.mask_bytes(END + 1)), np.uint8)
    row_masks = masks.RowMasks([row], END + 1, bits)

    def allowed(tokens: bytes) -> set[int]:
        row_masks.follow([(list(tokens), [])])
        row_masks.compute()
        return set(row_masks.find_few(0))

    assert allowed(b"a") == {ord("b"), ord("c")}
    row_masks.take([(0, ord("b"))])
    assert allowed(b"ab") == {ord("c")}
    assert row_masks.resolve_without_mask([ord("c")]) == [ord("c")]
    assert allowed(b"a") == {ord("b"), ord("c")}
    assert allowed(b"acc") == {END} and not row.problem


GUIDES = [
    Guide(
        "json_schema",
        json.dumps({"type": "object", "properties": {"name": {"type": "string"}, "is_new": {"type": "boolean"}}}),
    ),
    Guide(
        "json_schema",
        json.dumps({"type": "array", "items": {"enum": ["Berlin", "Lagos", "Lima", 5.25]}, "minItems": 60}),
    ),
    Guide("regex", "(the|these|there){2} [0-9]{30,}( and| or| nor)+"),
    Guide("choice", json.dumps(["a rather long text of which all is forced", "another one that is forced later"])),
]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: f"{guide.kind} {len(guide.text)}")
def test_what_is_settled_without_a_mask_is_what_the_mask_says(guide: Guide, subwords: Grammars) -> None:
    """With subwords a forced text has one tokenization, and a mask allows its first token alone."""
    random, end = np.random.default_rng(len(guide.text)), SUBWORDS - 1
    row = subwords.compile(guide).begin([end])
    bits = np.zeros((1, masks.mask_bytes(SUBWORDS)), np.uint8)
    row_masks, tokens, forced = masks.RowMasks([row], SUBWORDS, bits), list[int](), 0
    for _ in range(120):
        row_masks.follow([(tokens, [])])
        row_masks.compute()
        allowed = set(np.flatnonzero(np.unpackbits(bits[0], count=SUBWORDS, bitorder="little")).tolist())
        for token in (*random.integers(0, SUBWORDS, 40).tolist(), *random.permutation(sorted(allowed))[:20].tolist()):
            tried = copy.copy(row)  # which follows what it settles
            tried.matcher = row.matcher.deep_copy()
            settled = masks.RowMasks([tried], SUBWORDS, bits).resolve_without_mask([token])[0]
            if settled == token:
                assert token in allowed
            elif settled is not None:
                forced += 1
                assert allowed == {settled}
            else:  # what needs no mask is not computed with one
                assert token not in allowed or token == end
        tokens.append(int(random.choice(sorted(allowed))))
        if row.has_ended or tokens[-1] == end:
            break
    assert forced > 0
    assert row_masks.resolve_without_mask([-1]) == [-1]


def test_while_a_grammar_is_compiled_other_rows_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, allowed, has_begun = open_engine(guided_gpt2(tmp_path), CPU), threading.Event(), threading.Event()
    compile_ = Grammars.compile

    def wait_and_compile(self: Grammars, guide: Guide, *more: Any) -> Grammar:
        has_begun.set()
        assert allowed.wait(WAIT_S)
        return compile_(self, guide, *more)

    monkeypatch.setattr(Grammars, "compile", wait_and_compile)
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    names = {f"property {number}": {"enum": [f"value {number}"]} for number in range(800)}
    schema = json.dumps({"type": "object", "properties": names, "required": ["property 0"]})
    assert len(schema) > 30_000
    engine.submit(engine.parse(guided(["json_schema"], [schema], 300)), answers.put)
    assert has_begun.wait(WAIT_S)
    plain = engine.generate([engine.parse(ask([[5, 6, 7]] * 3, 40, end_id=END))])[0]
    assert [len(generated(plain, row)) for row in range(3)] == [40] * 3 and answers.empty()
    allowed.set()
    found = answers.get(timeout=WAIT_S)
    assert found.tensors and texts(found.tensors)[0].startswith(b"{")
    engine.close()


def test_the_vocabulary_is_read_before_there_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(guided_gpt2(tmp_path), CPU)
    monkeypatch.setattr("backends.fastertransformer.engine.grammar.library.read_token_bytes", None)
    assert texts(engine.generate([engine.parse(guided(["choice"], ['["yes"]']))])[0]) == [b"yes"]
    engine.close()


def test_a_vocabulary_that_cannot_be_read_fails_only_the_requests_that_need_it(tmp_path: Path) -> None:
    settings = guided_gpt2(tmp_path)
    (settings.checkpoint / "vocab.json").write_text("[")
    engine = open_engine(settings, CPU)
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    engine.submit(engine.parse(guided(["choice"], ['["yes"]'])), answers.put)
    found = answers.get(timeout=WAIT_S)
    assert (found.code, found.problem) == ("INTERNAL", "the model's vocab.json cannot be read: JSONDecodeError")
    plain = engine.generate([engine.parse(ask([[5, 6, 7]], 20, end_id=END))])[0]
    assert len(generated(plain, 0)) == 20
    engine.close()


class LibraryPanic(BaseException):
    """As pyo3's own is, no Exception."""


@pytest.mark.parametrize("choice", [{}, {"runtime_top_p": 0.0}], ids=["drawn", "greedy"])
def test_a_failure_inside_the_library_fails_its_own_row(
    choice: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(guided_gpt2(tmp_path), CPU)

    def panic(*_: Any) -> None:
        raise LibraryPanic("unreachable state")

    def begin(self: GuidedRow) -> None:
        self.matcher = SimpleNamespace(unsafe_compute_mask_ptr=panic, compute_ff_tokens=panic)  # type: ignore[assignment]
        self._followed, self.has_ended = 0, False

    monkeypatch.setattr(GuidedRow, "_begin", begin)
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    engine.submit(engine.parse(guided(["choice"], ['["yes"]'], **choice)), answers.put)
    plain = engine.generate([engine.parse(ask([[5, 6, 7]], 20, end_id=END))])[0]
    assert len(generated(plain, 0)) == 20
    found = answers.get(timeout=WAIT_S)
    assert found.code == "INTERNAL" and "following the grammar has failed" in (found.problem or "")
    assert "unreachable" not in (found.problem or "")
    monkeypatch.undo()
    assert texts(engine.generate([engine.parse(guided(["choice"], ['["yes"]']))])[0]) == [b"yes"]
    engine.close()
