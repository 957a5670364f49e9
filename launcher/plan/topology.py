"""How many GPUs and nodes a tensor- and pipeline-parallel model takes."""

from __future__ import annotations

from dataclasses import dataclass

from handover.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """GPUs, nodes and, where a node has more GPUs than are used, the visible ones.

    Attributes:
        gpus: tensor_para_size x pipeline_para_size.
        nodes: hosts that they fill.
        cuda_devices: CUDA_VISIBLE_DEVICES of the server's task; None where all GPUs of the nodes are used.
    """

    gpus: int
    nodes: int
    cuda_devices: str | None


def topology(tensor_para_size: int, pipeline_para_size: int, gpus_per_node: int) -> Topology:
    """Lay TP x PP GPUs out over whole nodes.

    FasterTransformer uses every GPU that a process sees and the same number on each node, so a model
    takes part of one node or all of several.

    Raises:
        ConfigError: the GPUs neither fit one node nor fill several.
    """
    gpus = tensor_para_size * pipeline_para_size
    size = f"TP {tensor_para_size} x PP {pipeline_para_size} = {gpus} GPUs"
    if gpus <= gpus_per_node:
        devices = ",".join(map(str, range(gpus))) if gpus < gpus_per_node else None
        return Topology(gpus, 1, devices)
    if gpus % gpus_per_node:
        whole = [n * gpus_per_node for n in (gpus // gpus_per_node, gpus // gpus_per_node + 1)]
        raise ConfigError(
            f"{size} do not fill nodes of {gpus_per_node} GPUs",
            f"take a product of up to {gpus_per_node}, or a multiple of it such as {whole[0]} or {whole[1]} "
            "(export.model.tensor_model_parallel_size, "
            "export.triton_deployment.pipeline_model_parallel_size, cluster.gpus_per_node)",
        )
    return Topology(gpus, gpus // gpus_per_node, None)
