"""What Megatron saves more than once, compared: one of the copies is read, and training keeps them equal.

The last pipeline stage has the tied embedding again, each stage of a T5 its stack's table of positions, and each
tensor-parallel rank what is not cut, as norms. Where files have checksums of their tensors no weight is read for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.rank_files import JoinAxis, JoinedTensor
from export_scripts.checkpoints.tensor_values import same_values
from export_scripts.weights.schema import LazyTensor, SourceMap
from handover.errors import CheckpointError

_SHOWN = 3


class HoldsCopies(Protocol):
    """A state that may hold a tensor several times."""

    def copies(self, join_axis: JoinAxis) -> Iterator[tuple[str, LazyTensor, LazyTensor]]:
        """List each copy: key, the tensor that is taken, and the one that should equal it."""


def refuse_differing(table: SourceMap, tensors: Mapping[str, LazyTensor], archive: Archive) -> None:
    """Compare what the table drops as a copy with what it should equal.

    Raises:
        CheckpointError: they differ, so that training computed with both.
    """
    for copy, original in table.copies.items():
        if copy in tensors and original in tensors and not _is_same(tensors[copy], tensors[original], archive):
            raise CheckpointError(
                f"{archive.path}: {copy} differs from {original}, whose copy it should be ({table.ignored_as(copy)})",
                "training keeps the two equal: take another iteration, or correct the one that is wrong; where both "
                "were trained, the model is untied (share_embeddings_and_output_weights: false, output_layer.weight)",
            )


def differing_copies(table: SourceMap, state: HoldsCopies, archive: Archive) -> list[str]:
    """List the keys of what differs between training's ranks or stages although it should be the same."""
    differing = {
        key: None
        for key, taken, other in state.copies(table.join_axis)
        if not table.is_ignored(key) and not _is_same(taken, other, None if archive.is_compressed else archive)
    }
    return list(differing)


def remarks_on_copies(keys: Sequence[str]) -> tuple[str, ...]:
    """Name what differs, in one line."""
    if not keys:
        return ()
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return (
        f"the training's ranks hold different values of {', '.join(keys[:_SHOWN])}{more}, which should be the same on "
        "all; the first rank's are taken, as FasterTransformer's converter does",
    )


def _is_same(first: LazyTensor, second: LazyTensor, archive: Archive | None) -> bool:
    """Compare two tensors, by their checksums where those are equal.

    Args:
        first: of them.
        second: of them.
        archive: that they lie in; None: it is compressed, and checksums alone are compared.
    """
    if isinstance(first, JoinedTensor) and isinstance(second, JoinedTensor):
        ours, theirs = first.checksums, second.checksums
        if archive is None or (ours is not None and ours == theirs):
            return None in (ours, theirs) or ours == theirs
    return same_values(first, second, archive)
