"""Time generation against transformers' generate() on the same weights, threads and inputs, in alternation.

    python3 -m benchmarks.engine.generate                        # GPT-2's shape, 124M, on the CPU in fp32
    python3 -m benchmarks.engine.generate --model=llama          # the shape of a Llama of 160M (JackFram/llama-160m)
    python3 -m benchmarks.engine.generate --model=qwen3_moe      # 48 experts of which a token uses 8, 0.46B
    python3 -m benchmarks.engine.generate --data-type=bf16       # where the processor multiplies bf16
    python3 -m benchmarks.engine.generate --layers=4 --repeats=1

The model is made up, with random weights, and saved by transformers; a GPT-2 or a Llama is converted by
export_scripts.convert, a mixture is served from the directory. Both sides decode greedily and never stop early, and
their tokens are compared. The mixed case has requests of different input and output lengths: generate() takes them as
one padded batch and goes on until the longest is done, the engine takes them one by one while others are under way.
Only tokens that were asked for count.

Rates and the first ratio are of wall-clock time. The second ratio is of the processor time of both sides, which other
processes change less; compare it with ``--threads=1``, for threads that wait for each other spend processor time too.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.model.precision import TORCH_TYPES
from backends.fastertransformer.engine.settings import Settings
from export_scripts.arguments import ConvertArguments
from handover.arguments import ScriptArguments
from handover.errors import ConfigError, exit_status

_HEAD_SIZE = 64
_POSITIONS = 1024
_END_IDS = ("bos_token_id", "eos_token_id")
_VOCABULARIES = {"gpt2": 50257, "llama": 32000, "qwen3_moe": 32000}


@dataclass(frozen=True)
class BenchmarkArguments(ScriptArguments):
    """The model's shape and what is asked of it."""

    model: str = field(default="gpt2", metadata={"help": "gpt2, llama or qwen3_moe"})
    layers: int = field(default=12, metadata={"help": "transformer blocks"})
    hidden: int = field(default=768, metadata={"help": "width; heads are 64 wide"})
    kv_heads: int = field(default=0, metadata={"help": "heads of keys and values, but of gpt2; 0: as many as queries"})
    vocab: int = field(default=0, metadata={"help": "rows of the embedding; 0: 50257 of gpt2, 32000 of llama"})
    input_length: int = field(default=60, metadata={"help": "tokens of every input; mixed: at most twice that"})
    output_length: int = field(default=40, metadata={"help": "tokens of every output; mixed: at most twice that"})
    threads: int = field(default=2, metadata={"help": "of torch, on both sides"})
    repeats: int = field(default=3, metadata={"help": "measurements of each side; the median counts"})
    data_type: str = field(default="fp32", metadata={"help": "fp32 or bf16, on both sides"})
    int8_mode: int = field(default=0, metadata={"help": "of the engine"})

    def __post_init__(self) -> None:
        if self.model not in _VOCABULARIES:
            raise ConfigError(f"model is {self.model!r}; legal are {', '.join(_VOCABULARIES)}", "pass --model=llama")
        object.__setattr__(self, "vocab", self.vocab or _VOCABULARIES[self.model])


@dataclass(frozen=True)
class Ask:
    """One request: input tokens, and how many to generate."""

    prompt: list[int]
    count: int


def make_cases(arguments: BenchmarkArguments, batches: Sequence[int] = (1, 8, 32)) -> dict[str, list[Ask]]:
    """Draw the requests of every case; the same every time."""
    draw = random.Random(1234)

    def ask(input_length: int, output_length: int) -> Ask:
        return Ask([draw.randrange(arguments.vocab) for _ in range(input_length)], output_length)

    longest_in, longest_out = 2 * arguments.input_length, 2 * arguments.output_length
    cases = {
        f"batch {batch}": [ask(arguments.input_length, arguments.output_length) for _ in range(batch)]
        for batch in batches
    }
    mixed = [(draw.randint(4, longest_in), draw.randint(4, longest_out)) for _ in range(32)]
    return {**cases, "32 mixed": [ask(*lengths) for lengths in mixed]}


def save_model(arguments: BenchmarkArguments, directory: Path) -> Any:
    """Make a model with random weights, save it, and return it."""
    torch.manual_seed(0)
    make = {"gpt2": _make_gpt2, "llama": _make_llama, "qwen3_moe": _make_qwen3_moe}[arguments.model]
    model = make(arguments, {"initializer_range": 0.1, **dict.fromkeys(_END_IDS, arguments.vocab - 1)})
    model = model.eval().to(TORCH_TYPES[arguments.data_type])
    model.save_pretrained(directory)
    return model


def _make_gpt2(arguments: BenchmarkArguments, common: dict[str, Any]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=arguments.vocab,
        n_positions=_POSITIONS,
        n_embd=arguments.hidden,
        n_layer=arguments.layers,
        n_head=arguments.hidden // _HEAD_SIZE,
        **common,
    )
    return GPT2LMHeadModel(config)


def _make_llama(arguments: BenchmarkArguments, common: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_sizes(arguments), intermediate_size=4 * arguments.hidden, **common)
    return LlamaForCausalLM(config)


def _make_qwen3_moe(arguments: BenchmarkArguments, common: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 48, "num_experts_per_tok": 8, "moe_intermediate_size": 3 * arguments.hidden // 8}
    config = Qwen3MoeConfig(**_sizes(arguments), **experts, head_dim=_HEAD_SIZE, norm_topk_prob=True, **common)
    return Qwen3MoeForCausalLM(config)


def _sizes(arguments: BenchmarkArguments) -> dict[str, Any]:
    heads = arguments.hidden // _HEAD_SIZE
    return {
        "vocab_size": arguments.vocab,
        "max_position_embeddings": _POSITIONS,
        "hidden_size": arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": arguments.kv_heads or heads,
    }


def generate_by_transformers(model: Any, asks: Sequence[Ask], **options: Any) -> list[list[int]]:
    """Give every request's tokens: one batch, padded on the left, as its guide says; options go to generate()."""
    width, count = max(len(ask.prompt) for ask in asks), max(ask.count for ask in asks)
    ids = torch.zeros(len(asks), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, ask in enumerate(asks):
        ids[row, width - len(ask.prompt) :] = torch.tensor(ask.prompt)
        mask[row, width - len(ask.prompt) :] = 1
    how = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0, **options}
    with torch.inference_mode():
        out = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **how)
    return [line[width : width + ask.count].tolist() for line, ask in zip(out, asks, strict=True)]


def tensors_of(asks: Sequence[Ask], vocab: int) -> dict[str, np.ndarray[Any, Any]]:
    """Build one request of a row for each, as a client sends it; no token ends it."""
    ids = np.zeros((len(asks), max(len(ask.prompt) for ask in asks)), np.uint32)
    for row, ask in enumerate(asks):
        ids[row, : len(ask.prompt)] = ask.prompt
    return {
        "input_ids": ids,
        "input_lengths": np.array([[len(ask.prompt)] for ask in asks], np.uint32),
        "request_output_len": np.array([[ask.count] for ask in asks], np.uint32),
        "end_id": np.full((len(asks), 1), vocab, np.uint32),  # never comes
    }


def generate_by_engine(engine: Engine, asks: Sequence[Ask]) -> list[list[int]]:
    """Give every request's tokens; each is a request of its own."""
    answers = engine.generate(engine.parse(tensors_of([ask], engine.config.vocab_size)) for ask in asks)
    return [answer["output_ids"][0, 0, len(ask.prompt) :].tolist() for answer, ask in zip(answers, asks, strict=True)]


class EngineProcess:
    """An engine in a process of its own.

    Args:
        settings: of its model.

    Attributes:
        description: what runs.
    """

    _engine: Engine  # there

    def __init__(self, settings: Settings) -> None:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as model.py does; this process has read its own long ago
        spawn = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, spawn, EngineProcess._open, (settings,))
        self.description = self._process.submit(EngineProcess._describe).result()

    def generate(self, asks: Sequence[Ask]) -> list[list[int]]:
        """See generate_by_engine."""
        return self._process.submit(EngineProcess._generate, asks).result()

    def close(self) -> None:
        """End the process."""
        self._process.submit(EngineProcess._close).result()
        self._process.shutdown()

    def processor_s(self) -> float:
        """Give the processor time that the process has spent, in seconds."""
        return self._process.submit(time.process_time).result()

    @classmethod
    def _open(cls, settings: Settings) -> None:
        cls._engine = open_engine(settings, torch.device("cpu"))

    @classmethod
    def _describe(cls) -> str:
        return cls._engine.description

    @classmethod
    def _generate(cls, asks: Sequence[Ask]) -> list[list[int]]:
        return generate_by_engine(cls._engine, asks)

    @classmethod
    def _close(cls) -> None:
        cls._engine.close()


class Side(NamedTuple):
    """What is timed.

    Attributes:
        run: generates once.
        processor_s: gives the processor time that was spent so far, in seconds.
    """

    run: Callable[[], object]
    processor_s: Callable[[], float]


def time_both(sides: Sequence[Side], repeats: int) -> list[tuple[float, float]]:
    """Give the median seconds and processor seconds of each side, in alternation behind a round that does not count."""
    seconds: list[list[tuple[float, float]]] = [[] for _ in sides]
    for round_number in range(repeats + 1):
        for side, times in zip(sides, seconds, strict=True):
            start, spent = time.perf_counter(), side.processor_s()
            side.run()
            if round_number:
                times.append((time.perf_counter() - start, side.processor_s() - spent))
    return [
        (statistics.median(wall), statistics.median(spent))
        for wall, spent in (zip(*each, strict=True) for each in seconds)
    ]


def main(argv: Sequence[str]) -> None:
    """Print a table, and how many rows' tokens differ.

    None, unless int8 is on, bf16 rounds otherwise, or two tokens are as probable within fp32's rounding: a row of the
    Llama has logits 5e-5 apart in fp64, of 11.4.
    """
    arguments = BenchmarkArguments.from_argv(argv, description=__doc__)
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(prefix="slipway-generate-") as temporary:
        place = Path(temporary)
        model = save_model(arguments, place / "model")
        from export_scripts.convert import convert  # it needs yaml, which those who only take Ask may lack

        is_mixture, model_type = arguments.model == "qwen3_moe", "GPT" if arguments.model == "gpt2" else "Llama"
        if not is_mixture:
            convert(ConvertArguments(place / "model", place / "1-gpu", 1, arguments.data_type))
        # Every case is sent several times: the prefix cache would answer the later ones in part.
        ways = {"int8_mode": arguments.int8_mode, "has_prefix_cache": False}
        served = place / ("model" if is_mixture else "1-gpu")
        settings = Settings(served, 1, 1, arguments.data_type, arguments.threads, model_type, **ways)
        engine = EngineProcess(settings)
    titles = f"{'case':10} {'generate()':>12} {'engine':>12} ratio  of processor time  (output tokens/s)"
    sys.stdout.write(f"{engine.description}\n{titles}\n")
    differing = 0
    for name, asks in make_cases(arguments).items():
        theirs, ours = generate_by_transformers(model, asks), engine.generate(asks)
        differing += sum(one != other for one, other in zip(theirs, ours, strict=True))
        their_side = Side(partial(generate_by_transformers, model, asks), time.process_time)
        (their_s, their_spent), (our_s, our_spent) = time_both(
            (their_side, Side(partial(engine.generate, asks), engine.processor_s)), arguments.repeats
        )
        tokens = sum(ask.count for ask in asks)
        ratios = f"{their_s / our_s:5.2f} {their_spent / our_spent:18.2f}"
        sys.stdout.write(f"{name:10} {tokens / their_s:12.1f} {tokens / our_s:12.1f} {ratios}\n")
        sys.stdout.flush()
    engine.close()
    sys.stdout.write(f"rows whose tokens differ: {differing}\n")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.engine.generate"))
