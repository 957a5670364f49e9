"""Which of several processes this is: the one that starts them says so in the environment variable SLIPWAY_RANKS."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import EngineError

VARIABLE = "SLIPWAY_RANKS"


@dataclass(frozen=True)
class Ranks:
    """One process among several.

    Attributes:
        rank, world_size: of all.
        local_rank, local_size: of those on this host.
        rendezvous: file on a filesystem that all share; rank 0 writes it.
        run: tells this start from earlier ones with the same file.
        timeout_s: seconds until all must have come.
        silence_s: seconds without a sign of life after which a rank is lost.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    rendezvous: str
    run: str
    timeout_s: float
    silence_s: float = 20.0

    @property
    def is_one_host(self) -> bool:
        """Whether nobody on another host takes part."""
        return self.local_size == self.world_size


def read_ranks(environment: Mapping[str, str]) -> Ranks | None:
    """Read SLIPWAY_RANKS, a JSON object of Ranks' attributes; None where it is not set."""
    text = environment.get(VARIABLE)
    try:
        return Ranks(**json.loads(text)) if text else None
    except (ValueError, TypeError) as error:
        raise EngineError(f"{VARIABLE} = {text} is not what it must be: {error}") from error
