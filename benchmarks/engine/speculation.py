"""Tokens a second with and without drafts, by turns in one process, and their ratio.

    python3 -m benchmarks.engine.speculation                                              # the demonstration's shape
    python3 -m benchmarks.engine.speculation --way=draft
    python3 -m benchmarks.engine.speculation --device=cuda --size="Llama 3.1 8B" --data-type=fp16 --csv=drafts.csv

What a text repeats of its prompt decides how much drafts gain, so the model says what it is told to: its layers compute
as ever and add zeros, its embedding is random, and its head knows what follows on each token. Four texts are asked for:

    summary     runs of some 8 tokens of a prompt of 1,000, with some 4 of its own between them
    edit        some 60 tokens of a prompt of 600 as they are, then some 5 others
    own words   nothing is repeated, so nothing is drafted
    misleading  two tokens of the prompt, then one of its own: each pair leads to a draft that is wrong

The first two are to gain, and the others are to lose at most 3%.

With ``--way=draft`` drafts come from a draft model of the first layers of the same shape, which is told things too, and
three texts of no words of a prompt of 600 are asked for:

    known       the draft model says the same
    half known  it says another token in the place of every third
    unknown     it never says the same

The last one is to lose at most 3%. With ``--way=mtp`` the same texts are drafted by a predictor of the model's own, of
a layer as the model's: GLM 4.5's class, whose layers may all be dense, has one.

Both sides take turns, and a ratio is the median of those of a turn, so that what else the machine does changes it
little. The second ratio is of the processor time of both sides, which other processes change less; it says nothing of a
GPU.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from backends.fastertransformer.engine import part
from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.model import draft_model, predictor
from backends.fastertransformer.engine.model.layouts import ModelWeights
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.ops.linear import Linear
from backends.fastertransformer.engine.settings import Settings
from benchmarks.engine.generate import Ask, tensors_of
from benchmarks.gpu.models import Table, find_size
from benchmarks.gpu.sizes import LlamaSize, Size
from ft_format.location import DRAFT, MTP
from handover.arguments import ScriptArguments
from handover.errors import exit_status
from models.directory import CONFIG_FILE

_DEMONSTRATION = LlamaSize(6, 256, 8, 8064, kv_heads=8, head_size=32, inter=704, rope_theta=1e4, positions=2048)


@dataclass(frozen=True)
class SpeculationArguments(ScriptArguments):
    """What to measure."""

    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    size: str = field(default="", metadata={"help": "a model of random weights; empty: the demonstration's shape"})
    data_type: str = field(default="fp32", metadata={"help": "fp32, fp16 or bf16"})
    threads: int = field(default=0, metadata={"help": "of torch on a CPU; 0: one for each core"})
    way: str = field(default="ngram", metadata={"help": "ngram, draft or mtp: where drafts come from"})
    layers: int = field(default=1, metadata={"help": "of the draft model"})
    rows: tuple[int, ...] = field(default=(1, 16), metadata={"help": "JSON list: rows of a request"})
    tokens: int = field(default=256, metadata={"help": "of each row"})
    repeats: int = field(default=5, metadata={"help": "runs of each side that count"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One text for a number of rows, in tokens a second of all rows: medians, also of a turn's ratios."""

    way: str
    model: str
    data_type: str
    text: str
    rows: int
    tokens: int
    plain: float
    drafted: float
    accepted: float
    ratio: float
    processor_ratio: float


@dataclass(frozen=True)
class Text:
    """A prompt, what the model says behind it, and what a draft model does; no token comes twice in the first two."""

    name: str
    prompt: list[int]
    output: list[int]
    drafted: list[int] = field(default_factory=list)


def make_texts(tokens: int, vocab_size: int, way: str) -> list[Text]:
    """Make the texts of some tokens each, see the module."""
    draw = random.Random(1)

    def make(name: str, length: int, copied: float, own: float) -> Text:
        ids = draw.sample(range(1, vocab_size), length + tokens + 100)
        prompt, new, output = ids[:length], iter(ids[length:]), list[int]()
        starts = iter(range(0, length, max(1, int(copied) + 1)))
        while len(output) < tokens:
            output += [next(new) for _ in range(_about(draw, own))]
            start = next(starts) if copied else 0
            output += prompt[start : start + min(int(copied), _about(draw, copied))]
        return Text(name, prompt, output[:tokens])

    if way in (DRAFT, MTP):
        own = make(way, 600, 0, 4)
        others = draw.sample(sorted({*range(1, vocab_size)} - {*own.prompt, *own.output}), tokens)
        said = {
            "known": own.output,
            "half known": [each if at % 3 else others[at] for at, each in enumerate(own.output)],
            "unknown": others,
        }
        return [replace(own, name=name, drafted=drafted) for name, drafted in said.items()]
    texts = [make("summary", 1000, 8, 4), make("edit", 600, 60, 5), make("own words", 600, 0, 4)]
    pairs = make("misleading", 3 * tokens, 2, 1)
    return [*texts, pairs]


def _about(draw: random.Random, mean: float) -> int:
    return draw.randint(max(1, int(mean / 2)), max(1, int(1.5 * mean))) if mean else 0


@contextmanager
def serving(arguments: SpeculationArguments, text: Text) -> Iterator[Engine]:
    """Open the engine with a model that says a text."""
    size = find_size(arguments.size) if arguments.size else _DEMONSTRATION

    def load_and_tell(*given: Any, **more: Any) -> ModelWeights:
        weights = load_weights(*given, **more)
        tell(weights, [text.prompt[-1], *text.output], text.output)
        return weights

    def load_and_tell_draft(*given: Any, **more: Any) -> ModelWeights:
        weights = load_weights(*given, **more)
        tell(weights, [text.prompt[-1], *text.output], text.drafted)
        return weights

    def load_and_tell_predictor(*given: Any, **more: Any) -> ModelWeights:
        weights = load_weights(*given, **more)
        tell_predictor(weights, size, [text.prompt[-1], *text.output], text.drafted)
        return weights

    with tempfile.TemporaryDirectory(prefix="slipway-drafts-") as folder:
        size.write(Path(folder))
        if arguments.way == DRAFT:
            (Path(folder) / DRAFT).mkdir()
            replace(size, layers=arguments.layers).write(Path(folder) / DRAFT)
        if arguments.way == MTP:
            add_predictor(Path(folder) / CONFIG_FILE, size.layers)
        settings = Settings(
            Path(folder), 1, 1, arguments.data_type, arguments.threads, size.model_type, has_made_up_weights=True,
            has_prefix_cache=False, speculation=arguments.way,
        )  # fmt: skip
        with (
            mock.patch.object(part, "load_weights", load_and_tell),
            mock.patch.object(draft_model, "load_weights", load_and_tell_draft),
            mock.patch.object(predictor, "load_weights", load_and_tell_predictor),
        ):
            engine = open_engine(settings, torch.device(arguments.device))
        try:
            yield engine
        finally:
            engine.close()


def add_predictor(path: Path, layers: int) -> None:
    """Describe a Llama of some layers as what computes the same, and has a predictor."""
    kind = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "partial_rotary_factor": 1.0}
    dense = {"first_k_dense_replace": layers, "num_nextn_predict_layers": 1, "use_qk_norm": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), **kind, **dense}))


@torch.inference_mode()
def tell(weights: ModelWeights, before: Sequence[int], says: Sequence[int]) -> None:
    """Let a model say each of some tokens behind the one of ``before`` in its place, whatever else it has seen."""
    if weights.position_embedding is not None:
        weights.position_embedding.zero_()
    weights.token_embedding.copy_(_table(*weights.token_embedding.shape))
    _tell_head(weights, weights.token_embedding, before, says)


@torch.inference_mode()
def tell_predictor(weights: ModelWeights, size: Size, before: Sequence[int], says: Sequence[int]) -> None:
    """Do the same with a predictor of a model that was told, whatever the model gives."""
    assert weights.decoder and weights.decoder.entrance
    entrance, like = weights.decoder.entrance, weights.like
    entrance.embedding_norm.weight.fill_(1)
    halves = torch.eye(size.hidden, 2 * size.hidden, dtype=like.dtype, device=like.device)
    object.__setattr__(entrance, "projection", Linear(halves))
    _tell_head(weights, _table(size.vocab, size.hidden).to(like.device, like.dtype), before, says)


def _table(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _tell_head(weights: ModelWeights, table: Tensor, before: Sequence[int], says: Sequence[int]) -> None:
    assert weights.decoder and weights.decoder.final_norm
    for layer in weights.decoder.layers:
        for out in (layer.attention and layer.attention.out, layer.feed_forward and layer.feed_forward.out):
            assert out
            for numbers in (out.weight, out.bias):
                if numbers is not None:
                    numbers.zero_()
    weights.decoder.final_norm.weight.fill_(1)
    head = torch.zeros_like(table)
    head[torch.tensor(says, device=table.device)] = table[torch.tensor(before[: len(says)], device=table.device)]
    object.__setattr__(weights, "head", Linear(head.to(weights.like.dtype)))


def measure(engine: Engine, arguments: SpeculationArguments, text: Text, rows: int) -> Row:
    """Run both sides by turns; the first run of each does not count."""
    request = tensors_of([Ask(text.prompt, len(text.output))] * rows, engine.config.vocab_size)
    sides = {
        drafts: engine.parse(request | {"max_speculative_tokens": np.full((rows, 1), -drafts, np.int32)})
        for drafts in (False, True)
    }
    rates: dict[bool, list[float]] = {False: [], True: []}
    busy_s: dict[bool, list[float]] = {False: [], True: []}
    before = engine.metrics.draft_tokens, engine.metrics.accepted_tokens
    for _ in range(arguments.repeats + 1):
        for drafts, parsed in sides.items():
            start, begun_s = time.perf_counter(), time.process_time()
            (answer,) = engine.generate([parsed])
            rates[drafts].append(rows * len(text.output) / (time.perf_counter() - start))
            busy_s[drafts].append(time.process_time() - begun_s)
            said = answer["output_ids"][:, 0, len(text.prompt) :]
            assert (said == np.array(text.output)).all(), "the model says what it was told"
    turns = list(zip(rates[False], rates[True], strict=True))[1:]
    drafted = engine.metrics.draft_tokens - before[0]
    accepted = (engine.metrics.accepted_tokens - before[1]) / max(1, drafted)
    plain, with_drafts = (statistics.median(rates[side][1:]) for side in (False, True))
    known = arguments.way, arguments.size or "demonstration", arguments.data_type, text.name
    ratio = statistics.median(after / first for first, after in turns)
    own = statistics.median(first / after for first, after in list(zip(busy_s[False], busy_s[True], strict=True))[1:])
    return Row(*known, rows, len(text.output), plain, with_drafts, accepted, ratio, own)


def main(argv: Sequence[str]) -> None:
    """Measure every text for every number of rows."""
    arguments = SpeculationArguments.from_argv(argv, description=__doc__)
    table = Table(arguments.csv, arguments.commit)
    size = find_size(arguments.size) if arguments.size else _DEMONSTRATION
    for text in make_texts(arguments.tokens, size.vocab, arguments.way):
        with serving(arguments, text) as engine:
            for rows in arguments.rows:
                table.add(measure(engine, arguments, text, rows))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.engine.speculation"))
