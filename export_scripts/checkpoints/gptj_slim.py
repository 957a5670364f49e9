"""Reader of GPT-J's original checkpoint, as mesh-transformer-jax writes it (``step_383500`` of the slim archive).

It is a directory of ``shard_0`` to ``shard_7``, each with numbered ``.npz`` files of arrays without names. It does not
say how many heads it has; GPT-J-6B is known by its size, another one says it in ``config.json``, with the keys of
mesh-transformer-jax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.npz_file import NpzArray, read_npz
from export_scripts.checkpoints.huggingface.files import read_json
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.huggingface import NO_TOKENIZER, find_tokenizer_files
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.gptj_slim import ARRAYS_A_LAYER, JOIN_AXES, OTHER_ARRAYS, array_names, source_map
from export_scripts.weights.schema import LazyTensor, ModelDims
from export_scripts.weights.settings import Settings
from ft_format.families import gptj
from handover.errors import CheckpointError
from models.directory import CONFIG_FILE, SpecialIds

NAME = "GPT-J's original checkpoint (directory with shard_0/0.npz and so on)"
_SHARD = re.compile(r"shard_(\d+)/\d+\.npz$")
# GPT-J-6B, by layers and width: mesh-transformer-jax, configs/6B_roto_256.json.
_KNOWN = {(28, 4096): {"n_heads": 16, "pe_rotary_dims": 64}}
_END_OF_TEXT = 50256  # of GPT-2's vocabulary, which GPT-J has


@dataclass(frozen=True)
class ShardedArray:
    """One array of which the shards have a part each.

    Attributes:
        arrays: of the shards, in order.
        axis: along which they follow one another; None: there is one.
    """

    arrays: tuple[NpzArray, ...]
    axis: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        shape = list(self.arrays[0].shape)
        if self.axis is not None:
            shape[self.axis] = sum(array.shape[self.axis] for array in self.arrays)
        return tuple(shape)

    @property
    def data_type(self) -> str:
        """fp32, fp16 or bf16."""
        return self.arrays[0].data_type

    @property
    def unproved(self) -> tuple[str, ...]:
        """None: each record has a CRC-32."""
        return ()

    def parts(self) -> tuple[Array, ...]:
        """Map the parts, without copying; bf16 comes as uint16."""
        return tuple(array.read() for array in self.arrays)


def is_candidate(path: Path) -> bool:
    """Whether a directory holds shards of that kind."""
    return next(path.glob("shard_*/0.npz"), None) is not None


def recognises(archive: Archive) -> bool:
    """Whether the files are such a checkpoint."""
    return any(_SHARD.match(name) for name in archive.sizes)


def open_source(archive: Archive) -> Source:
    """Open a model.

    Raises:
        CheckpointError: incomplete, not a slim checkpoint, or its number of heads is not known.
    """
    shards = [_read_shard(archive, shard) for shard in range(_count_shards(archive))]
    layers, rest = divmod(len(shards[0]) - OTHER_ARRAYS, ARRAYS_A_LAYER)
    if rest or layers < 1:
        raise CheckpointError(
            f"{archive.path}: shard_0 has {len(shards[0])} arrays, where a slim GPT-J has {OTHER_ARRAYS} and "
            f"{ARRAYS_A_LAYER} for each layer",
            "a checkpoint with the optimizer's state is not read; use its slim form",
        )
    tensors = _tensors(archive, shards, array_names(layers))
    settings = Settings(read_json(archive, CONFIG_FILE))
    tokenizer = find_tokenizer_files(archive)
    end_id = settings.whole("eos_token_id", _END_OF_TEXT)
    return Source(
        archive=archive,
        family=gptj.FAMILY,
        source_map=source_map(len(shards)),
        dims=_dims(settings, layers, tensors, len(shards)),
        tensors=tensors,
        tokenizer=tokenizer,
        ids=SpecialIds(settings.whole("bos_token_id", end_id), end_id),
        remarks=() if tokenizer.members else (NO_TOKENIZER,),
    )


def _count_shards(archive: Archive) -> int:
    found = {int(match[1]) for name in archive.sizes if (match := _SHARD.match(name))}
    missing = sorted(set(range(len(found))) - found)
    if missing:
        raise CheckpointError(
            f"{archive.path} lacks {', '.join(f'shard_{shard}' for shard in missing)}", "copy the checkpoint again"
        )
    return len(found)


def _read_shard(archive: Archive, shard: int) -> tuple[NpzArray, ...]:
    """List a shard's arrays through all of its files."""
    arrays: list[NpzArray] = []
    for number in count():
        name = f"shard_{shard}/{number}.npz"
        if name not in archive:
            return tuple(arrays)
        arrays += read_npz(archive, name)
    raise AssertionError("files have an end")


def _tensors(archive: Archive, shards: list[tuple[NpzArray, ...]], names: list[str]) -> Mapping[str, LazyTensor]:
    """Name each array, and join what the shards have cut."""
    tensors: dict[str, LazyTensor] = {}
    if any(len(shard) != len(names) for shard in shards):
        counts = ", ".join(str(len(shard)) for shard in shards)
        raise CheckpointError(
            f"{archive.path}: the shards have {counts} arrays, not equally many",
            "copy the checkpoint again",
        )
    for index, name in enumerate(names):
        arrays = tuple(shard[index] for shard in shards)
        if len({(array.shape, array.data_type) for array in arrays}) > 1:
            raise CheckpointError(f"{archive.path}: the shards' parts of {name} do not fit together")
        axis = JOIN_AXES.get(name.split(".", 2)[-1] if name.startswith("h.") else name)
        if axis is None:
            tensors |= {f"{name}.shard_{number}": ShardedArray((array,)) for number, array in enumerate(arrays)}
        elif axis >= len(arrays[0].shape):
            raise CheckpointError(f"{archive.path}: {name} has the shape {list(arrays[0].shape)}")
        else:
            tensors[name] = ShardedArray(arrays, axis)
    return tensors


def _dims(settings: Settings, layers: int, tensors: Mapping[str, LazyTensor], shards: int) -> ModelDims:
    table, middle = tensors["wte.weight"].shape, tensors["h.0.mlp.in.weight"].shape
    if len(table) != 2 or len(middle) != 2:
        raise CheckpointError(f"wte.weight is {list(table)} and h.0.mlp.in.weight {list(middle)}, not matrices")
    vocab_size, hidden = table
    known = {**_KNOWN.get((layers, hidden), {}), **settings}
    if "n_heads" not in known or "pe_rotary_dims" not in known:
        raise CheckpointError(
            f"{layers} layers of width {hidden} are not GPT-J-6B, and the checkpoint does not say how many heads",
            "put a config.json with n_heads and pe_rotary_dims beside the shards",
        )
    sizes = Settings({**known, "d_model": hidden})
    if sizes.size("n_heads") % shards:
        raise CheckpointError(f"config.json: n_heads {sizes.size('n_heads')} cannot lie whole in {shards} shards")
    return ModelDims(
        head_num=sizes.size("n_heads"),
        size_per_head=sizes.head_size("d_model", "n_heads"),
        inter_size=middle[1],
        num_layer=layers,
        max_pos_seq_len=sizes.size("seq", default=2048),
        vocab_size=vocab_size,
        rotary_embedding=sizes.size("pe_rotary_dims"),
        use_gptj_residual=True,
    )
