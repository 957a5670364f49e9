"""Look at a checkpoint before anything is written: can it be converted, and into what.

No torch here: the configuration, the keys and the shapes say nearly all of it, in a fraction of a second, on the
login node. No weight is read: whether all of them are numbers, and fit into their new type, would take as long to find
out as to convert, which finds it out and then stops with the tensor's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.chat import about_chat, find_chat
from export_scripts.checkpoints.user_files import NOTHING_GIVEN, GivenFiles
from export_scripts.conversion.move.joining import join_files
from export_scripts.conversion.plan.ranks import check_split
from export_scripts.conversion.plan.served import check_served
from export_scripts.conversion.write.shards import ShardSettings
from export_scripts.tensors.dtypes import STORAGE
from export_scripts.weights.matching import match, zeros_made
from export_scripts.weights.remarks import ShardRemark
from export_scripts.weights.schema import Assignment, LazyTensor
from handover.errors import CheckpointError, nearest


@dataclass(frozen=True)
class Conversion:
    """A conversion that is known to work out, and everything it needs.

    Attributes:
        source: the checkpoint.
        assignments: every tensor to write and where it comes from.
        settings: how tensors become files.
    """

    source: Source
    assignments: tuple[Assignment, ...]
    settings: ShardSettings

    @property
    def archive(self) -> Archive:
        """The source's files."""
        return self.source.archive

    def sources(self, assignment: Assignment) -> tuple[LazyTensor, ...]:
        """The tensors that a target is made from."""
        return tuple(self.source.tensors[key] for key in assignment.keys)


def inspect_source(
    path: Path, tensor_para_size: int, weight_data_type: str, given: GivenFiles = NOTHING_GIVEN
) -> Source:
    """Check that a checkpoint can be converted and return it, opened.

    Args:
        path: a checkpoint, or a directory that holds exactly one.
        tensor_para_size: ranks to split for.
        weight_data_type: fp32, fp16 or bf16.
        given: what belongs to it and lies elsewhere.

    Raises:
        CheckpointError: it is missing, truncated, hostile, ambiguous, incomplete, or not a model that
            FasterTransformer can express.
    """
    return plan_conversion(find_archive(Path(path), given), tensor_para_size, weight_data_type).source


def plan_conversion(
    archive: Archive, tensor_para_size: int, weight_data_type: str, allow_nonfinite: bool = False
) -> Conversion:
    """Work out a conversion; see ``inspect_source`` for the errors, which all name the checkpoint."""
    if weight_data_type not in STORAGE:
        raise CheckpointError(f"weight_data_type '{weight_data_type}' is unknown", nearest(weight_data_type, STORAGE))
    try:
        return _plan(archive, tensor_para_size, weight_data_type, allow_nonfinite)
    except CheckpointError as error:
        if str(archive.path) in error.problem:
            raise
        raise CheckpointError(f"{archive.path}: {error.problem}", error.hint) from None


def _plan(archive: Archive, tensor_para_size: int, weight_data_type: str, allow_nonfinite: bool) -> Conversion:
    source = open_source(archive)
    check_served(source.family, source.dims)
    settings = ShardSettings(tensor_para_size, weight_data_type, source.dims, allow_nonfinite)
    check_split(tensor_para_size, source.dims, source.family.divided)
    assignments = match(source.schema(), source.source_map, source.dims, source.tensors, source.other_keys)
    check_types(source, assignments)
    said = (
        *zeros_made(assignments),
        *map(ShardRemark, filter(None, (about_chat(find_chat(source)),))),
    )
    source = replace(source, remarks=(*source.remarks, *said))
    files = join_files(assignments, source.files())
    return Conversion(source, tuple(each.for_ranks(tensor_para_size) for each in files), settings)


def check_types(source: Source, assignments: Sequence[Assignment]) -> None:
    """Refuse tensors to convert that are not of a data type of weights."""
    keys = {key: source.tensors[key].data_type for assignment in assignments for key in assignment.keys}
    foreign = [f"{key}  {data_type}" for key, data_type in keys.items() if data_type not in STORAGE]
    if foreign:
        raise CheckpointError(f"{len(foreign)} tensors are not of fp32, fp16 or bf16\n  " + "\n  ".join(foreign))
