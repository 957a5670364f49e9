"""Random weights of a described shape, to measure a model before it is trained. The manifest marks them so.

Every value is drawn as at the start of a training: matrices and tables from a normal distribution of deviation 0.02,
norms 1, biases 0. A tensor's values depend on its name alone, so that every tensor parallelism cuts the same model. The
vocabulary is GPT-2's 256 bytes, with names that stand for nothing up to the size of the embedding.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles
from export_scripts.conversion.plan.check import Conversion
from export_scripts.conversion.plan.description import is_description, read_description
from export_scripts.conversion.plan.ranks import check_split
from export_scripts.conversion.write.shards import ShardSettings
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.schema import Assignment, SourceMap
from ft_format.byte_pieces import LETTERS
from ft_format.families import gpt, gptneox
from handover.errors import ArtefactError, CheckpointError
from handover.manifest import FILE_NAME as MANIFEST
from handover.manifest import RANDOM_WEIGHTS, Manifest
from models.directory import SpecialIds

_SERVED = (gpt.FAMILY.name, gptneox.FAMILY.name)
_DEVIATION = np.float32(0.02)


@dataclass(frozen=True)
class MadeUpVocabulary(TokenizerFiles):
    """A byte-level vocabulary of a given size."""

    size: int = 0

    def contents(self, archive: Archive) -> dict[str, bytes]:
        """Make the files."""
        tokens = [*LETTERS, *(f"<unused {number}>" for number in range(len(LETTERS), self.size))]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        return {"vocab.json": json.dumps(vocabulary).encode(), "merges.txt": b"#version: 0.2\n"}


def plan_random(path: Path, tensor_para_size: int, weight_data_type: str) -> Conversion:
    """Plan the making of a described model.

    Raises:
        CheckpointError: the path is no description, or the described model cannot be made.
    """
    if not is_description(path):
        raise CheckpointError(
            f"random weights are made of a description, and {path} is none",
            "give a model_config.yaml with vocab_size; to convert a checkpoint, leave random_weights out",
        )
    described = read_description(path)
    family, dims = described.family, described.dims
    if family.name not in _SERVED:
        raise CheckpointError(
            f"{path} describes a model of the family {family.name}; random weights are made to measure what is served",
            f"families: {', '.join(_SERVED)}",
        )
    check_split(tensor_para_size, dims, family.divided)
    of_files = dims.for_ranks(tensor_para_size)
    settings = ShardSettings(tensor_para_size, weight_data_type, of_files)
    least = len(LETTERS) + 1
    if dims.vocab_size < least:
        raise CheckpointError(f"{path}: vocab_size is {dims.vocab_size}", f"it is at least {least}, for every byte")
    assignments = tuple(
        Assignment(name, target, generate=_values_of(name, target.full_shape(of_files)))
        for name, target in family.schema(of_files).items()
    )
    source = Source(
        archive=Archive(path, {}),
        family=family,
        source_map=SourceMap("random weights of a described shape", {}, {}),
        dims=of_files,
        tensors={},
        tokenizer=MadeUpVocabulary({"vocab.json": "", "merges.txt": ""}, "bpe", size=dims.vocab_size),
        ids=SpecialIds(dims.vocab_size - 1, dims.vocab_size - 1),
    )
    return Conversion(source, assignments, settings)


def are_random(archive: Archive) -> bool:
    """Whether a checkpoint's own manifest says that its weights are random, as that of an FT checkpoint does."""
    if MANIFEST not in archive:
        return False
    try:
        return bool(Manifest.read(archive.path).made_from.get(RANDOM_WEIGHTS))
    except ArtefactError:
        return False  # its reader says what is wrong with it


def _values_of(name: str, shape: tuple[int, ...]) -> Callable[[Any], Array]:
    def make(dims: Any) -> Array:
        if name.endswith(".bias"):
            return np.broadcast_to(np.float32(0), shape)
        if "layernorm" in name:
            return np.broadcast_to(np.float32(1), shape)
        values: Array = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        values *= _DEVIATION
        return values

    return make
