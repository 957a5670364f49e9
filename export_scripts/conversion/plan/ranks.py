"""For how many ranks a model can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, isqrt

from ft_format.layout import KV_HEADS, Dims
from handover.errors import CheckpointError

_IN_WORDS = {"head_num": "the model's {} heads", "inter_size": "the feed-forward's width {}"}


def check_split(ranks: int, dims: Dims, divided: Sequence[str]) -> None:
    """Refuse a tensor_para_size that does not divide what it must.

    Args:
        ranks: tensor_para_size.
        dims: of the model.
        divided: attributes of the dimensions that it must divide.

    Raises:
        CheckpointError: it does not divide the heads or the feed-forward's width.
    """
    sizes = {name: dims.axis_size(name) for name in divided}
    wrong = [
        _IN_WORDS.get(name, name + " {}").format(size) for name, size in sizes.items() if ranks < 1 or size % ranks
    ]
    problem = f"does not divide {' and '.join(wrong)}" if wrong else _problem_of_groups(ranks, dims)
    if problem:
        raise CheckpointError(
            f"tensor_para_size {ranks} {problem}",
            f"legal: {', '.join(map(str, possible_ranks(dims, divided)))}",
        )


def _problem_of_groups(ranks: int, dims: Dims) -> str:
    """Return why heads of keys and values can be neither shared out nor copied, if they cannot."""
    heads = getattr(dims, KV_HEADS, ranks)
    if heads % ranks == 0 or ranks % heads == 0:
        return ""
    return f"neither divides {KV_HEADS} {heads} nor is a multiple of it"


def possible_ranks(dims: Dims, divided: Sequence[str]) -> list[int]:
    """List every tensor_para_size that divides what it must."""
    common = gcd(*(dims.axis_size(name) for name in divided))
    small = [n for n in range(1, isqrt(common) + 1) if common % n == 0]
    every = {*small, *(common // n for n in small)}
    return sorted(ranks for ranks in every if not _problem_of_groups(ranks, dims))
