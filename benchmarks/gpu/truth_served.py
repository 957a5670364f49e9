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

from .truth_adapters import ADAPTED, PLACES, write_adapters
from .truth_formats import AT_LOAD, CACHE, FORMATS
from .truth_models import FAMILIES, HEAD, Shape, model_type_of, save_model, write_vocabulary
from .truth_predictors import HEADED
from .truth_requests import LONGER_OUTPUTS, Ask, draw_requests

DRAFTING = DRAFTS, DRAFT_MODEL, MTP, EAGLE = "drafts", "draft_model", "mtp", "eagle3"  # where any are verified
ADAPTING = ADAPTERS, ADAPTERS_TIGHT = "adapters", "adapters_tight"
WAYS: dict[str, dict[str, Any]] = {
    "served": {},
    "whole": {"prefill_chunk_tokens": 0, "has_prefix_cache": False},
    "tight": {},
    DRAFTS: {"speculation": "ngram"},
    DRAFT_MODEL: {"speculation": "draft"},
    MTP: {"speculation": MTP},
    EAGLE: {"speculation": EAGLE},
    ADAPTERS: {"max_adapters": PLACES},
    ADAPTERS_TIGHT: {"max_adapters": PLACES},
}
AS_CPU = "as the CPU"
LARGE, SMALL, TINY = Shape(6, 1024, 32000, 300, 8192), Shape(3, 256, 2000, 96, 2048), Shape(2, 128, 600, 40, 512)
ROOMY = 4 << 30  # bytes of KV cache
_STATES = 12  # of rows that decode at once where memory is short
_CPU_THREADS = 4  # of each engine; several families are compared at a time


@dataclass(frozen=True)
class TruthArguments(ScriptArguments):
    """What is compared."""

    families: tuple[str, ...] = field(default=FAMILIES, metadata={"help": "JSON list"})
    formats: tuple[str, ...] = field(default=("fp32", *FORMATS), metadata={"help": "JSON list"})
    ways: tuple[str, ...] = field(default=(*WAYS, AS_CPU), metadata={"help": "of serving in fp32, JSON list"})
    requests: int = field(default=160, metadata={"help": "in each wave, in fp32; half as many in other formats"})
    tensor_para_size: int = field(default=1, metadata={"help": "GPUs, a process each"})
    device: str = field(default="cuda:0", metadata={"help": "of the engine and of transformers; cpu: tiny models"})
    jobs: int = field(default=3, metadata={"help": "at a time on each GPU, of which a family has one or two"})
    gpus: int = field(default=1, metadata={"help": "that share the families, of those that are visible"})

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


def is_tried(arguments: TruthArguments, name: str, shards: Path, way: str) -> bool:
    """Return whether a family is served in a way.

    Drafts can be verified, but on a GPU where attention has a bias. A directory's model drafts for itself, unless its
    layers keep states; where it has one, its predictor or head does.
    """
    if way not in DRAFTING:
        return way not in ADAPTING or name in ADAPTED
    config = read_config(shards, model_type_of(name), arguments.tensor_para_size)
    has_bias = config.encoder is not None or config.positions in ("alibi", "relative")
    if has_bias and not arguments.is_on_cpu:
        return False
    has_own = {
        DRAFTS: True,
        DRAFT_MODEL: config.decoder is not None and not config.keeps_states,
        MTP: config.decoder is not None and config.decoder.predictor_num > 0,
        EAGLE: name.endswith(HEADED),
    }
    return has_own[way]


def served_in(way: str, shards: Path) -> Path:
    """Return what is opened in a way: the shards, or links to them with what drafts, or with adapters."""
    drafting = {DRAFT_MODEL: "hub", EAGLE: HEAD}.get(way)
    if not drafting and way not in ADAPTING:
        return shards
    served = shards.parent / "ways" / way
    served.mkdir(parents=True)
    for path in shards.iterdir():
        (served / path.name).symlink_to(path)
    if drafting:
        (served / DRAFT).symlink_to(shards.parent / drafting)
    else:
        write_adapters(served)
    return served


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
