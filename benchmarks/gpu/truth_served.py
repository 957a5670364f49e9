"""Made-up models as they are served: converted, and opened in a format and a way, for benchmarks.gpu.truth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.settings import Settings
from export_scripts.arguments import ConvertArguments
from ft_format.location import DRAFT
from handover.arguments import ScriptArguments

from .truth_formats import AT_LOAD, CACHE, FORMATS
from .truth_models import FAMILIES, HEAD, Shape, model_type_of, save_model, write_vocabulary
from .truth_predictors import HEADED
from .truth_requests import LONGER_OUTPUTS, Ask, draw_requests

DRAFTING = DRAFTS, DRAFT_MODEL, MTP, EAGLE = "drafts", "draft_model", "mtp", "eagle3"  # where any are verified
WAYS: dict[str, dict[str, Any]] = {
    "served": {},
    "whole": {"prefill_chunk_tokens": 0, "has_prefix_cache": False},
    "tight": {},
    DRAFTS: {"speculation": "ngram"},
    DRAFT_MODEL: {"speculation": "draft"},
    MTP: {"speculation": MTP},
    EAGLE: {"speculation": EAGLE},
}
LARGE, SMALL, TINY = Shape(6, 1024, 32000, 300, 8192), Shape(3, 256, 2000, 96, 2048), Shape(2, 128, 600, 40, 512)
ROOMY = 4 << 30  # bytes of KV cache
_STATES = 12  # of rows that decode at once where memory is short
_CPU_THREADS = 4  # of each engine; several families are compared at a time


@dataclass(frozen=True)
class TruthArguments(ScriptArguments):
    """What is compared."""

    families: tuple[str, ...] = field(default=FAMILIES, metadata={"help": "JSON list"})
    formats: tuple[str, ...] = field(default=("fp32", *FORMATS), metadata={"help": "JSON list"})
    requests: int = field(default=160, metadata={"help": "in each wave, in fp32; half as many in other formats"})
    tensor_para_size: int = field(default=1, metadata={"help": "GPUs, a process each"})
    device: str = field(default="cuda:0", metadata={"help": "of the engine and of transformers; cpu: tiny models"})
    jobs: int = field(default=3, metadata={"help": "families at a time"})

    @property
    def is_on_cpu(self) -> bool:
        """Whether there is no GPU."""
        return self.device == "cpu"


def opened(arguments: TruthArguments, shards: Path, name: str, way: str, kv_bytes: int = ROOMY) -> Engine:
    """Open a family's shards on the device, in a format and a way of serving; "cpu": on the CPU."""
    data_type, _, how = way.partition(" ")
    more = {"model_type": model_type_of(name), "kv_cache_bytes": kv_bytes, "int8_mode": int("int8" in how)}
    more |= {"cpu_threads": _CPU_THREADS, "has_fp8_cache": way == CACHE}
    more |= {"quantization": "fp8" if way == AT_LOAD else None}
    settings = Settings(shards, arguments.tensor_para_size, 1, data_type, **more, **WAYS.get(how, {}))
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


def has_drafts(arguments: TruthArguments, name: str, shards: Path, way: str) -> bool:
    """Return whether a family's drafts can be verified: on a GPU its attention has no bias.

    A directory's model drafts for itself, unless its layers keep states; where it has one, its predictor or head does.
    """
    config = read_config(shards, model_type_of(name), arguments.tensor_para_size)
    has_bias = config.encoder is not None or config.positions in ("alibi", "relative")
    is_whole = config.decoder is not None or way == DRAFTS
    if way == MTP and not (config.decoder and config.decoder.predictor_num):
        return False
    if way == DRAFT_MODEL and config.keeps_states:
        return False
    if way == EAGLE and not name.endswith(HEADED):
        return False
    return is_whole and not (has_bias and not arguments.is_on_cpu)


def put_beside(way: str, shards: Path) -> None:
    """Link what drafts to where the engine looks for it: the model itself, or its EAGLE-3 head."""
    if (found := {DRAFT_MODEL: "hub", EAGLE: HEAD}.get(way)) is not None:
        (shards / DRAFT).unlink(missing_ok=True)
        (shards / DRAFT).symlink_to(shards.parent / found)


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
