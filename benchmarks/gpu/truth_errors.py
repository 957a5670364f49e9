"""Compare what the engine serves in another format than fp32 with transformers: for benchmarks.gpu.truth."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.fastertransformer.engine.model.families import read_config

from .truth_adapters import oracles_of, with_adapters
from .truth_answers import Oracle, Row, timed
from .truth_families import Shape, model_type_of
from .truth_formats import CACHE, FORMATS, STATIC, formats_of, in_format, in_other_format
from .truth_fp32 import continuing, drafted, drafting
from .truth_requests import draw_requests, serve, tokens_of
from .truth_served import BURST, ROOMY, TruthArguments, opened, served_in, tight
from .truth_ways import DRAFTS, WAYS, Way, is_tried

_RATIO_LIMIT = 1.5  # of the error in another format to transformers' own
# Of that to what no rounding does, 1.0. A number at the edge of two may become either, and then others behind it do:
# transformers' own, with embeddings changed by 1e-6 of themselves, is 0.64 (Gemma 2) and 0.67 (Granite) from itself.
_STATIC_LIMIT = 0.8


def named_by(label: str) -> tuple[str, Way]:
    """Return the format and the way of serving that a name has: without one, "served"."""
    format, _, way = label.rpartition(" ")
    return (format, WAYS[way]) if way in WAYS else (label, WAYS["served"])


def tried_formats(arguments: TruthArguments, name: str, shards: Path) -> list[str]:
    """List the formats, and ways of serving in them, that a family is compared in."""
    ranks = arguments.tensor_para_size
    config, has = read_config(shards, model_type_of(name), ranks), formats_of(name, shards, ranks)
    found = []
    for label in arguments.formats:
        format, way = named_by(label)
        if format in has and is_tried(name, config, way, arguments.is_on_cpu):
            found.append(label)
    return found


def compare_format(arguments: TruthArguments, name: str, label: str, model: Any, shape: Shape, shards: Path) -> Row:
    """Serve in another format, and compare the errors of log-probabilities with transformers' own."""
    with tempfile.TemporaryDirectory(dir=shards.parent) as folder:
        return _compare(arguments, name, label, model, shape, shards, Path(folder))


def _compare(
    arguments: TruthArguments, name: str, label: str, model: Any, shape: Shape, shards: Path, folder: Path
) -> Row:
    (format, way), device = named_by(label), arguments.device
    ranks = 1 if arguments.is_on_cpu else arguments.tensor_para_size  # a CPU's are one process
    meant = in_other_format(format, model, shape, shards, ranks, folder)
    served, kv_bytes = served_in(way, meant.served), ROOMY
    asks = draw_requests(shape, arguments.requests // 2, 12, model.config.is_encoder_decoder)
    if way.is_tight:
        number = 1.1 if format == CACHE else 2.0
        asks, kv_bytes = tight(name, shards, shape, arguments.requests, 12, way.drafts, ranks, number, width=1)
    asks = [ask for ask in asks if ask.kind != "beams"]
    asks = with_adapters(asks, 0) if way.adapts else asks
    with ExitStack() as stack, timed(Row(name, label)) as row:
        with (
            drafting(way.drafts),
            continuing(way) as continued,
            closing(opened(arguments, served, name, format, way, kv_bytes)) as engine,
        ):
            waves = [serve(engine, asks, BURST, 3)]
            if way.drafts == DRAFTS:
                with drafted(asks, waves[0]):
                    waves.append(serve(engine, asks, 0, 4))
            row.preempted, row.accepted = engine.metrics.preemptions, engine.metrics.accepted_tokens
        rounded = meant.loaded(in_format(meant.exact, FORMATS[format], folder / "rounded"))
        oracles = [{"": Oracle(each, device)} for each in (meant.exact, rounded)]
        if way.adapts:
            pairs = (meant.exact, torch.float32), (rounded, FORMATS[format])
            oracles = [stack.enter_context(oracles_of(each, served, device, dtype)) for each, dtype in pairs]
        ours, theirs = list[float](), list[float]()
        for ask, answer in chain.from_iterable(zip(asks, wave, strict=True) for wave in waves):
            row.requests += 1
            if answer.tensors is None or not answer.is_consistent:
                row.failed += 1
                continue
            tokens = tokens_of(ask, answer.tensors)
            row.tokens += len(tokens)
            places = torch.tensor(tokens, device=device)[:, None]
            own, other = (both[ask.adapter].score(ask.prompt, tokens).gather(1, places)[:, 0] for both in oracles)
            given = torch.from_numpy(answer.tensors["output_raw_log_probs"][0, 0, : len(tokens)]).to(own.device)
            ours += (given - own).tolist()
            theirs += (other - own).tolist()
            row.wrong += len({*tokens} & {*ask.bad})
        row.error = float(np.sqrt(np.mean(np.square(ours))))
        row.ratio = row.error / float(np.sqrt(np.mean(np.square(theirs))))
        limit = _STATIC_LIMIT if format == STATIC[0] else _RATIO_LIMIT
        row.is_right = not (row.failed or row.wrong) and row.ratio < limit
        row.is_right &= (row.accepted > 0) == bool(way.drafts) and bool(continued) == way.continues
    return row
