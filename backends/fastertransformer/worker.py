"""A worker: a rank other than 0, which takes the steps that rank 0 announces until rank 0 ends.

``python3 -m backends.fastertransformer.worker``. The variable SLIPWAY_RANKS has its rank (see engine/parallel/rank.py),
and rank 0 sends the settings. It needs no Triton.
"""

from __future__ import annotations

import argparse
import os
import sys

from .engine import EngineError
from .engine.loading import load_steps
from .engine.model.precision import choose_device
from .engine.parallel.group import Group
from .engine.parallel.rank import VARIABLE, read_ranks
from .engine.steps.ranks import follow


def main() -> int:
    """Load and take steps; exit status 0 if rank 0 has announced its shutdown."""
    try:
        ranks = read_ranks(os.environ)
        if ranks is None:
            raise EngineError(f"{VARIABLE} is not set")
        device = choose_device(local_rank=ranks.local_rank)
        group = Group(ranks, device)
        steps, description = load_steps(group.settings, device, group)
        sys.stderr.write(f"fastertransformer: {description}\n")
        follow(steps, group)
    except EngineError as error:
        sys.stderr.write(f"fastertransformer: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    status = main()
    sys.stderr.flush()
    os._exit(status)  # without torch.distributed's own shutdown, which waits for processes that may be lost
