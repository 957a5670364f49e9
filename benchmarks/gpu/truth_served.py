"""Made-up models as they are served: converted, and opened in a format and a way, for benchmarks.gpu.truth."""

from __future__ import annotations

import math
import tempfile
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

from .truth_adapters import write_adapters
from .truth_families import FAMILIES, Shape, model_type_of
from .truth_formats import AT_LOAD, CACHE, COMBINED, FORMATS
from .truth_models import HEAD, save_model, write_vocabulary
from .truth_requests import LONGER_OUTPUTS, Ask, draw_requests
from .truth_ways import DRAFT_MODEL, EAGLE, MTP, WAYS, Way

AS_CPU = "as the CPU"
LARGE, SMALL, TINY = Shape(6, 1024, 32000, 300, 8192), Shape(3, 256, 2000, 96, 2048), Shape(2, 128, 600, 40, 512)
ROOMY = 4 << 30  # bytes of KV cache
BURST = 8  # requests of the first wave that are sent at once
_STATES = 12  # of rows that decode at once where memory is short
_CPU_THREADS = 4  # of each engine; several families are compared at a time


@dataclass(frozen=True)
class TruthArguments(ScriptArguments):
    """What is compared."""

    families: tuple[str, ...] = field(default=FAMILIES, metadata={"help": "JSON list"})
    formats: tuple[str, ...] = field(default=("fp32", *FORMATS, *COMBINED), metadata={"help": "JSON list"})
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


def opened(arguments: TruthArguments, shards: Path, name: str, format: str, way: Way, kv_bytes: int = ROOMY) -> Engine:
    """Open a family's shards on the device, in a format and a way of serving."""
    data_type, _, how = format.partition(" ")
    more = {"model_type": model_type_of(name), "kv_cache_bytes": kv_bytes, "int8_mode": int(how == "int8")}
    more |= {"cpu_threads": _CPU_THREADS, "has_fp8_cache": format == CACHE}
    more |= {"quantization": "fp8" if format == AT_LOAD else None}
    settings = Settings(shards, arguments.tensor_para_size, 1, data_type, **more, **way.settings)
    return open_engine(settings, torch.device(arguments.device))


def tight(
    name: str,
    shards: Path,
    shape: Shape,
    count: int,
    seed: int,
    drafts: str = "",
    ranks: int = 1,
    number: float = 4.0,
    width: int = 0,
) -> tuple[list[Ask], int]:
    """Draw requests that need little each, and give a KV cache, in bytes, with room for little more than the largest.

    So rows that grow take each other's pages.

    Args:
        name: of the family.
        shards: that are served.
        shape: of the model.
        count: of requests, of which three quarters are drawn.
        seed: of the draw.
        drafts: what drafts, and so has numbers in the pages too: all of them in the first rank.
        ranks: among which heads are divided.
        number: bytes of one in the cache.
        width: beams of the largest request; 0: as drawn.
    """
    config, longest = read_config(shards, model_type_of(name), ranks), shape.positions // 8
    # States leave fewer rows, which must grow more to take each other's pages.
    outputs = (48, 112, min(300, shape.positions // 4)) if config.keeps_states else LONGER_OUTPUTS
    chosen = draw_requests(shape, count * 3 // 4, seed, config.encoder is not None, outputs, longest)
    most = max((width or ask.width) * (len(ask.prompt) + max(outputs) + 64) for ask in chosen)
    entry = 2 * config.kv_heads * config.size_per_head // ranks
    if config.decoder and config.decoder.latent:
        entry = config.decoder.latent.kv_width
    layers = config.decoder.layers if config.decoder else ()
    attending = sum("attention" in layer.blocks for layer in layers) or config.num_layer
    beside = {DRAFT_MODEL: attending * entry * ranks, MTP: entry * ranks + shape.hidden, EAGLE: 3 * shape.hidden}
    kv_bytes = int(most * (attending * entry + beside.get(drafts, 0)) * number)
    if not (kind := config.mamba or config.delta):
        return chosen, kv_bytes
    keeping = sum(not {"mamba", "delta"}.isdisjoint(layer.blocks) for layer in layers)
    states = _STATES * keeping * 4 * (math.prod(kind.memory) + kind.channels * kind.conv_size)
    return chosen, 2 * max(kv_bytes, states)  # states take a half at most


def served_in(way: Way, shards: Path) -> Path:
    """Return what is opened in a way: the shards, or links to them with what drafts, and with adapters."""
    drafting = {DRAFT_MODEL: "hub", EAGLE: HEAD}.get(way.drafts)
    if not drafting and not way.adapts:
        return shards
    folder = shards.with_name(f"{shards.name}_ways")
    folder.mkdir(exist_ok=True)
    served = Path(tempfile.mkdtemp(dir=folder))
    for path in shards.iterdir():
        (served / path.name).symlink_to(path)
    if drafting:
        (served / DRAFT).symlink_to(shards.parent / drafting)
    if way.adapts:
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
