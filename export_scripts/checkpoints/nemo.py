"""Reader of NeMo 1.x checkpoints: ``.nemo`` archives and unpacked directories, any training TP and PP.

File names: NeMo, ``inject_model_parallel_rank``: ``model_weights.ckpt``, ``mp_rank_XX/`` with tensor parallelism
alone, ``tp_rank_XX_pp_rank_YYY/`` with pipeline parallelism.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from export_scripts.checkpoints.archive import Archive
from export_scripts.checkpoints.nemo_config import check_expressible, read_dims, remarks
from export_scripts.checkpoints.pickled import StoredTensor
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizer import find_tokenizer, special_ids
from export_scripts.checkpoints.torch_file import TorchFile
from export_scripts.dtypes import Array
from export_scripts.weights import gpt, nemo_gpt
from export_scripts.weights.schema import SourceMap, split_layer, with_layer
from handover.errors import CheckpointError

NAME = "NeMo (.nemo archive or unpacked directory)"
CONFIG_FILE = "model_config.yaml"
_WEIGHTS_FILE = "model_weights.ckpt"
# The first pipeline stage of a stack holds this; the stack's later stages keep copies of it.
_REPEATED = "_relative_position_embedding."


def is_candidate(path: Path) -> bool:
    """Whether a path is an archive by its name or an unpacked directory."""
    return (path / CONFIG_FILE).is_file() or (path.suffix == ".nemo" and path.is_file())


def recognises(archive: Archive) -> bool:
    """Whether the files are NeMo's; a file that is no directory is taken for one, so that its faults are named."""
    return CONFIG_FILE in archive or archive.path.is_file()


def open_source(archive: Archive) -> Source:
    """Open a GPT.

    Raises:
        CheckpointError: incomplete, or not a model that FasterTransformer's GPT can express.
    """
    checkpoint = NemoCheckpoint(archive)
    check_expressible(checkpoint.config)
    source_map = _source_map(checkpoint)
    tensors = checkpoint.tensors(source_map.join_axis)
    # The configuration does not know the vocabulary's padding; a missing embedding is for the completeness check.
    vocab_size = next((t.shape[0] for key, t in tensors.items() if "model.wte" in source_map.targets(key)), 0)
    tokenizer = find_tokenizer(archive, checkpoint.config)
    return Source(
        archive=archive,
        family=gpt.FAMILY,
        source_map=source_map,
        dims=read_dims(checkpoint.config, vocab_size),
        tensors=tensors,
        tokenizer=tokenizer,
        ids=special_ids(archive, tokenizer),
        other_keys=checkpoint.other_keys(),
        remarks=remarks(checkpoint.config),
    )


def _source_map(checkpoint: NemoCheckpoint) -> SourceMap:
    """Choose the table by the keys: a configuration may be silent about the format."""
    keys = checkpoint.keys()
    if any(nemo_gpt.LEGACY.sources(key) for key in keys):
        return nemo_gpt.LEGACY
    some = ", ".join(keys[:3])
    if any(key.startswith(nemo_gpt.MEGATRON_CORE_PREFIXES) for key in keys):
        raise CheckpointError(
            f"{checkpoint.archive.path} has megatron-core keys ({some}, ...)", "only legacy keys are read yet"
        )
    raise CheckpointError(f"{checkpoint.archive.path} has no keys of a GPT ({some or 'it is empty'})")


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor whose parts lie in the files of several training ranks.

    Attributes:
        stored: file and tensor of each tensor-parallel rank, in order.
        axis: along which they are joined; None: one part is all.
    """

    stored: tuple[tuple[TorchFile, StoredTensor], ...]
    axis: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the joined tensor."""
        shape = list(self.stored[0][1].shape)
        if self.axis is not None:
            shape[self.axis] = sum(tensor.shape[self.axis] for _, tensor in self.stored)
        return tuple(shape)

    @property
    def data_type(self) -> str:
        """fp32, fp16 or bf16."""
        return self.stored[0][1].storage.data_type

    def parts(self) -> tuple[Array, ...]:
        """Map the parts, without copying; bf16 comes as uint16."""
        return tuple(file.read(tensor) for file, tensor in self.stored)


class NemoCheckpoint:
    """A NeMo checkpoint, opened: configuration and keys are read, weights are not.

    Attributes:
        archive: its files.
        config: content of ``model_config.yaml``.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.config = _read_config(archive)
        self.tensor_parallel = _parallelism(self.config, "tensor_model_parallel_size")
        self.pipeline_parallel = _parallelism(self.config, "pipeline_model_parallel_size")
        # Per tensor-parallel rank: key with the model's own layer number -> (file, value).
        self._ranks: list[dict[str, tuple[TorchFile, Any]]] = []

    def keys(self) -> tuple[str, ...]:
        """Every key of the model, layers numbered through all pipeline stages."""
        return tuple(self._rank(0))

    def other_keys(self) -> tuple[str, ...]:
        """Keys whose values are not tensors."""
        return tuple(key for key, (_, value) in self._rank(0).items() if not isinstance(value, StoredTensor))

    def tensors(self, join_axis: Callable[[str], int | None]) -> Mapping[str, JoinedTensor]:
        """Join the training ranks' tensors, without reading them.

        Args:
            join_axis: the axis along which training cut a key's tensor; None: every rank holds all of it.

        Raises:
            CheckpointError: ranks hold different keys, types or shapes.
        """
        ranks = [self._rank(rank) for rank in range(self.tensor_parallel)]
        for number, rank in enumerate(ranks[1:], start=1):
            if differing := sorted(ranks[0].keys() ^ rank.keys()):
                raise CheckpointError(f"{self.archive.path}: rank {number} has other keys than rank 0: {differing}")
        joined = {}
        for key, (_, value) in ranks[0].items():
            if isinstance(value, StoredTensor):
                axis = join_axis(key) if len(ranks) > 1 else None
                parts = tuple(rank[key] for rank in ranks)
                self._check_parts(key, [part for _, part in parts], axis)
                joined[key] = JoinedTensor(parts if axis is not None else parts[:1], axis)
        return joined

    def _check_parts(self, key: str, parts: list[Any], axis: int | None) -> None:
        def fixed(part: Any) -> Any:
            if not isinstance(part, StoredTensor):
                return None
            shape = [size for index, size in enumerate(part.shape) if index != axis]
            return part.storage.data_type, len(part.shape), shape

        if any(fixed(part) != fixed(parts[0]) for part in parts) or (axis is not None and axis >= len(parts[0].shape)):
            raise CheckpointError(f"{self.archive.path}: the training ranks' parts of {key} do not fit together")

    def _rank(self, tensor_rank: int) -> dict[str, tuple[TorchFile, Any]]:
        if not self._ranks:
            self._ranks = [self._read_rank(rank) for rank in range(self.tensor_parallel)]
        return self._ranks[tensor_rank]

    def _read_rank(self, tensor_rank: int) -> dict[str, tuple[TorchFile, Any]]:
        """Gather one tensor-parallel rank's pipeline stages; a stage counts the layers of each stack from 0."""
        found: dict[str, tuple[TorchFile, Any]] = {}
        first_layer: Counter[str] = Counter()  # by the name of the stack: a T5 has two
        for name in self._weight_files(tensor_rank):
            file = TorchFile(self.archive, name)
            layers: Counter[str] = Counter()
            for saved_key, value in file.state.items():
                key = _without_wrapper(saved_key)
                pattern, layer = split_layer(key)
                if layer is not None:
                    stack = pattern.partition("{layer}")[0]
                    layers[stack] = max(layers[stack], layer + 1)
                    key = with_layer(key, first_layer[stack] + layer)
                elif key in found and _REPEATED in key:
                    continue
                if key in found:
                    raise CheckpointError(f"{self.archive.path}: {key} is there twice")
                found[key] = (file, value)
            first_layer += layers
        return found

    def _weight_files(self, tensor_rank: int) -> list[str]:
        if self.pipeline_parallel > 1:
            stages = range(self.pipeline_parallel)
            names = [f"tp_rank_{tensor_rank:02d}_pp_rank_{stage:03d}/{_WEIGHTS_FILE}" for stage in stages]
        elif self.tensor_parallel > 1:
            names = [f"mp_rank_{tensor_rank:02d}/{_WEIGHTS_FILE}"]
        else:
            names = [_WEIGHTS_FILE]
        missing = [name for name in names if name not in self.archive]
        if missing:
            if any(name.startswith(("model_weights/", "weights/")) for name in self.archive.sizes):
                raise CheckpointError(
                    f"{self.archive.path} is a distributed checkpoint (a directory model_weights/)",
                    "only checkpoints with one model_weights.ckpt a rank are read; save it again without dist_ckpt",
                )
            raise CheckpointError(
                f"{self.archive.path} lacks {', '.join(missing)}",
                f"its configuration says tensor_model_parallel_size {self.tensor_parallel}, "
                f"pipeline_model_parallel_size {self.pipeline_parallel}",
            )
        return names


def _without_wrapper(key: str) -> str:
    """Drop the wrapper's name, ``model.module.``: some saves with megatron_amp_O2 keep it in every key."""
    model, dot, name = key.partition(".")
    return f"{model}{dot}{name.removeprefix('module.')}"


def _read_config(archive: Archive) -> Mapping[str, Any]:
    if CONFIG_FILE not in archive:
        raise CheckpointError(f"{archive.path} has no {CONFIG_FILE}", "it is not a NeMo checkpoint")
    try:
        config = yaml.load(archive.read_bytes(CONFIG_FILE), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{archive.path}: {CONFIG_FILE} is not YAML: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{archive.path}: {CONFIG_FILE} is not a mapping")
    return config


def _parallelism(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key) or 1
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{CONFIG_FILE}: {key} is {value!r}, not a positive number")
    return value
