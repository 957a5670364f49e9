"""Compare what the engine serves under load with transformers, and a GPU with a CPU: tokens and log-probabilities.

    python3 -m benchmarks.gpu.truth                                  # every family, on the first GPU
    python3 -m benchmarks.gpu.truth --families='["mistral"]' --tensor-para-size=2
    python3 -m benchmarks.gpu.truth --device=cpu --requests=24       # a small form of it, without a GPU

A made-up model of each family is converted and served as any model is: requests of every kind (greedy, drawn, beams,
penalties, words, a grammar; half of them streamed) come in small bursts, and then all at once, when their beginnings
are known. Each generated token is compared with transformers' forward pass over the same text on the same device: the
log-probability of the token, for any kind of request; that a greedy token is the argmax (of what a grammar allows),
that a drawn one is among the top k, and that no bad word comes. In fp32 three ways of serving are tried: "served" with
chunks and prefix cache, "whole" without either, "tight" with a KV cache so small that rows are set back, and "drafts"
as served, with drafts for every row in every step: looked up, and then what the first answer had, some tokens wrong.

Where two experts are as good as equal to a router, rounding chooses. An answer that is beyond a limit is compared again
with transformers' model whose routers see their inputs changed by some 1e-6 of themselves: if one of these draws gives
its log-probabilities, within the same limits, the answer is "tied" and right.

In fp16, bf16 and int8 the oracle is transformers in fp32, with the matrices rounded in the same way for int8; the error
is the root mean square of the log-probabilities' differences beside that of transformers in the same format.

"as the CPU" are requests of which an engine on the device gives the tokens that one on the CPU gives, in fp32, with a
smaller model; greedy tokens and beams that are within rounding of each other count as equal.
A line of a Markdown table for each family and way; exit status 1 where a number is out of its limit.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.rows.prompt_lookup import PromptLookup
from backends.fastertransformer.engine.scheduling import speculation
from backends.fastertransformer.engine.scheduling.tuning import TUNING, Tuning
from backends.fastertransformer.engine.settings import Settings
from export_scripts.arguments import ConvertArguments
from handover.arguments import ScriptArguments
from handover.errors import SlipwayError, exit_status

from .truth_models import (
    FAMILIES,
    Shape,
    in_format,
    meant_by_fp8,
    model_type_of,
    rounded_to_int8,
    save_model,
    tokens_of_letters,
    with_rounded_cache,
    write_vocabulary,
)
from .truth_requests import LONGER_OUTPUTS, Ask, Told, draw_requests, serve, tokens_of

_FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp16 int8": torch.float16}
_FP8 = ("bf16 fp8", "bf16 fp8_block")  # the directories that convert makes of a hub directory
_CACHE = "bf16 fp8_cache"
_FORMATS |= dict.fromkeys((*_FP8, _CACHE), torch.bfloat16)
_DRAFTS = "drafts"  # as long as may be in every step, where the model can verify any
_WAYS: dict[str, dict[str, Any]] = {
    "served": {},
    "whole": {"prefill_chunk_tokens": 0, "has_prefix_cache": False},
    "tight": {},
    _DRAFTS: {"has_drafts": True},
}
_WITHOUT_LIMITS = Tuning(draft_row_cost=0.0, draft_row_cost_cpu=0.0, draft_step_cost=0.0, acceptance_prior=0.9)
_LARGE, _SMALL, _TINY = Shape(6, 1024, 32000, 300, 8192), Shape(3, 256, 2000, 96, 2048), Shape(2, 128, 600, 40, 512)
_ROOMY = 4 << 30  # bytes of KV cache
_FP32_LIMIT = 5e-3  # of a log-probability, and by how much a greedy token may be less likely than the argmax
_RATIO_LIMIT = 1.5  # of the error in another format to transformers' own
_SAMPLED_LIMIT = 0.03  # of requests that the CPU answers otherwise: a draw may fall at the edge of two tokens
_JITTERS = (1e-6, 3e-6, 1e-5) * 8  # of a router's inputs
_BURST = 8
_STATES = 12  # of rows that decode at once where memory is short
_CPU_THREADS = 4  # of each engine; several families are compared at a time


@dataclass(frozen=True)
class TruthArguments(ScriptArguments):
    """What is compared."""

    families: tuple[str, ...] = field(default=FAMILIES, metadata={"help": "JSON list"})
    formats: tuple[str, ...] = field(default=("fp32", *_FORMATS), metadata={"help": "JSON list"})
    requests: int = field(default=160, metadata={"help": "in each wave, in fp32; half as many in other formats"})
    tensor_para_size: int = field(default=1, metadata={"help": "GPUs, a process each"})
    device: str = field(default="cuda:0", metadata={"help": "of the engine and of transformers; cpu: tiny models"})
    jobs: int = field(default=3, metadata={"help": "families at a time"})

    @property
    def is_on_cpu(self) -> bool:
        """Whether there is no GPU."""
        return self.device == "cpu"


@dataclass
class Row:
    """A line of the table.

    Attributes:
        model: family.
        way: format and way of serving.
        requests: that were answered.
        failed: that were not, or whose stream went back on a token.
        tokens: that were compared.
        wrong: tokens that the model does not choose, beyond rounding: see the module.
        tied: requests that a router's near-tie decided.
        lost: how much less likely than the argmax a greedy token is at most.
        error: largest difference of a log-probability in fp32, of a beam's by token; else the root mean square.
        ratio: of that to transformers' own in the same format; NaN in fp32.
        as_cpu: requests that got the CPU's tokens, and of how many.
        preempted: rows that were set back.
        accepted: tokens of drafts that were right.
        seconds: that it took.
    """

    model: str
    way: str
    requests: int = 0
    failed: int = 0
    tokens: int = 0
    wrong: int = 0
    tied: int = 0
    lost: float = 0.0
    error: float = 0.0
    ratio: float = math.nan
    as_cpu: str = ""
    preempted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    is_right: bool = True

    def cells(self) -> str:
        """Write the line."""
        shown = []
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool):
                shown.append("" if value else "**WRONG**")
            elif isinstance(value, float):
                shown.append("" if math.isnan(value) else f"{value:.1f}" if each.name == "seconds" else f"{value:.2g}")
            else:
                shown.append(str(value))
        return "| " + " | ".join(shown) + " |\n"


class Oracle:
    """Transformers' model on a device.

    Args:
        model: in any format.
        device: where it computes.
    """

    def __init__(self, model: Any, device: str) -> None:
        self._model, self._device = model.to(device), device
        self._routers = [each for each in model.modules() if "router" in type(each).__name__.lower()]

    @property
    def variants(self) -> Iterator[Oracle]:
        """Models that are the same but for the choice of experts where two are as good as equal."""
        generator = torch.Generator(self._device)
        for place, jitter in enumerate(_JITTERS if self._routers else ()):

            def change(_: Any, inputs: tuple[Tensor, ...], jitter: float = jitter) -> tuple[Tensor, ...]:
                noise = torch.randn(inputs[0].shape, generator=generator, device=inputs[0].device)
                return (inputs[0] * (1 + jitter * noise), *inputs[1:])

            generator.manual_seed(place)
            hooks = [each.register_forward_pre_hook(change) for each in self._routers]
            try:
                yield self
            finally:
                for hook in hooks:
                    hook.remove()

    @torch.inference_mode()
    def score(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """Give the log-probabilities of all tokens in the place of each generated one, fp32 [n, V]."""
        if self._model.config.is_encoder_decoder:
            begun = [self._model.config.decoder_start_token_id, *tokens[:-1]]
            logits = self._model(input_ids=self._row(prompt), decoder_input_ids=self._row(begun)).logits[0]
        else:
            logits = self._model(self._row([*prompt, *tokens])).logits[0, len(prompt) - 1 : -1]
        return logits.float().log_softmax(-1)

    def _row(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], device=self._device)


def check_answer(row: Row, ask: Ask, told: Told, oracle: Oracle, allowed: Tensor) -> None:
    """Compare an answer in fp32 with the oracle, and note it in a row."""
    row.requests += 1
    if told.tensors is None or not told.is_consistent:
        row.failed += 1
        return
    found = _beside(row, ask, told.tensors, oracle, allowed)
    if not found.is_right:
        for variant in oracle.variants:
            other = _beside(row, ask, told.tensors, variant, allowed)
            if other.is_right:
                found = replace(other, tied=1)
                break
    for count in ("tokens", "wrong", "tied"):
        setattr(row, count, getattr(row, count) + getattr(found, count))
    row.lost, row.error = max(row.lost, found.lost), max(row.error, found.error)


def _beside(row: Row, ask: Ask, tensors: dict[str, Any], oracle: Oracle, allowed: Tensor) -> Row:
    """Compare an answer with a model's scores -> what it adds to a row."""
    found = Row(row.model, row.way)
    for beam in range(tensors["output_ids"].shape[1]):
        tokens = tokens_of(ask, tensors, beam)
        scores = oracle.score(ask.prompt, tokens)
        own = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0]
        found.tokens += len(tokens)
        if ask.kind == "beams":
            error = abs(float(own.sum()) - float(tensors["cum_log_probs"][0, beam])) / len(tokens)
        else:
            given = torch.from_numpy(tensors["output_raw_log_probs"][0, 0, : len(tokens)]).to(own.device)
            error = float((given - own).abs().max())
            found.wrong += _count_wrong(found, ask, tokens, scores, own, allowed)
        found.error = max(found.error, error)
    found.is_right = not found.wrong and found.error < _FP32_LIMIT
    return found


def _count_wrong(row: Row, ask: Ask, tokens: list[int], scores: Tensor, own: Tensor, allowed: Tensor) -> int:
    """Count tokens that the request cannot have from this model."""
    if ask.kind in ("greedy", "grammar"):
        best = scores.masked_fill(~allowed, -math.inf) if ask.kind == "grammar" else scores
        lost = best.amax(-1) - own
        row.lost = max(row.lost, float(lost.max()))
        return int((lost > _FP32_LIMIT).sum()) + sum(not allowed[token] for token in tokens if ask.kind == "grammar")
    if ask.kind == "drawn" and ask.top_k:
        least = scores.topk(ask.top_k).values[:, -1]
        return int((own < least - _FP32_LIMIT).sum())
    return len({*tokens} & {*ask.bad})


def opened(arguments: TruthArguments, shards: Path, name: str, way: str, kv_bytes: int = _ROOMY) -> Engine:
    """Open a family's shards on the device, in a format and a way of serving; "cpu": on the CPU."""
    data_type, _, how = way.partition(" ")
    more = {"model_type": model_type_of(name), "kv_cache_bytes": kv_bytes, "int8_mode": int("int8" in how)}
    more |= {"cpu_threads": _CPU_THREADS, "has_fp8_cache": way == _CACHE}
    settings = Settings(shards, arguments.tensor_para_size, 1, data_type, **more, **_WAYS.get(how, {}))
    return open_engine(settings, torch.device(arguments.device))


def tight(
    name: str, shards: Path, shape: Shape, count: int, seed: int, tensor_para_size: int = 1
) -> tuple[list[Ask], int]:
    """Draw requests that need little each, and give a KV cache, in bytes, with room for little more than the largest.

    So rows that grow take each other's pages.
    """
    config, longest = read_config(shards, model_type_of(name), tensor_para_size), shape.positions // 8
    chosen = draw_requests(shape, count * 3 // 4, seed, config.encoder is not None, LONGER_OUTPUTS, longest)
    most = max(ask.width * (len(ask.prompt) + max(LONGER_OUTPUTS) + 64) for ask in chosen)
    entry = 2 * config.kv_heads * config.size_per_head // tensor_para_size
    if config.decoder and config.decoder.latent:
        entry = config.decoder.latent.kv_width
    token_bytes, kind = config.num_layer * entry * 4, config.mamba or config.delta
    if not (kind and config.decoder):
        return chosen, most * token_bytes
    attending = sum("attention" in layer.blocks for layer in config.decoder.layers)
    states = _STATES * config.num_layer * 4 * (math.prod(kind.memory) + kind.channels * kind.conv_size)
    return chosen, 2 * max(most * token_bytes * attending // config.num_layer, states)  # states take a half at most


@contextmanager
def timed(row: Row) -> Iterator[Row]:
    """Note how long a row takes."""
    begin = time.monotonic()
    yield row
    row.seconds = time.monotonic() - begin
    sys.stderr.write(row.cells())  # the table comes when a family is done


def compare_fp32(arguments: TruthArguments, name: str, model: Any, shape: Shape, shards: Path) -> Iterator[Row]:
    """Serve in fp32 in each way."""
    oracle, allowed = Oracle(model, arguments.device), tokens_of_letters(shape.vocab).to(arguments.device)
    asks = draw_requests(shape, arguments.requests, 11, model.config.is_encoder_decoder)
    for way in [way for way in _WAYS if way != _DRAFTS or _has_drafts(arguments, name, shards)]:
        with timed(Row(name, f"fp32 {way}")) as row:
            chosen, kv_bytes = asks, _ROOMY
            if way == "tight":
                chosen, kv_bytes = tight(name, shards, shape, arguments.requests, 14, arguments.tensor_para_size)
            with (
                mock.patch.object(speculation, "TUNING", _WITHOUT_LIMITS if way == _DRAFTS else TUNING),
                closing(opened(arguments, shards, name, row.way, kv_bytes)) as engine,
            ):
                waves = list[list[Told]]()
                for seed, burst in enumerate((_BURST, 0)):
                    with drafted(chosen, waves[0]) if way == _DRAFTS and waves else nullcontext():
                        waves.append(serve(engine, chosen, burst, seed))
                row.preempted, row.accepted = engine.metrics.preemptions, engine.metrics.accepted_tokens
            pairs = [pair for told in waves for pair in zip(chosen, told, strict=True)]
            for pair in pairs:
                check_answer(row, *pair, oracle, allowed)
            row.is_right = not (row.failed or row.wrong) and row.error < _FP32_LIMIT
            row.is_right &= (row.accepted > 0) == (way == _DRAFTS)
        yield row


@contextmanager
def drafted(asks: list[Ask], told: list[Told]) -> Iterator[None]:
    """Draft what rows were answered before, but for each fifth token."""
    texts = {
        tuple(ask.prompt): tokens_of(ask, each.tensors) for ask, each in zip(asks, told, strict=True) if each.tensors
    }

    def draft(lookup: PromptLookup, most: int) -> list[int]:
        known = len(lookup.tokens) - lookup.begin
        found = texts.get(tuple(lookup.tokens[: lookup.begin]), [])[known : known + most]
        return [token ^ ((known + at) % 5 == 4) for at, token in enumerate(found)]

    with mock.patch.object(PromptLookup, "draft", draft):
        yield


def _has_drafts(arguments: TruthArguments, name: str, shards: Path) -> bool:
    """Return whether a family's drafts can be verified: no layer keeps a state, and on a GPU attention has no bias."""
    config = read_config(shards, model_type_of(name), arguments.tensor_para_size)
    has_bias = config.encoder is not None or config.positions in ("alibi", "relative")
    return not (config.keeps_states or (has_bias and not arguments.is_on_cpu))


def compare_format(arguments: TruthArguments, name: str, way: str, model: Any, shape: Shape, shards: Path) -> Row:
    """Serve in another format, and compare the errors of log-probabilities with transformers' own."""
    exact, ranks = model, 1 if arguments.is_on_cpu else arguments.tensor_para_size  # a CPU's are one process
    if way in _FP8:
        shards = made_fp8(way.partition(" ")[2], shape, shards.parent)
        exact = meant_by_fp8(shards, shards.parent / "meant")
    if "int8" in way:
        exact = rounded_to_int8(model, ranks)
    oracle = Oracle(exact, arguments.device)
    asks = draw_requests(shape, arguments.requests // 2, 12, model.config.is_encoder_decoder)
    asks = [ask for ask in asks if ask.kind != "beams"]
    with timed(Row(name, way)) as row:
        with closing(opened(arguments, shards, name, way)) as engine:
            told = serve(engine, asks, _BURST, 3)
        theirs_in = in_format(exact, _FORMATS[way], shards.parent / "rounded")
        rounded = Oracle(with_rounded_cache(theirs_in) if way == _CACHE else theirs_in, arguments.device)
        ours, theirs = list[float](), list[float]()
        for ask, answer in zip(asks, told, strict=True):
            row.requests += 1
            if answer.tensors is None or not answer.is_consistent:
                row.failed += 1
                continue
            tokens = tokens_of(ask, answer.tensors)
            row.tokens += len(tokens)
            places = torch.tensor(tokens, device=arguments.device)[:, None]
            own, other = (each.score(ask.prompt, tokens).gather(1, places)[:, 0] for each in (oracle, rounded))
            given = torch.from_numpy(answer.tensors["output_raw_log_probs"][0, 0, : len(tokens)]).to(own.device)
            ours += (given - own).tolist()
            theirs += (other - own).tolist()
            row.wrong += len({*tokens} & {*ask.bad})
        row.error = float(np.sqrt(np.mean(np.square(ours))))
        row.ratio = row.error / float(np.sqrt(np.mean(np.square(theirs))))
        row.is_right = not (row.failed or row.wrong) and row.ratio < _RATIO_LIMIT
    return row


def compare_devices(arguments: TruthArguments, name: str, directory: Path) -> Iterator[Row]:
    """Ask an engine on the CPU and one on the device the same, with room and without."""
    shape = _SMALL
    model, shards = made(name, shape, directory, 1)
    oracle = Oracle(model, "cpu")
    asks, kv_bytes = tight(name, shards, shape, arguments.requests, 13)
    alone = TruthArguments(device="cpu")
    with closing(opened(alone, shards, name, "fp32 served", 1 << 30)) as engine:
        expected = serve(engine, asks, _BURST, 5)
    one = TruthArguments(device=arguments.device)
    for label, size in (("fp32 as the CPU", _ROOMY), ("fp32 as the CPU, tight", kv_bytes)):
        with timed(Row(name, label)) as row:
            with closing(opened(one, shards, name, "fp32 served", size)) as engine:
                told = serve(engine, asks, _BURST, 6)
                row.preempted = engine.metrics.preemptions
            same = 0
            for ask, ours, theirs in zip(asks, told, expected, strict=True):
                row.requests += 1
                row.failed += ours.tensors is None or theirs.tensors is None or not ours.is_consistent
                same += _are_same(row, ask, ours, theirs, oracle)
            row.as_cpu = f"{same} of {len(asks)}"
            row.is_right = not (row.failed or row.wrong) and same >= (1 - _SAMPLED_LIMIT) * len(asks)
        yield row


def _are_same(row: Row, ask: Ask, ours: Told, theirs: Told, oracle: Oracle) -> bool:
    """Say whether two answers have the same tokens; of greedy ones, that either may be chosen where they part."""
    if ours.tensors is None or theirs.tensors is None:
        return False
    for beam in range(ours.tensors["output_ids"].shape[1]):
        mine, other = (tokens_of(ask, each.tensors or {}, beam) for each in (ours, theirs))
        row.tokens += len(mine)
        if mine == other:
            continue
        if ask.kind == "beams":
            scores = [(each.tensors or {})["cum_log_probs"][0] for each in (ours, theirs)]
            return float(np.abs(scores[0] - scores[1]).max()) < _FP32_LIMIT
        if ask.kind != "greedy":
            return False
        place = next(at for at, pair in enumerate(zip(mine, other, strict=True)) if len({*pair}) == 2)
        chances = oracle.score(ask.prompt, mine[: place + 1])[-1]
        lost = float(chances.max() - torch.minimum(chances[mine[place]], chances[other[place]]))
        row.lost = max(row.lost, lost)
        row.wrong += lost > _FP32_LIMIT
    return True


def made(name: str, shape: Shape, directory: Path, tensor_para_size: int) -> tuple[Any, Path]:
    """Make a family's model and convert it to what is served by default -> transformers' model, shards or directory."""
    from export_scripts.checkpoints.formats import find_archive, open_source
    from export_scripts.convert import convert

    model = save_model(name, shape, directory / "hub")
    source = open_source(find_archive(directory / "hub"), for_shards=False)
    if source.family.beyond(source.dims):  # FasterTransformer's shards cannot say what it is
        served = directory / "huggingface"
        convert(ConvertArguments(directory / "hub", served, 1, "fp32", format="huggingface"))
    else:
        served = directory / f"{tensor_para_size}-gpu"
        convert(ConvertArguments(directory / "hub", served, tensor_para_size, "fp32"))
    write_vocabulary(shape.vocab, served)
    return model, served


def _formats_of(arguments: TruthArguments, name: str, shards: Path) -> list[str]:
    """List the formats that a family is served in: experts are not quantized when they are loaded, nor are arrays."""
    config = read_config(shards, model_type_of(name), arguments.tensor_para_size)
    has_arrays = bool(config.decoder and config.decoder.mixture and config.decoder.mixture.is_in_arrays)
    is_hub, has_latent = model_type_of(name) == "Llama", bool(config.decoder and config.decoder.latent)
    lacking = ("fp16 int8",) * config.has_experts + _FP8 * (has_arrays or not is_hub)
    lacking += (_CACHE,) * (has_latent or not is_hub)
    return [way for way in _FORMATS if way in arguments.formats and way not in lacking]


def made_fp8(quantization: str, shape: Shape, directory: Path) -> Path:
    """Quantize the model of a directory -> what is served."""
    from export_scripts.convert import convert

    served = directory / quantization / "served"
    given = {"format": "huggingface", "quantization": quantization}
    convert(ConvertArguments(directory / "hub", served, 1, "fp32", **given))
    write_vocabulary(shape.vocab, served)
    return served


def compare(arguments: TruthArguments, name: str) -> list[Row]:
    """Compare one family in all ways."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    shape, rows = _TINY if arguments.is_on_cpu else _LARGE, list[Row]()
    try:
        with tempfile.TemporaryDirectory(prefix="slipway-truth-") as temporary:
            model, shards = made(name, shape, Path(temporary), arguments.tensor_para_size)
            if "fp32" in arguments.formats:
                rows += compare_fp32(arguments, name, model, shape, shards)
            for way in _formats_of(arguments, name, shards):
                rows.append(compare_format(arguments, name, way, model, shape, shards))
        if "fp32" in arguments.formats and arguments.tensor_para_size == 1 and not arguments.is_on_cpu:
            with tempfile.TemporaryDirectory(prefix="slipway-truth-") as temporary:
                rows += compare_devices(arguments, name, Path(temporary))
    except Exception as error:
        rows.append(Row(name, f"failed: {error}"[:300], is_right=False))
    return rows


def main(argv: Sequence[str]) -> None:
    """Compare all; a difference is an error."""
    arguments = TruthArguments.from_argv(argv, description=__doc__)
    names = [each.name for each in fields(Row)]
    sys.stdout.write(f"| {' | '.join([*names[:-1], ''])} |\n|{' --- |' * len(names)}\n")
    wrong = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        for rows in pool.map(compare, [arguments] * len(arguments.families), arguments.families):
            for row in rows:
                sys.stdout.write(row.cells())
                wrong += not row.is_right
            sys.stdout.flush()
    if wrong:
        raise SlipwayError(f"{wrong} rows are not what transformers gives", "see the lines above")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu.truth"))
