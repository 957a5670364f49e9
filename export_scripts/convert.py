"""Convert a checkpoint into FasterTransformer's shards, a directory of Hugging Face, or its adapter into PEFT's.

    python3 -m export_scripts.convert --checkpoint=gpt.nemo --output=1-gpu --tensor-para-size=1 --weight-data-type=fp16
    python3 -m export_scripts.convert --checkpoint=gpt.nemo --output=hf --format=huggingface --weight-data-type=bf16

Tensors are mapped out of the archive one at a time, rearranged, split, cast and written with their digests in one
pass. A killed conversion continues where it stopped.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from export_scripts.arguments import HUGGINGFACE, PEFT, ConvertArguments
from export_scripts.conversion.write.room import NO_ROOM, Room, room_for
from handover.errors import exit_status
from handover.manifest import Manifest
from handover.signatures.sealing import Seal

# What a plan is made of, hundreds of thousands of small objects, is needed to the end: looking for garbage among them
# took a tenth of a second of one that started alone.
_COLLECTED_EVERY = 50_000
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def convert(arguments: ConvertArguments, opened: Seal | None = None, room: Room = NO_ROOM) -> Manifest:
    """Convert a checkpoint and write the manifest last.

    Raises:
        CheckpointError: the checkpoint cannot be converted; see ``inspect_source`` and ``plan_huggingface``.
        ArtefactError: the disk is full or the output directory holds foreign files.
    """
    seal = opened or Seal.open(arguments)
    # What writes the other forms is not imported: that is half of the time in which a conversion starts.
    if arguments.format == HUGGINGFACE:
        from export_scripts.targets.huggingface.convert import convert_to_huggingface

        return convert_to_huggingface(arguments, seal, room)
    if arguments.format == PEFT:
        from export_scripts.targets.peft.convert import convert_to_peft

        return convert_to_peft(arguments, seal)
    from export_scripts.targets.fastertransformer.convert import convert_to_shards

    return convert_to_shards(arguments, seal)


def main(argv: Sequence[str]) -> None:
    """Run the conversion that the arguments name."""
    gc.set_threshold(_COLLECTED_EVERY)
    gc.freeze()
    os.environ.setdefault(_BLAS_THREADS, "1")  # numpy starts one for each processor; the processes share those
    arguments = ConvertArguments.from_argv(argv, description=__doc__)
    seal = Seal.open(arguments)
    if arguments.hub_name:
        from export_scripts.checkpoints.huggingface.hub import fetch

        fetch(
            arguments.hub_name, arguments.checkpoint, say=lambda line: print(f"convert: note: {line}", file=sys.stderr)
        )
    with room_for(arguments) as room:
        convert(arguments, seal, room)
    gc.freeze()  # the interpreter looks for garbage once more at its end, which took as long again as half of planning


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "convert"))
