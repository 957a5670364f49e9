"""Which training rank wrote which file: ``mp_rank_<tensor>[_<pipeline>][_<expert>]``.

Megatron-LM, ``training/checkpointing.py`` (``get_checkpoint_name``): a place along pipeline or experts is in the name
where there are several. megatron-core, ``parallel_state.py`` (``RankGenerator``): ranks are numbered along tensor
parallelism first, for experts along their own; so that rank t of the one is rank t modulo n of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from handover.errors import CheckpointError
from models.checks import shown

_SHOWN = 20  # of what is missing
_EXTENDED = "moe_extended_tp"
_OTHERWISE = "what Megatron-LM saves with --ckpt-format torch_dist is read, whichever rank had an expert"


@dataclass(frozen=True)
class RankGrid:
    """The files of a training's ranks.

    Attributes:
        files: name by tensor-parallel rank, pipeline stage and expert-parallel rank.
        expert_num: experts of a layer; 0: the training does not say that there are any.
        expert_ranks: ranks that each have some of the experts.
        expert_tensor_ranks: ranks that each expert is cut for.
    """

    files: Mapping[tuple[int, int, int], str]
    expert_num: int
    expert_ranks: int
    expert_tensor_ranks: int

    @property
    def has_apart(self) -> bool:
        """Whether experts lie otherwise than what tensor-parallel ranks cut."""
        return bool(self.expert_num) and (self.expert_ranks > 1 or self.expert_tensor_ranks != self._sizes[0])

    @property
    def experts_of_a_rank(self) -> int:
        """Experts that a file holds."""
        return self.expert_num // self.expert_ranks

    @property
    def tensor_ranks(self) -> int:
        """Tensor-parallel ranks."""
        return self._sizes[0]

    @property
    def rank_of(self) -> Mapping[str, int]:
        """Expert-parallel rank of each file."""
        return {name: expert for (_, _, expert), name in self.files.items()}

    def dense(self) -> list[list[tuple[str, ...]]]:
        """List the files of each tensor-parallel rank's pipeline stages; several are of several expert ranks."""
        return [[self._all(rank, stage) for stage in range(self._sizes[1])] for rank in range(self._sizes[0])]

    def experts(self) -> list[list[tuple[str, ...]]]:
        """List one file of each part of the experts, for the ranks that each expert is cut for and pipeline stages."""
        ranks, stages, n = range(self.expert_tensor_ranks), range(self._sizes[1]), self.expert_tensor_ranks
        found: dict[tuple[int, int, int], str] = {}
        for (rank, stage, expert), name in sorted(self.files.items()):
            found.setdefault((rank % n, stage, expert), name)
        return [[tuple(found[rank, stage, e] for e in range(self.expert_ranks)) for stage in stages] for rank in ranks]

    def check(self, path: Path, said: tuple[int, int]) -> None:
        """Make sure that every part of the model is there.

        Args:
            path: of the checkpoint, for errors.
            said: tensor-parallel ranks and pipeline stages of the training; 1 where it does not say.

        Raises:
            CheckpointError: naming the ranks whose files are missing.
        """
        dense = {(rank, stage) for rank, stage, _ in self.files}
        missing = _missing(dense, tuple(map(max, self._sizes, said)))
        what = "(tensor, pipeline)"
        if not missing and self.has_apart:
            n = self.expert_tensor_ranks
            there = {(rank % n, stage, expert) for rank, stage, expert in self.files}
            missing = _missing(there, (n, self._sizes[1], self.expert_ranks))
            what = "(tensor of experts, pipeline, expert)"
        if missing:
            raise CheckpointError(
                f"{path} lacks the files of the training ranks {what} {' '.join(missing[:_SHOWN])}",
                "copy the checkpoint again",
            )

    @property
    def _sizes(self) -> tuple[int, int]:
        tensor, pipeline = (1 + max(place[axis] for place in self.files) for axis in (0, 1))
        return tensor, pipeline

    def _all(self, rank: int, stage: int) -> tuple[str, ...]:
        found = sorted((e, name) for (r, s, e), name in self.files.items() if (r, s) == (rank, stage))
        return tuple(name for _, name in found)


def _missing(there: Set[tuple[int, ...]], sizes: tuple[int, ...]) -> list[str]:
    """List the first places that are missing; a file's name may say that there are 10^9 of them."""
    return [str(each) for each in islice(_places(*sizes), len(there) + _SHOWN) if each not in there]


def _places(size: int, *sizes: int) -> Iterator[tuple[int, ...]]:
    for number in range(size):
        yield from ((number, *others) for others in (_places(*sizes) if sizes else ((),)))


def grid_of(files: Mapping[tuple[int, ...], str], arguments: Mapping[str, Any], path: Path) -> RankGrid:
    """Read the places of files out of their names and the training's arguments.

    Args:
        files: name by the numbers in its folder's.
        arguments: of the training; empty: they were not saved.
        path: of the checkpoint, for errors.

    Raises:
        CheckpointError: the arguments say otherwise than the names, or files are missing.
    """
    expert_num = _size(arguments, "num_experts")
    expert_ranks = _size(arguments, "expert_model_parallel_size") or 1
    places: dict[tuple[int, int, int], str] = {}
    for (tensor, *others), name in files.items():
        expert = others.pop() if expert_ranks > 1 and others else 0
        if len(others) > 1:
            raise CheckpointError(f"{path}: {name} names three ranks, and expert_model_parallel_size is 1", _OTHERWISE)
        places[tensor, others[0] if others else 0, expert] = name
    tensor_ranks, stages = (_size(arguments, f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline"))
    ranks = max(tensor_ranks, 1 + max(tensor for tensor, _, _ in places))
    expert_tensor_ranks = (_size(arguments, "expert_tensor_parallel_size") if expert_num else None) or ranks
    problem = ""
    if ranks % expert_tensor_ranks:
        problem = f"expert_tensor_parallel_size {expert_tensor_ranks} does not divide the {ranks} tensor-parallel ranks"
    elif (expert_num or 0) % expert_ranks:
        problem = f"expert_model_parallel_size {expert_ranks} does not divide the {expert_num} experts"
    elif arguments.get(_EXTENDED) and expert_ranks > 1:
        problem = f"{_EXTENDED} {shown(arguments[_EXTENDED])}: each expert is cut for all {expert_ranks} expert ranks"
    if problem:
        raise CheckpointError(f"{path}: {problem}", _OTHERWISE)
    grid = RankGrid(places, expert_num or 0, expert_ranks, expert_tensor_ranks)
    grid.check(path, (tensor_ranks, stages))
    return grid


def _size(arguments: Mapping[str, Any], name: str) -> int | None:
    value = arguments.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
