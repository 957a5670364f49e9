"""Models whose layers keep states, against transformers: Mamba 2 and the gated delta rule.

A row's state is one for all of its tokens, so what a chunk, a step, a beam or a neighbour leaves in it shows in every
later token. Memory is full of NaN where no row has written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, ask, generated
from support.engines.network_runs import FP32, decode_logits, in_a_row, mixed_logits, open_network
from support.engines.paged_steps import paged_steps, poisoned_states
from support.engines.rank_processes import RankProcesses, answer_of
from support.tiny_models.greedy import NEVER, argmaxes, greedy
from support.tiny_models.llama_models import LOUD, VOCAB, save

from backends.fastertransformer.engine.arrays import MOST_SLOTS
from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.errors import EngineError, WeightsError
from backends.fastertransformer.engine.model.blocks.context import LayerContext
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.ops.state_rows import StateRows
from backends.fastertransformer.engine.parallel.partition import Partition
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.settings import Settings

POSITIONS = 256
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h with biases": ("nemotron_h", {"use_bias": True, "use_conv_bias": False, "mlp_bias": True}),
    "nemotron_h with long steps": ("nemotron_h", {"time_step_min": 0.7}),
    "nemotron3": ("nemotron3", {}),
    "nemotron3_latent": ("nemotron3_latent", {}),
    "falcon_h1": ("falcon_h1", LOUD),
    "falcon_h1 with biases": (
        "falcon_h1",
        LOUD | dict.fromkeys(("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"), True),
    ),
    "falcon_h1_norm": ("falcon_h1_norm", LOUD),
    "falcon_h1_norm before the gate": ("falcon_h1_norm", LOUD | {"mamba_norm_before_gate": True}),
    # A norm enlarges outputs that are next to nothing: transformers' own steps are 6e-4 from its passes with less.
    **{name: (name, {"rms_norm_eps": 1e-2}) for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")},
}


def saved(name: str, directory: Path) -> tuple[Any, Settings]:
    base, changes = MODELS[name]
    model = save(base, directory, max_position_embeddings=POSITIONS, **changes)
    return model, Settings(directory, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22)


@pytest.fixture(scope="module", params=["nemotron_h", "falcon_h1_norm", "qwen3_next"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Settings]:
    return saved(request.param, tmp_path_factory.mktemp("hybrid"))


def lines_of(*lengths: int, seed: int = 7) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCAB, length).tolist() for length in lengths]


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_steps_give_the_logits_of_a_whole_pass(name: str, tmp_path: Path) -> None:
    """Rows are cut at places of their own, within and beyond what a scan computes together."""
    model, _ = saved(name, tmp_path)
    network, ids = open_network(tmp_path, 1, "Llama"), torch.tensor(lines_of(150, 150, 150))
    expected = logits_of(model, ids)
    for cuts in ([[149], [20], [64]], [[1, 2, 140], [64, 128, 149], [70, 71, 73]], [[63, 65], [3, 100], [16, 149]]):
        for row, found in enumerate(mixed_logits(network, ids, cuts)):
            assert (found - expected[row, : len(found)]).abs().max() < 1e-4
    short = ids[:, :24]
    for first in (1, 5):
        assert (decode_logits(network, short, first) - expected[:, first:24]).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["falcon_h1_norm", "qwen3_5"])
def test_blocks_of_a_pass_change_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows lie in one block, or in several, and a block ends within a row, or with it."""
    saved(name, tmp_path)
    network, ids, cuts = (
        open_network(tmp_path, 1, "Llama"),
        torch.tensor(lines_of(*[200] * 4)),
        [[190], [2], [64], [130]],
    )
    expected = mixed_logits(network, ids, cuts)
    for tokens in (64, 100, 192, 256):
        monkeypatch.setattr(StateRows, "block_tokens", tokens)
        for found, whole in zip(mixed_logits(network, ids, cuts), expected, strict=True):
            assert (found - whole).abs().max() < 1e-6


def test_a_server_gives_transformers_tokens_and_log_probabilities(opened: tuple[Any, Settings]) -> None:
    model, settings = opened
    engine = open_engine(settings, CPU)
    lines = lines_of(150, 1, 9, 64, 65, 9)
    lines[5] = lines[2]  # answers to one prompt
    told = {"end_id": NEVER, "runtime_top_p": 1e-7, "is_return_log_probs": True, "is_return_context_log_probs": True}
    (outputs,) = engine.generate([engine.parse(ask(lines, 8, **told))])
    engine.close()
    for row, line in enumerate(lines):
        found = generated(outputs, row)
        assert len(found) == 8 and found == argmaxes(model, line, found)
        whole = torch.tensor([*line, *found])
        known = logits_of(model, whole[None])[0, :-1].log_softmax(-1).gather(1, whole[1:, None])[:, 0].numpy()
        assert np.abs(outputs["context_log_probs"][row, 1 : len(line)] - known[: len(line) - 1]).max(initial=0) < 1e-4
        assert np.abs(outputs["output_log_probs"][row, 0] - known[len(line) - 1 :]).max() < 1e-4


def test_rows_that_come_go_and_are_set_back_get_what_transformers_gives_each(opened: tuple[Any, Settings]) -> None:
    """As on a GPU: a step is launched before the last tokens are read, so a row that has ended takes a surplus one."""
    model, settings = opened
    steps = paged_steps(settings, pages=18)
    allocator = steps.cache.allocator
    scheduler, answers = Scheduler(steps, 8, steps_ahead=True, chunk_tokens=16), list[list[Answer]]()
    generator = np.random.default_rng(3)
    asks = list(zip(lines_of(*generator.integers(1, 90, 14)), generator.choice([3, 90, 120], 14), strict=True))
    for place, (line, count) in enumerate(asks):
        answers.append([])
        scheduler.add(Job(parse_request(ask([line], count, end_id=NEVER), steps.config), answers[-1].append))
        for _ in range(2 * (place % 3)):
            scheduler.step()
    while not scheduler.is_idle:
        scheduler.step()
    for (line, count), (answer,) in zip(asks, answers, strict=True):
        assert not isinstance(answer, Failure), answer
        found = generated(answer.tensors)
        assert len(found) == count and found == argmaxes(model, line, found)
    assert scheduler.metrics.preemptions > 2 and allocator.free == 18
    assert allocator.states and allocator.states.free == allocator.states.count


def test_padding_of_a_captured_step_has_the_state_of_no_row(opened: tuple[Any, Settings]) -> None:
    """Rows that have just joined are behind those that decode, where padding is."""
    steps = paged_steps(opened[1])
    rows, states = [steps.cache.allocator.take(9) for _ in range(3)], steps.cache.states
    steps.slots.allocate(0, rows, np.full(3, 9))
    assert states
    with steps.slots.hidden(1, 4):
        assert states.of_slots[:4].tolist() == [rows[0].state, 0, 0, 0]
    assert states.of_slots[:4].tolist() == [*(row.state for row in rows), 0]


def test_beams_have_states_of_their_own(opened: tuple[Any, Settings]) -> None:
    """Also after they were preempted, when each goes on from its own tokens."""
    model, settings = opened
    (line,), others = lines_of(60), lines_of(127, 127, seed=2)
    expected = model.generate(
        torch.tensor([line]),
        attention_mask=torch.ones(1, len(line), dtype=torch.long),
        **{"max_new_tokens": 40, "num_beams": 4, "num_return_sequences": 4, "do_sample": False, "use_cache": False},
        **{"eos_token_id": None, "pad_token_id": 0, "length_penalty": 0.0},
    )[:, len(line) :]
    for pages in (60, 25):
        steps = paged_steps(settings, pages)
        scheduler, answers = Scheduler(steps, 8), list[Answer]()
        for other in others:
            scheduler.add(Job(parse_request(ask([other], 45, end_id=NEVER), steps.config), lambda _: None))
        scheduler.step()
        tensors = ask([line], 40, beam_width=4, end_id=NEVER)
        scheduler.add(Job(parse_request(tensors, steps.config), answers.append))
        while not scheduler.is_idle:
            scheduler.step()
        (answer,) = answers
        assert not isinstance(answer, Failure), answer
        assert [generated(answer.tensors, 0, beam) for beam in range(4)] == expected.tolist()
        assert (scheduler.metrics.preemptions > 0) == (pages == 25)


def test_a_conversation_goes_on_as_one_long_input_does(opened: tuple[Any, Settings]) -> None:
    """A state cannot go back by the token that ended an answer; the conversation is run again."""
    model, settings = opened
    engine = open_engine(settings, CPU)
    line: list[int] = []
    for turn, new in enumerate(lines_of(20, 3, 70)):
        free = greedy(model, [*line, *new], 9)
        end_id = free[-3]
        shown = free[: free.index(end_id, len(line) + len(new)) + 1]
        tensors = ask([new], 9, end_id=end_id) | {"START": np.array([[turn == 0]], np.int32)}
        answers = say(engine, tensors, session=5)
        assert answers["output_ids"][0, 0, : len(shown)].tolist() == shown
        line = shown[:-1]
    tensors = ask([[5]], 2, memory_len=4) | {"START": np.array([[1]], np.int32)}
    with pytest.raises(EngineError, match="memory_len: the states of this model's rows have seen all"):
        say(engine, tensors, session=6)
    engine.close()


def say(engine: Engine, tensors: Any, **more: Any) -> Any:
    from concurrent.futures import Future

    future: Future[Answer] = Future()
    engine.submit(engine.parse(tensors), future.set_result, **more)
    answer = future.result()
    if isinstance(answer, Failure):
        raise EngineError(answer.problem)
    return answer.tensors


def test_as_many_rows_are_run_as_have_states(tmp_path: Path) -> None:
    model, settings = saved("nemotron_h", tmp_path)
    row_bytes = 2 * 4 * (8 * 4 * 6 + 3 * (32 + 2 * 12))  # two layers of heads' memories, and of three tokens' channels
    engine = open_engine(Settings(**vars(settings) | {"kv_cache_bytes": 2 * 5 * row_bytes + (1 << 18)}), CPU)
    allocator = engine._steps.cache.allocator
    assert allocator.most_rows < 60 and f"{allocator.most_rows + 1} states of {row_bytes} bytes" in engine.description
    engine.close()
    steps = paged_steps(Settings(**vars(settings) | {"kv_cache_bytes": 2 * 5 * row_bytes + 1000}))
    scheduler, answers = Scheduler(steps, MOST_SLOTS, chunk_tokens=8), list[list[Answer]]()
    assert steps.cache.allocator.most_rows == 3
    lines = lines_of(5, 60, 3, 80, 9, 41)
    for line in lines:
        answers.append([])
        scheduler.add(Job(parse_request(ask([line], 12, end_id=NEVER), steps.config), answers[-1].append))
    refused = list[Answer]()
    scheduler.add(Job(parse_request(ask([[4]], 2, beam_width=4), steps.config), refused.append))
    while not scheduler.is_idle:
        scheduler.step()
    for line, (answer,) in zip(lines, answers, strict=True):
        assert not isinstance(answer, Failure), answer
        assert generated(answer.tensors) == greedy(model, line, 12)[len(line) :]
    assert "has 4 beams, each with a state; there are 3" in str(refused[0].problem)
    with pytest.raises(EngineError, match=f"a state of {row_bytes} bytes, and the cache has {row_bytes} bytes"):
        open_engine(Settings(**vars(settings) | {"kv_cache_bytes": row_bytes}), CPU)


@pytest.mark.parametrize(("name", "tensor", "pipeline"), [("nemotron_h", 1, 2), ("qwen3_5", 2, 1)])
def test_ranks_answer_as_one_process_does(name: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    """Stages have the states of their layers, and ranks those of their heads; also of a prompt that they have kept."""
    _, settings = saved(name, tmp_path)
    requests = [ask(lines_of(140, 5), 12, end_id=NEVER, is_return_log_probs=True)] * 2
    ranks = RankProcesses(tmp_path, tmp_path, tensor, pipeline, requests, model_type="Llama", chunk_tokens=16)
    try:
        alone = open_engine(settings, CPU)
        expected = [answer_of(alone, request) for request in requests]
        assert alone.metrics.prefix_hits == 128
        alone.close()
        assert set(ranks.wait(240)) == {0}, ranks.text
    finally:
        ranks.stop()
    for ours, theirs in zip(ranks.answers, expected, strict=True):
        for output, values in theirs.items():
            np.testing.assert_allclose(ours[output], values, atol=1e-4, err_msg=output)


def mixed(directory: Path, ranks: int, rank: int | None, x: torch.Tensor) -> list[torch.Tensor]:
    """Run what keeps a state in each layer, of one rank or of all, on the same input, [T, hidden], of two rows."""
    config = read_config(directory, "Llama", ranks if rank is not None else 1)
    weights = load_weights(directory, config, ranks, FP32, CPU, Partition(range(config.num_layer), rank))
    network = Network(config, weights)
    states, rows = poisoned_states(network, 2), in_a_row([torch.zeros(9).long(), torch.zeros(3).long()], [0, 0], [0, 1])
    context = LayerContext(network.ops, network.comm, lambda *_: x, state_rows=StateRows(torch.tensor([1, 2]), rows))
    assert weights.decoder
    layers = [(layer.state_mixer, state) for layer, state in zip(weights.decoder.layers, states.layers, strict=True)]
    return [mixer.out(mixer.inner(x[None], None, context, state)[0]) for mixer, state in layers if mixer and state]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(("nemotron_h", 2), ("nemotron_h with biases", 2), ("qwen3_next", 2), ("qwen3_5", 2)),
        *(("falcon_h1", 2), ("falcon_h1 with biases", 4)),
    ],
)
def test_what_ranks_compute_is_together_what_one_process_does(name: str, ranks: int, tmp_path: Path) -> None:
    """Four ranks that share two groups have a copy of one each."""
    saved(name, tmp_path)
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    of_ranks = [mixed(tmp_path, ranks, rank, x) for rank in range(ranks)]
    for whole, *parts in zip(mixed(tmp_path, ranks, None, x), *of_ranks, strict=True):
        assert (torch.stack(parts).sum(0) - whole).abs().max() < 1e-5 * whole.abs().max()


@pytest.mark.parametrize(
    ("name", "ranks", "problem"),
    [
        ("nemotron_h", 4, "4 ranks cannot share 8 heads of Mamba in 2 groups, which are normalised together"),
        ("falcon_h1", 3, "3 ranks cannot share 8 heads of Mamba in 2 groups$"),
        ("qwen3_next", 4, "4 ranks cannot share 2 heads of keys of the gated delta rule"),
    ],
)
def test_ranks_that_cannot_share_states_are_refused(name: str, ranks: int, problem: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    config = read_config(tmp_path, "Llama", ranks)
    with pytest.raises(WeightsError, match=problem):
        load_weights(tmp_path, config, ranks, FP32, CPU, Partition(range(config.num_layer), 0))
