"""A rank other than the first: holds its part of the network and takes part until rank 0 ends.

``python3 -m backends.fastertransformer.worker --help``; what it is among the others stands in SLIPWAY_RANKS, see
engine/ranks.py. It needs no Triton.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .engine.config import MODEL_TYPES
from .engine.engine import load_steps
from .engine.errors import EngineError
from .engine.parallel import Group, follow
from .engine.precision import choose_device
from .engine.ranks import VARIABLE, read_ranks
from .engine.settings import Settings


def main(argv: Sequence[str]) -> int:
    """Take part; exit status 0 if rank 0 ended in good order."""
    parser = argparse.ArgumentParser(prog="fastertransformer.worker", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="directory of the shards, <T>-gpu")
    parser.add_argument("--tensor-para-size", type=int, required=True)
    parser.add_argument("--pipeline-para-size", type=int, required=True)
    parser.add_argument("--data-type", required=True, help="fp32, fp16 or bf16")
    parser.add_argument("--cpu-threads", type=int, default=0, help="0: this process's part of the cores")
    parser.add_argument("--model-type", default="GPT", choices=sorted(MODEL_TYPES))
    parser.add_argument("--int8-mode", type=int, default=0, help="1: matrices are kept as int8")
    parser.add_argument("--made-up-weights", type=int, default=0, help="1: random weights, to measure")
    options = parser.parse_args(list(argv))
    try:
        ranks = read_ranks(os.environ)
        if ranks is None:
            raise EngineError(f"{VARIABLE} is not set")
        device = choose_device(local_rank=ranks.local_rank)
        group = Group(ranks, options.tensor_para_size, options.pipeline_para_size, device)
        settings = Settings(
            options.checkpoint,
            options.tensor_para_size,
            options.pipeline_para_size,
            options.data_type,
            options.cpu_threads,
            options.model_type,
            options.int8_mode,
            has_made_up_weights=bool(options.made_up_weights),
        )
        steps, description = load_steps(settings, device, group)
        sys.stderr.write(f"fastertransformer: {description}\n")
        follow(steps, group)
    except EngineError as error:
        sys.stderr.write(f"fastertransformer: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # without torch.distributed's own farewell, which waits for processes that may be gone
