"""LoRA adapters in the engine, against transformers' models with the adapters merged."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines.adapted_rows import answered, check_rows, lines
from support.engines.asking import ask, generated
from support.engines.few_pages import spoiled
from support.engines.hub_served import opened
from support.engines.page_reading_ops import captured_steps
from support.engines.paged_steps import paged_steps
from support.tiny_models import peft_served
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.guided_model import END, guided, texts, write_vocabulary
from support.tiny_models.llama_models import LOUD, MODELS, VOCAB, save, unfilled
from support.tiny_models.low_rank import ALL, PREFIX, STATES, draw, merged, write
from support.tiny_models.quantized_models import deepseeks, save_state, to_fp8

from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.grammar.compiled import Grammars
from backends.fastertransformer.engine.model import adapters as places
from backends.fastertransformer.engine.ops import linear
from backends.fastertransformer.engine.ops.adapted_rows import GroupedRows
from backends.fastertransformer.engine.ops.host.panels import Panels
from backends.fastertransformer.engine.ops.state_rows import StateRows
from backends.fastertransformer.engine.request.adapters import Adapters
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows import kept_state
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.settings import Settings
from models.described import read_directory
from models.peft import linear_layers, names_in_files, read_adapter

CHANGES: dict[str, dict[str, Any]] = {**peft_served.CHANGES, "falcon_h1_norm": LOUD}  # of other tiny models


def adapted(name: str, directory: Path, count: int = 2, **changes: Any) -> dict[str, Any]:
    """Save a tiny model with adapters; returns the models that they make by name, the plain one among them."""
    model = save(name, directory, **changes)
    models = {"": model}
    for number in range(count):
        # What is merged into a head that is the embedding changes that too.
        head = () if number % 2 or model.config.tie_word_embeddings else ("lm_head",)
        pairs = draw(model, number, 2 + 3 * number, (*ALL, *STATES, *head))
        write(directory / f"adapters/a{number}", pairs, lora_alpha=2 * (2 + 3 * number))
        models[f"a{number}"] = merged(model, pairs, 2.0)
    return models


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (1, 2)])
def test_rows_with_different_adapters_share_a_batch(ranks: int, stages: int, tmp_path: Path) -> None:
    models = adapted("llama", tmp_path)
    engine = opened(tmp_path, ranks, stages)
    assert "room for 2 adapters of rank 5" in engine.description
    check_rows(engine, models, ["a0", "", "a1", "a0", "a1", ""])
    with pytest.raises(EngineError, match="lora_name is 'b' in row 0; it must be one of a0, a1, or left out"):
        engine.parse(ask([[5]], 1, lora_name=np.array(["b"], object)))
    engine.close()


@pytest.mark.parametrize("case", ["llama", "qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.long)])
def test_an_adapter_s_first_matrices_lie_behind_a_layer_s(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a gate's matrices lie together too: what the layers themselves compute stays what it was."""
    models = adapted(case, tmp_path, **CHANGES.get(case, {}))

    def join(self: linear.Linear, other: linear.Linear) -> None:
        whole, other.joined_at = linear.Linear(torch.cat((self.weight, other.weight))), len(self.weight)
        self.joined = other.joined = whole
        self.weight, other.weight = whole.weight[: other.joined_at], whole.weight[other.joined_at :]

    monkeypatch.setattr(linear.Linear, "join", join)
    monkeypatch.setattr(Panels, "of", lambda *_: None)
    monkeypatch.setattr(linear, "_can_pack", lambda _: False)
    engine = opened(tmp_path)
    for matrix in engine._steps.adapters._matrices.values():
        whole = matrix.linear.joined or matrix.linear
        if whole.low_rank and matrix.is_extendable:
            memory = whole.with_adapters.weight.untyped_storage().data_ptr()
            for each in (whole.weight, matrix.linear.weight, whole.low_rank.down):
                assert each.untyped_storage().data_ptr() == memory
    check_rows(engine, models, ["a0", "", "a1", "a0", "a1", ""])
    engine.close()


_STATES = ("falcon_h1", "falcon_h1_norm", "nemotron_h", "qwen3_5_moe")


@pytest.mark.parametrize("case", ["phi3_plain", "gemma2", "qwen3_moe_alike", "deepseek_v3", *_STATES])
def test_layers_of_other_families_have_adapters(case: str, tmp_path: Path) -> None:
    """Fused matrices, norms behind, shared experts, latent attention, states; files that name a layer otherwise."""
    targets = {
        "phi3_plain": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
        "qwen3_moe_alike": ALL[:4],
        "deepseek_v3": (*ALL, "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    }
    model, drawn = save(case, tmp_path, **CHANGES.get(case, {})), targets.get(case, (*ALL, *STATES))
    pairs = {name: pair for name, pair in draw(model, 3, targets=drawn).items() if ".experts." not in name}
    write(tmp_path / "adapters/only", pairs, lora_alpha=6)
    engine = opened(tmp_path)
    check_rows(engine, {"": model, "only": merged(model, pairs, 1.5)}, ["only", "", "only"])
    engine.close()


@pytest.mark.parametrize("case", ["nemotron_h", pytest.param("qwen3_next", marks=pytest.mark.long)])
def test_tokens_have_their_adapters_in_blocks_of_a_pass(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with states take some tokens at a time; a block ends within a row, or with it."""
    models, blocks = adapted(case, tmp_path, max_position_embeddings=256, **CHANGES.get(case, {})), list[slice]()
    monkeypatch.setattr(StateRows, "block_tokens", 100)
    part = GroupedRows.part
    monkeypatch.setattr(GroupedRows, "part", lambda rows, tokens: (blocks.append(tokens), part(rows, tokens))[1])
    engine = opened(tmp_path)
    check_rows(engine, models, ["a0", "", "a1", "a0", "a1", ""], longest=150)
    assert len({each.start for each in blocks}) > 2
    engine.close()


def test_every_linear_layer_of_every_class_may_have_one(tmp_path: Path) -> None:
    """Compared with the modules of transformers' classes."""
    classes, found = {family: name for name, (family, _) in MODELS.items()}, set[str]()
    for name in classes.values():
        with torch.device("meta"):
            model = unfilled(name)
        model.config.save_pretrained(tmp_path / name)
        layers = linear_layers(read_directory(tmp_path / name, ValueError).decoder)
        modules = [each for each, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        found |= {each.rpartition(".")[2] for each in modules if not any(own in layers for own in names_in_files(each))}
    assert not found and len(classes) > 25


def test_an_adapter_may_be_of_the_class_that_sees_images(tmp_path: Path) -> None:
    """PEFT calls the layers of Qwen3.5's text as that class does, which the published models have."""
    model = save("qwen3_5", tmp_path, **CHANGES["qwen3_5"])
    pairs = draw(model, 3, targets=(*ALL, *STATES))
    for name, place in (("new", "model.language_model."), ("old", "language_model.model.")):
        write(tmp_path / f"adapters/{name}", {key.replace("model.", place, 1): pair for key, pair in pairs.items()})
    engine, changed = opened(tmp_path), merged(model, pairs)
    check_rows(engine, {"": model, "new": changed, "old": changed}, ["new", "", "old"])
    engine.close()


def test_a_layer_whose_matrices_are_there_by_both_of_its_names_is_refused(tmp_path: Path) -> None:
    model = save("nemotron_h", tmp_path)
    pairs = draw(model, 3, targets=("q_proj",))
    again = {name.replace("model.", "backbone.", 1): (a.clone(), b.clone()) for name, (a, b) in pairs.items()}
    write(tmp_path / "adapters/only", pairs | again)
    with pytest.raises(EngineError, match="its matrices are there twice"):
        opened(tmp_path)


def test_scales_are_peft_s_own_by_module(tmp_path: Path) -> None:
    """Ranks and alphas of some modules, and the root of the rank."""
    model = save("llama", tmp_path)
    pairs = draw(model, 5, rank=4, ranks={"o_proj": 2, "up_proj": 9})
    told = {"rank_pattern": {"o_proj": 2, "mlp.up_proj": 9}, "alpha_pattern": {"o_proj": 3, "q_proj": 1}}
    write(tmp_path / "adapters/a", pairs, lora_alpha=6, **told)
    write(tmp_path / "adapters/roots", pairs, lora_alpha=6, use_rslora=True, **told)
    plain = merged(model, pairs, 1.5, {"o_proj": 1.5, "up_proj": 6 / 9, "q_proj": 1 / 4})
    roots = merged(model, pairs, 3.0, {"o_proj": 3 / 2**0.5, "up_proj": 2.0, "q_proj": 0.5})
    engine = opened(tmp_path)
    check_rows(engine, {"a": plain, "roots": roots}, ["a", "roots"])
    engine.close()


# Whole prompts with adapters are in the test above.
@pytest.mark.in_ci(when=lambda at: at.chunk_tokens and at.case in ("llama", "nemotron_h"))
@pytest.mark.parametrize(
    ("case", "chunk_tokens", "pages", "places"),
    [
        *(("llama", 0, 400, None), ("llama", 64, 400, 2), ("llama", 64, 12, None)),
        *((case, 64, 16, 2) for case in ("nemotron_h", "falcon_h1_norm", "qwen3_next", "qwen3_5")),
    ],
)
def test_mixed_traffic_gets_what_each_adapter_gives(
    case: str, chunk_tokens: int, pages: int, places: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs, chunks, mixed steps, pages that are known, rows set back, adapters that make way; pages are poisoned."""
    monkeypatch.setattr(kept_state, "LEAST_KEPT", 32)
    models = adapted(case, tmp_path, 3, max_position_embeddings=512, **CHANGES.get(case, {}))
    settings = Settings(tmp_path, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22, max_adapters=places)
    steps, adapters = captured_steps(settings, pages, monkeypatch, 64, 256, 768), Adapters()
    adapters.use(steps, steps.config.decoder, tmp_path)
    for sizes in ((16, 0, 0, 0), (0, 0, 64, 0), (0, 0, 0, 256)):
        steps.capture(*sizes, 1)
    steps.cache.allocator.prefixes._most_unused = pages
    scheduler, generator = (
        Scheduler(steps, 16, steps_ahead=True, chunk_tokens=chunk_tokens),
        np.random.default_rng(pages),
    )
    shared, asked = generator.integers(3, VOCAB, 70).tolist(), []
    with spoiled(steps):
        for place in range(20):
            own = generator.integers(3, VOCAB, int(generator.choice([1, 31, 64, 120]))).tolist()
            line, name = (shared if place % 3 else []) + own, ["", "a0", "a1", "a2"][int(generator.integers(4))]
            count = int(generator.choice([5, 40, 90]))
            asked.append((line, name, count, answered(adapters, steps, scheduler, name, line, count=count)))
            for _ in range(2 * (place % 3)):
                scheduler.step()
        while not scheduler.is_idle:
            scheduler.step()
    for line, name, count, (answer,) in asked:
        assert not isinstance(answer, Failure), answer
        found = generated(answer.tensors)
        assert len(found) == count and found == argmaxes(models[name], line, found)
    assert steps.cache.allocator.prefixes.found >= 64
    assert (scheduler.metrics.preemptions > 0) == (pages < 100)
    assert not any(adapter.holders or adapter.rows for adapter in adapters.known.values())


@pytest.mark.parametrize("case", ["llama", "nemotron_h", pytest.param("qwen3_next", marks=pytest.mark.long)])
def test_pages_and_states_belong_to_their_adapter(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same content under another name finds them, a conversation's too; another adapter, or none, does not."""
    monkeypatch.setattr(kept_state, "LEAST_KEPT", 32)
    models = adapted(case, tmp_path, max_position_embeddings=128, **CHANGES.get(case, {}))
    models["twin"] = models["a0"]
    shutil.copytree(tmp_path / "adapters/a0", tmp_path / "adapters/twin")
    steps, adapters = paged_steps(Settings(tmp_path, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22)), Adapters()
    adapters.use(steps, steps.config.decoder, tmp_path)
    scheduler, line, found = Scheduler(steps, 4), [*range(3, 43)], steps.cache.allocator.prefixes
    found._most_unused, known = 60, []
    asked = [("a0", 4), ("twin", 4), ("a1", 4), ("a1", 4), ("", 40), ("", 4), ("a0", 4), ("a1", 4)]
    for name, count in asked:
        before = found.found
        answers = answered(adapters, steps, scheduler, name, line, count=count)
        while not scheduler.is_idle:
            scheduler.step()
        made = generated(answers[-1].tensors)
        assert made == argmaxes(models[name], line, made)
        known.append(found.found - before)
        line = [*line, *made, 5] if count > 4 else line
    assert known == [0, 32, 0, 32, 0, 64, 32, 32]


def test_a_name_that_is_loaded_again_finds_no_pages_of_what_it_was(tmp_path: Path) -> None:
    """Other content under an old name, then the old content under it; tokens are each content's own."""
    models = adapted("llama", tmp_path)
    steps, adapters = paged_steps(Settings(tmp_path, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22)), Adapters()
    adapters.use(steps, steps.config.decoder, tmp_path)
    scheduler, line, found = Scheduler(steps, 4), [*range(3, 43)], steps.cache.allocator.prefixes
    known = []
    for content in ("a0", "a1", "a0"):
        adapters.unload("a0")
        adapters.load("a0", tmp_path / "adapters" / content, lambda change: change())
        before, answer = found.found, answered(adapters, steps, scheduler, "a0", line, count=6)
        while not scheduler.is_idle:
            scheduler.step()
        made = generated(answer[-1].tensors)
        assert made == argmaxes(models[content], line, made)
        known.append(found.found - before)
    assert known == [0, 0, 32]


def test_beams_and_streams_have_adapters(tmp_path: Path) -> None:
    models = adapted("llama", tmp_path)
    engine = opened(tmp_path)
    for name in ("a1", ""):
        beside = ask([lines(1)[0]] * 2, 6, end_id=NEVER, beam_width=3, lora_name=np.array([name, "a0"], object))
        (together,) = engine.generate([engine.parse(beside)])
        plain = tmp_path / f"merged-{name}"
        models[name].save_pretrained(plain)
        alone_engine = opened(plain)
        (alone,) = alone_engine.generate([alone_engine.parse(ask([lines(1)[0]], 6, end_id=NEVER, beam_width=3))])
        alone_engine.close()
        assert (together["output_ids"][0] == alone["output_ids"][0]).all()
    texts, done = list[list[int]](), threading.Event()

    def note(answer: Any) -> None:
        texts.append(generated(answer.tensors))
        if answer.is_final:
            done.set()

    line = lines(1, seed=2)[0]
    request = engine.parse(ask([line], 9, end_id=NEVER, lora_name=np.array(["a0"], object)))
    engine.submit(request, note, is_streaming=True)
    assert done.wait(240) and len(texts) > 1 and texts[-1] == argmaxes(models["a0"], line, texts[-1])
    engine.close()


def test_adapters_come_and_go_while_rows_run(tmp_path: Path) -> None:
    """A row whose adapter is unloaded ends well; its name is free at once, for other matrices too."""
    models = adapted("llama", tmp_path, max_position_embeddings=2048)
    pairs = draw(models[""], 9)
    engine = opened(tmp_path, max_adapters=3)
    assert set(engine.adapters()) == {"a0", "a1"} and engine.adapters()["a1"]["rank"] == 5
    line, answers, begun, done = lines(1)[0], list[Any](), threading.Event(), threading.Event()

    def note(answer: Any) -> None:
        answers.append(answer)
        begun.set()
        if answer.is_final:
            done.set()

    told = {"end_id": NEVER, "lora_name": np.array(["a0"], object)}
    engine.submit(engine.parse(ask([line], 400, **told)), note, is_streaming=True)
    begun.wait(240)
    engine.unload_adapter("a0")
    with pytest.raises(EngineError, match="lora_name is 'a0' in row 0; it must be one of a1"):
        engine.parse(ask([line], 1, **told))
    with pytest.raises(EngineError, match="lora_name is 'a0'; it must be one of a1"):
        engine.unload_adapter("a0")
    engine.load_adapter("a0", write(tmp_path / "other", pairs))
    assert engine.metrics.running_adapters == "a0"
    with pytest.raises(EngineError, match="'a0' is loaded already"):
        engine.load_adapter("a0", tmp_path / "other")
    check_rows(engine, models | {"a0": merged(models[""], pairs)}, ["a0", "a1"])
    assert not done.is_set() or len(generated(answers[-1].tensors)) == 400
    assert done.wait(240)
    found = generated(answers[-1].tensors)
    assert len(found) == 400 and found == argmaxes(models["a0"], line, found)
    late = engine.parse(ask([line], 1, **told))
    engine.unload_adapter("a0")
    with pytest.raises(EngineError, match="the adapter 'a0' was unloaded"):
        engine.generate([late])
    assert len(engine._steps.adapters._host) == 1
    engine.close()


def test_an_adapter_that_goes_while_a_grammar_is_compiled_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another one has its name by then; a row without it, whose grammar is the same, is answered."""
    model = save("llama", tmp_path, vocab_size=END + 1)
    write_vocabulary(tmp_path)
    write(tmp_path / "adapters/a", draw(model, 1))
    engine, other = opened(tmp_path), write(tmp_path / "other", draw(model, 2))
    compile_rows, begun, may_go = Grammars.compile_rows, threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        begun.set()
        assert may_go.wait(240)
        return compile_rows(*given)

    monkeypatch.setattr(Grammars, "compile_rows", slow)
    answers = {name: Queue[Answer]() for name in ("a", "")}

    def send(name: str) -> None:
        asked = guided(["regex"], ["[a-c]{4}"], 20, lora_name=np.array([name], object))
        engine.submit(engine.parse(asked), answers[name].put)

    send("a"), send("")
    assert begun.wait(240)
    engine.unload_adapter("a")
    engine.load_adapter("a", other)
    may_go.set()
    refused, plain = answers["a"].get(timeout=240), answers[""].get(timeout=240)
    assert isinstance(refused, Failure) and "the adapter 'a' was unloaded" in refused.problem
    assert not isinstance(plain, Failure) and re.fullmatch(b"[a-c]{4}", *texts(plain.tensors))
    assert len(engine._steps.adapters._host) == 1
    send("a")
    found = answers["a"].get(timeout=240)
    assert not isinstance(found, Failure) and re.fullmatch(b"[a-c]{4}", *texts(found.tensors))
    engine.close()


def test_steps_go_on_while_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that change meanwhile are refused: the pages of what was checked must not be those of what was read."""
    models = adapted("llama", tmp_path)
    pairs, may_go, begun = draw(models[""], 9), threading.Event(), threading.Event()
    engine, other = opened(tmp_path, max_adapters=3), write(tmp_path / "other", pairs)

    def slow(*given: Any) -> Any:
        begun.set()
        assert may_go.wait(240)
        return read_adapter(*given)

    monkeypatch.setattr(places, "read_adapter", slow)
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(engine.load_adapter, "late", other) for _ in range(2)]
        assert begun.wait(240)
        check_rows(engine, models, ["a0", "", "a1"])
        assert set(engine.adapters()) == {"a0", "a1"} and not any(each.done() for each in loads)
        may_go.set()
        problems = [str(each.exception()) for each in loads]
    assert set(problems) == {"None", "an adapter 'late' is loaded already; unload it first"}
    check_rows(engine, models | {"late": merged(models[""], pairs)}, ["late", "a0"])

    def rewriting(*given: Any) -> Any:
        (other / "adapter_config.json").touch()
        return read_adapter(*given)

    monkeypatch.setattr(places, "read_adapter", rewriting)
    with pytest.raises(EngineError, match="other was written while it was read; load it again"):
        engine.load_adapter("again", other)
    assert "again" not in engine.adapters() and len(engine._steps.adapters._host) == 3
    engine.close()


def test_more_adapters_than_places_take_turns(tmp_path: Path) -> None:
    models = adapted("llama", tmp_path, 4)
    engine = opened(tmp_path, max_adapters=1)
    check_rows(engine, models, ["a0", "a3", "", "a1", "a2", "a0"])
    engine.close()


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_weights_of_few_bits_have_adapters(form: str, tmp_path: Path) -> None:
    """The oracle is transformers with the weights that the numbers and their scales mean."""
    model = save("llama", tmp_path)
    pairs = draw(model, 1)
    state = load_file(tmp_path / "model.safetensors")
    for key in [key for key in state if "_proj" in key or (form == "int8" and key == "lm_head.weight")]:
        if form == "int8":
            scales = state[key].abs().amax(1, keepdim=True) / 127
            model.get_parameter(key).data = (state[key] / scales).round() * scales
        else:
            numbers, scales = to_fp8(state[key], 16, 32)
            wide = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)
            model.get_parameter(key).data = numbers.float() * wide[: numbers.shape[0], : numbers.shape[1]]
            state[key], state[f"{key}_scale_inv"] = numbers, scales
    if form == "fp8":
        save_state(tmp_path, state, deepseeks([16, 32]))
    write(tmp_path / "adapters/a", pairs)
    engine = opened(tmp_path, int8_mode=int(form == "int8"))
    # What int8 is multiplied by is rounded to 16 bits where the processor multiplies bytes.
    check_rows(engine, {"": model, "a": merged(model, pairs)}, ["a", "", "a"], limit=1e-3 if form == "int8" else 1e-4)
    engine.close()


def test_a_session_keeps_its_adapter(tmp_path: Path) -> None:
    models = adapted("llama", tmp_path)
    steps, adapters = paged_steps(Settings(tmp_path, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22)), Adapters()
    adapters.use(steps, steps.config.decoder, tmp_path)
    scheduler, said = Scheduler(steps, 4), list[int]()
    for turn, (name, line) in enumerate([("a0", [5, 9, 13]), ("a1", [8]), ("a0", [8])]):
        tensors = ask([line], 6, end_id=NEVER, lora_name=np.array([name], object))
        answers = list[Any]()
        request = parse_request({**tensors, "START": np.array([turn == 0], np.int32)}, steps.config, None, adapters)
        scheduler.add(Job(request, answers.append, session="s"))
        while not scheduler.is_idle:
            scheduler.step()
        if name == "a1":
            assert "session s began with the adapters a0" in answers[0].problem
            continue
        said += line
        found = generated(answers[-1].tensors)[-6:]
        assert found == argmaxes(models["a0"], said, found)
        said += found


ONE = torch.ones(4, 4)
HOSTILE: dict[str, tuple[Any, str]] = {
    "no file of weights": (lambda a: (a / "adapter_model.safetensors").unlink(), "cannot be read: No such file"),
    "no configuration": (lambda a: (a / "adapter_config.json").unlink(), "no adapter_config.json"),
    "a pickle": (
        lambda a: (a / "adapter_model.safetensors").rename(a / "adapter_model.bin"),
        r"pickles \(.bin\) are not served",
    ),
    **{
        f"a pipe as {name}": (lambda a, name=name: pipe(a / name), "not a regular file")
        for name in ("adapter_config.json", "adapter_model.safetensors")
    },
    "cut off": (
        lambda a: (a / "adapter_model.safetensors").write_bytes((a / "adapter_model.safetensors").read_bytes()[:-9]),
        "truncated",
    ),
    "another type": (lambda a: settings(a, peft_type="IA3"), "peft_type is 'IA3'"),
    "dora": (lambda a: settings(a, use_dora=True), "use_dora: True  .its weights are also scaled by a vector"),
    "bias": (lambda a: settings(a, bias="lora_only"), "bias: 'lora_only'"),
    "whole modules": (lambda a: settings(a, modules_to_save=["lm_head"]), "modules_to_save: .'lm_head'."),
    "another rank": (lambda a: settings(a, r=3), r"lora_A.weight: \[4, 64\], expected \[3, 64\]"),
    "no rank": (lambda a: settings(a, r=0), "r is 0, not a positive number"),
    "a huge rank": (lambda a: settings(a, r=1 << 40), f"rank {1 << 40}; the most is 256"),
    "no alpha": (lambda a: settings(a, lora_alpha="inf"), "lora_alpha is 'inf', not a number"),
    "a pattern": (lambda a: settings(a, rank_pattern={".*": 2}), r"rank_pattern holds '\.\*'"),
    "an unknown module": (
        lambda a: tensors(a, lambda found: {**found, f"{PREFIX}model.layers.9.mlp.up_proj.lora_A.weight": ONE}),
        "model.layers.9.mlp.up_proj.lora_B.weight: missing",
    ),
    "a head of another shape": (
        lambda a: tensors(a, lambda found: {**found, **{f"{PREFIX}lm_head.lora_{n}.weight": ONE + 0 for n in "AB"}}),
        r"lm_head.lora_A.weight: \[4, 4\], expected \[4, 64\]",
    ),
    "another head's": (
        lambda a: tensors(a, lambda found: {**found, f"{PREFIX}lm_head.base_layer.weight": torch.ones(VOCAB, 64)}),
        "lm_head.base_layer is not the model's own",
    ),
    "the embedding": (
        lambda a: tensors(a, lambda found: {**found, f"{PREFIX}model.embed_tokens.lora_embedding_A": ONE + 0}),
        "model.embed_tokens.lora_embedding_A: no matrix",
    ),
    "a module that is not named": (
        lambda a: settings(a, target_modules=["q_proj", "v_proj"]),
        "o_proj: PEFT passes over it, as target_modules does not name it",
    ),
    "a layer that is not named": (
        lambda a: settings(a, layers_to_transform=[0]),
        "layers.1.mlp.down_proj: PEFT passes over it, as layers_to_transform leaves its layer out",
    ),
    "no matrices for a module that is named": (
        lambda a: (
            tensors(a, lambda found: {name: each for name, each in found.items() if "q_proj" not in name}),
            settings(a, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ),
        "no matrices for the target_modules q_proj",
    ),
    "experts' parameters": (
        lambda a: settings(a, target_parameters=["mlp.experts.gate_up_proj"]),
        "target_parameters: .'mlp.experts.gate_up_proj'.  .parameters that are no layer's weight",
    ),
    "no matrix": (lambda a: tensors(a, lambda found: {**found, "other": ONE}), "other: no matrix"),
    "nothing": (lambda a: tensors(a, lambda found: {}), "it has no matrices"),
    "nan": (
        lambda a: tensors(a, lambda found: {name: each * float("nan") for name, each in found.items()}),
        "has numbers that are not finite",
    ),
    "integers": (
        lambda a: tensors(a, lambda found: {name: each.int() for name, each in found.items()}),
        "of type I32; legal are",
    ),
    "another model's": (
        lambda a: tensors(a, lambda found: {name: each[:, :3].contiguous() for name, each in found.items()}),
        r"expected \[4, 64\]",
    ),
}


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def settings(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors(adapter: Path, change: Any) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    directory = tmp_path_factory.mktemp("running")
    model = save("llama", directory)
    engine = opened(directory, max_adapters=2, max_adapter_rank=4)
    yield engine, write(directory / "whole", draw(model, 0))
    engine.close()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_adapter_is_refused_and_nothing_changes(case: str, running: tuple[Any, Path], tmp_path: Path) -> None:
    engine, whole = running
    shutil.copytree(whole, tmp_path / "a")
    damage, problem = HOSTILE[case]
    damage(tmp_path / "a")
    with pytest.raises(EngineError, match=problem):
        engine.load_adapter("a", tmp_path / "a")
    assert engine.adapters() == {}


def test_names_and_ranks_have_limits(running: tuple[Any, Path], tmp_path: Path) -> None:
    engine, whole = running
    for name in ("", "../a", "a/b", ".a", "a" * 65, "a b", "ä"):
        with pytest.raises(EngineError, match="is no name of an adapter"):
            engine.load_adapter(name, whole)
    model = save("llama", tmp_path / "model")
    with pytest.raises(EngineError, match="has rank 5, and there is room for 4; set max_adapter_rank"):
        engine.load_adapter("wide", write(tmp_path / "wide", draw(model, 1, rank=5)))
    for limits in ({"max_adapters": 65}, {"max_adapters": 2, "max_adapter_rank": 257}):
        with pytest.raises(EngineError, match="the most are 64 of 256"):
            opened(tmp_path / "model", **limits)
    with pytest.raises(EngineError, match="this model has no adapters; leave it out"):
        engine.parse(ask([[5]], 1, lora_name=np.array(["a"], object)))
    plain = opened(tmp_path / "model")
    with pytest.raises(EngineError, match="no adapter can be loaded: max_adapters is 0"):
        plain.load_adapter("a", whole)
    plain.close()
    write(tmp_path / "model/adapters/bad", draw(model, 1), bias="all")
    with pytest.raises(EngineError, match="adapters/bad/adapter_config.json describes an adapter that is not served"):
        opened(tmp_path / "model")


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *(("llama", 1), ("llama", 2), ("falcon_h1", 1), ("qwen3_next", 1), ("nemotron3_latent", 2), ("qwen3_5", 2)),
        *(("deepseek_v3", 2), ("mixtral", 2), ("qwen3_5_moe", 1), ("qwen3", 2), ("gemma2", 1)),
        *(
            pytest.param(family, 1, marks=pytest.mark.long)
            for family in ("nemotron3_latent", "qwen3_5", "mixtral", "deepseek_v3")
        ),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("qwen3_next", 2), ("falcon_h1", 4), ("qwen3_5_moe", 2))
        ),
    ],
)
def test_logits_are_pefts_with_each_adapter_set(family: str, ranks: int, tmp_path: Path) -> None:
    """Row by row, in one batch: of a prompt as it comes whole, and beside rows that decode."""
    save(family, tmp_path, **CHANGES.get(family, {}))
    data, (first, second, *others) = peft_served.DATA / family, peft_served.FAMILIES[family]
    for name in (first, second, *others):
        shutil.copytree(data / name, tmp_path / "adapters" / name)
    recorded, line = np.load(data / "logits.npz"), peft_served.INPUT_IDS[0].tolist()
    engine = opened(tmp_path, ranks)
    names = [second, "", first, *others, first, second]
    told = {"end_id": NEVER, "is_return_context_log_probs": True, "num_context_top_log_probs": 20}
    request = ask([line] * len(names), 2, lora_name=np.array(names, object), **told)
    (outputs,) = engine.generate([engine.parse(request)])
    for row, name in enumerate(names):
        scores = torch.from_numpy(recorded[name or peft_served.PLAIN][0]).log_softmax(-1)
        known = scores[:-1].gather(1, torch.tensor(line[1:])[:, None])[:, 0].numpy()
        assert np.abs(outputs["context_log_probs"][row, 1 : len(line)] - known).max() < 1e-4
        best = scores[:-1].topk(20).values.numpy()
        assert np.abs(outputs["context_top_log_probs"][row, 1 : len(line)] - best).max() < 1e-4
        assert generated(outputs, row)[0] == scores[-1].argmax()
    assert all(np.abs(recorded[name] - recorded[peft_served.PLAIN]).max() > 0.1 for name in (first, second, *others))
    engine.close()


def test_adapters_are_there_again_when_workers_were_restarted(tmp_path: Path) -> None:
    """Those of the directory, and one that was loaded later, which a row that waits may have."""
    models = adapted("llama", tmp_path)
    pairs = draw(models[""], 9)
    engine = opened(tmp_path, 2, max_adapters=3)
    engine.load_adapter("later", write(tmp_path / "other", pairs))
    check_rows(engine, models, ["a0", "a1"])
    for process in engine._loaded.workers._processes:
        process.kill()
    with pytest.raises(EngineError, match="lost"):
        while True:
            check_rows(engine, models, ["a0", "a1"])
    check_rows(engine, models | {"later": merged(models[""], pairs)}, ["later", "a0", "", "a1"])
    engine.close()
