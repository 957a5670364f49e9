"""Which GPUs the server may use, of those that its task sees. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping

from deployment.triton.installation import SLIPWAY
from handover.errors import ServerError, shortened

VARIABLE = "CUDA_VISIBLE_DEVICES"
_POSITIONS = re.compile(r"\d{1,4}(,\d{1,4})*")


def visible_devices(cuda_devices: str, engine: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Choose the server's GPUs inside its task.

    Slurm sets CUDA_VISIBLE_DEVICES in each task to all GPUs of the step, whatever was there before, and
    FasterTransformer uses every GPU that it sees. Set from outside, the variable would not arrive.

    Args:
        cuda_devices: positions among the GPUs that this task sees, with commas; empty for all of them.
        engine: that is served.
        environment: of this task.

    Returns:
        The variable to set; empty where it stays as it is.

    Raises:
        ServerError: these are no positions, or an engine that drives all GPUs of a node from one process sees fewer
            than it needs.
    """
    given = environment.get(VARIABLE)
    if not cuda_devices:
        return {}
    if not _POSITIONS.fullmatch(cuda_devices):
        raise ServerError(f"--cuda-devices={shortened(cuda_devices)}", "write positions with commas: 0,1")
    if given is None:  # nothing is withheld: the positions are the numbers
        return {VARIABLE: cuda_devices}
    seen = [device for device in given.split(",") if device]
    positions = [int(position) for position in cuda_devices.split(",")]
    if len(seen) > max(positions):
        return {VARIABLE: ",".join(seen[position] for position in positions)}
    if engine != SLIPWAY:
        raise ServerError(
            f"the model takes {len(positions)} GPUs of a node, and this task sees {len(seen)} ({VARIABLE}={given})",
            "give the job more (cluster.gpus_per_node, without cluster.gpus_per_task), or lower "
            "export.model.tensor_model_parallel_size",
        )
    return {}  # our engine takes a GPU a task, or the CPU
