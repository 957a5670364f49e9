"""NeMo's and Megatron-LM's files of a Llama-like model: archives, zarr and torch_dist, cut by training ranks.

Distributed arrays are cut as megatron-core cuts them (ShardedTensor.from_rank_offsets, apply_swiglu_sharded_factory,
stacked layers of TransformerBlock.sharded_state_dict, the expert axis of SequentialMLP.sharded_state_dict).
"""

from __future__ import annotations

import io
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from support.checkpoints.llama_state import COLUMNS, GATED, ROWS, State, layer_of, legacy_name, partition, stages
from support.checkpoints.nemo_archive import write_nemo
from support.tiny_models.llama_models import VOCAB

TOKENIZER_FILE = "8b1e_tokenizer.model"


@cache
def sentencepiece_model(size: int = VOCAB) -> bytes:
    """A SentencePiece model with exactly as many pieces: 3 special, user-defined ones, 9 characters and 4 merges."""
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abcdefgh hgfedcba"] * 10),
        model_writer=stream,
        model_type="bpe",
        vocab_size=size,
        user_defined_symbols=[f"<{number}>" for number in range(size - 16)],
        minloglevel=2,
    )
    return stream.getvalue()


def write_huggingface_tokenizer(folder: Path, size: int = VOCAB) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with as many tokens, as transformers saves them."""
    import transformers

    names = ["<unk>", "<s>", "</s>", *(chr(ord("!") + index) for index in range(90))]
    names += [f"<{number}>" for number in range(size - len(names))]
    model = tokenizers.models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)


def write_archive(
    path: Path, config: Mapping[str, Any], state: State, grid: tuple[int, int] = (1, 1), prefix: str = "model."
) -> Path:
    """Write a ``.nemo`` with one torch file a training rank; ``model.language_model.`` is the legacy prefix."""
    tensor, pipeline = grid
    naming = legacy_name if prefix.endswith("language_model.") else str
    files = {}
    for rank, stage, kept in stages(state, tensor, pipeline, naming):
        part = f"tp_rank_{rank:02d}_pp_rank_{stage:03d}/" if pipeline > 1 else f"mp_rank_{rank:02d}/"
        files[f"{'' if grid == (1, 1) else part}model_weights.ckpt"] = {f"{prefix}{key}": v for key, v in kept.items()}
    return write_nemo(path, config, files, files={TOKENIZER_FILE: sentencepiece_model()})


@dataclass
class ChunkedArray:
    """A global array and the chunks that training ranks wrote: (offsets, values)."""

    shape: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], torch.Tensor]] = field(default_factory=list)


def chunked(state: State, ranks: int, is_stacked: bool = True, has_pairs: bool = False) -> dict[str, ChunkedArray]:
    """The arrays of a distributed checkpoint.

    Args:
        state: of llama_state.core_state.
        ranks: of tensor parallelism.
        is_stacked: one array holds all layers; otherwise keys have the layer's number.
        has_pairs: gate and up projection are two arrays, ``_w`` and ``_v``, and every expert has arrays of its own
            (``singleton_local_shards``).
    """
    layers = 1 + max(layer_of(key) or 0 for key in state)
    experts = 1 + max(_expert_of(key) or 0 for key in state)
    arrays: dict[str, ChunkedArray] = {}
    for key, value in state.items():
        name, sizes, place = key, [], []
        layer = layer_of(key)
        if is_stacked and layer is not None:
            name, sizes, place = name.replace(f".layers.{layer}.", ".layers.", 1), [layers], [layer]
        expert = _expert_of(key)
        if expert is not None and has_pairs:
            name = name.replace("local_experts.", "experts.")
        elif expert is not None:
            name = name.replace(f"local_experts.{expert}.", "experts.")
            sizes, place = [*sizes, experts], [*place, expert]
        for suffix, shape, offset, part in _parts(key, value, ranks, has_pairs):
            array = arrays.setdefault(f"{name}{suffix}", ChunkedArray((*sizes, *shape)))
            array.chunks.append(((*place, *offset), part.reshape(*([1] * len(sizes)), *part.shape)))
    return arrays


def _expert_of(key: str) -> int | None:
    _, found, rest = key.partition(".local_experts.")
    return int(rest.split(".")[0]) if found else None


def _parts(
    key: str, value: torch.Tensor, ranks: int, has_pairs: bool
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """The chunks of one tensor: suffix of the key, global shape, offset and values."""
    how = partition(key, value)
    if how == GATED:
        size, *columns = value.shape[1:]
        for rank in range(ranks):
            for which, part in enumerate(value.chunk(ranks, 1)[rank]):
                row = rank * size // ranks
                if has_pairs:
                    yield ("_w", "_v")[which], (size, *columns), (row, *[0] * len(columns)), part
                else:
                    yield "", (2 * size, *columns), (which * size + row, *[0] * len(columns)), part
    elif how in (ROWS, COLUMNS):
        axis = 0 if how == ROWS else 1
        for rank, part in enumerate(value.chunk(ranks, axis)):
            offset = [0] * value.ndim
            offset[axis] = rank * part.shape[axis]
            yield "", tuple(value.shape), tuple(offset), part
    else:
        yield "", tuple(value.shape), (0,) * value.ndim, value


def write_zarr(folder: Path, arrays: Mapping[str, ChunkedArray], prefix: str = "model.") -> None:
    """Write arrays by zarr's specification, version 2, as megatron-core does: not compressed, a chunk a rank's part."""
    folder.mkdir(parents=True)
    for key, array in arrays.items():
        home = folder / f"{prefix}{key}"
        home.mkdir()
        sizes = tuple(array.chunks[0][1].shape)
        dtype = "<f4" if array.chunks[0][1].dtype == torch.float32 else "bfloat16"
        header = {"chunks": sizes, "compressor": None, "dtype": dtype, "fill_value": None, "filters": None}
        (home / ".zarray").write_text(json.dumps({**header, "order": "C", "shape": array.shape, "zarr_format": 2}))
        for offset, values in array.chunks:
            place = ".".join(str(at // size) for at, size in zip(offset, sizes, strict=True))
            (home / place).write_bytes(raw(values))
    _describe(folder, "zarr", {})


def raw(values: torch.Tensor) -> bytes:
    """A tensor's bytes, row by row."""
    return values.contiguous().view(torch.uint8).numpy().tobytes() if values.ndim else bytes(np.array(values))


class _RankPlanner(SavePlanner):
    """Has torch's own writer write each chunk at its place, and objects beside them."""

    def __init__(self, arrays: Mapping[str, ChunkedArray], extra: Mapping[str, bytes]) -> None:
        self.arrays, self.extra = arrays, extra

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the arrays are given."""

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.extra]
        for key, array in self.arrays.items():
            properties = TensorProperties(dtype=array.chunks[0][1].dtype)
            for number, (offset, values) in enumerate(array.chunks):
                chunk = ChunkStorageMetadata(torch.Size(offset), values.shape)
                data = TensorWriteData(chunk, properties, torch.Size(array.shape))
                index = MetadataIndex(key, torch.Size(offset), number)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.extra[write_item.index.fqn])
        offset = tuple(write_item.index.offset or ())
        return next(values for at, values in self.arrays[write_item.index.fqn].chunks if at == offset)


def write_torch_dist(
    folder: Path,
    arrays: Mapping[str, ChunkedArray],
    prefix: str = "module.",
    common: Any = None,
    has_common_file: bool = True,
) -> None:
    """Write ``.metadata`` and ``*.distcp`` by torch's own writer, one process in the place of all ranks.

    megatron-core 0.20 has what is common as an object (``dist_checkpointing/serialization.py``, ``save``).
    """
    named = {f"{prefix}{key}": array for key, array in arrays.items()}
    extra = {
        f"{key.removesuffix('weight')}_extra_state/shard_{layer}_{array.shape[0]}": b"state of Transformer Engine"
        for key, array in named.items()
        if key.endswith("linear_qkv.weight") and ".layers.self" in key
        for layer in range(array.shape[0])
    }
    if not has_common_file:
        torch.save([common], stream := io.BytesIO())
        extra["common_state/shard_0_1"] = stream.getvalue()
    writer = dcp.FileSystemWriter(folder, thread_count=2)
    dcp.save({}, storage_writer=writer, planner=_RankPlanner(named, extra), no_dist=True)
    _describe(folder, "torch_dist", common or {})
    if not has_common_file:
        (folder / "common.pt").unlink()


def _describe(folder: Path, backend: str, common: Any) -> None:
    about = {"sharded_backend": backend, "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps({**about, "common_backend_version": 1}))
    torch.save(common, folder / "common.pt")


def write_nemo1_tree(root: Path, config: Mapping[str, Any]) -> Path:
    """The configuration and tokenizer of an unpacked ``.nemo``; ``model_weights`` is written beside them."""
    root.mkdir(parents=True)
    (root / "model_config.yaml").write_text(yaml.safe_dump(dict(config)))
    (root / TOKENIZER_FILE).write_bytes(sentencepiece_model())
    return root / "model_weights"


def write_nemo2_tree(root: Path, model: Mapping[str, Any]) -> Path:
    """The ``context/`` of a NeMo 2 directory with a tokenizer of transformers; ``weights`` is written beside it."""
    context = root / "context"
    write_huggingface_tokenizer(context / "nemo_tokenizer")
    (context / "model.yaml").write_text(yaml.safe_dump(dict(model)))
    (context / "io.json").write_text("{}")
    return root / "weights"


def write_bridge_tree(root: Path, model: Mapping[str, Any]) -> Path:
    """One iteration of Megatron-Bridge, without its weights, which go into the returned folder."""
    folder = root / "iter_0000007"
    write_huggingface_tokenizer(folder / "tokenizer")
    config = {"model": dict(model), "tokenizer": {"tokenizer_type": "HuggingFaceTokenizer"}, "peft": None}
    (folder / "run_config.yaml").write_text(yaml.safe_dump(config))
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def write_megatron_lm_tree(root: Path) -> Path:
    """The tracker and tokenizer of a Megatron-LM directory; the weights are written into the returned folder."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "latest_checkpointed_iteration.txt").write_text("500")
    (root / "tokenizer.model").write_bytes(sentencepiece_model())
    return root / "iter_0000500"


def write_megatron_lm(
    root: Path,
    arguments: Mapping[str, Any],
    state: State,
    grid: tuple[int, int] = (1, 1),
    is_legacy: bool = False,
    parts: int = 1,
) -> Path:
    """Write ``iter_0000500/mp_rank_*/model_optim_rng.pt``; megatron-core's keys lie flat, the legacy ones nested.

    With several ``parts``, interleaved stages: a rank's file has ``model0``, ``model1``, ..., and part i of rank p is
    the stage i * ranks + p of the model (``parallel_state``, ``get_transformer_layer_offset``).
    """
    tensor, pipeline = grid
    models: dict[tuple[int, int], dict[str, Any]] = {}
    for rank, stage, kept in stages(state, tensor, pipeline * parts, legacy_name if is_legacy else str):
        name = f"model{stage // pipeline}" if parts > 1 else "model"
        models.setdefault((rank, stage % pipeline), {})[name] = nested(kept) if is_legacy else kept
    for (rank, stage), held in models.items():
        folder = write_megatron_lm_tree(root) / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
        folder.mkdir(parents=True)
        content = {"iteration": 500, "checkpoint_version": 3.0, "args": Namespace(**arguments), **held}
        torch.save(content, folder / "model_optim_rng.pt")
    return root


def megatron_lm_dist(
    arguments: Callable[..., Mapping[str, Any]], arrays: Callable[..., Mapping[str, ChunkedArray]]
) -> Callable[..., Path]:
    """Return what writes Megatron-LM's ``torch_dist`` of a model: (root, source, ranks, changes of arguments).

    Args:
        arguments: of the training, given transformers' configuration and how many ranks it had.
        arrays: given the model and the ranks.
    """

    def write(root: Path, source: Any, ranks: int, **changes: Any) -> Path:
        said = Namespace(**{**arguments(source.config, ranks), **changes})
        common = {"args": said, "checkpoint_version": 3.0, "iteration": 500}
        write_torch_dist(write_megatron_lm_tree(root), arrays(source, ranks), "", common)
        return root

    return write


def nested(kept: State) -> dict[str, Any]:
    """Megatron-LM's nested dictionaries of before megatron-core."""
    language: dict[str, Any] = {}
    for key, value in kept.items():
        outer, _, inner = key.partition(".")
        if outer == "embedding":
            language.setdefault(outer, {})["word_embeddings"] = {"weight": value}
        else:
            language.setdefault(outer, {})[inner] = value
    return {"language_model": language}
