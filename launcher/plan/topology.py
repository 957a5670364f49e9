"""How many GPUs and nodes a parallel model takes."""

from __future__ import annotations

from dataclasses import dataclass

from handover.errors import ConfigError

_KEYS = "export.model.tensor_model_parallel_size, export.triton_deployment.pipeline_model_parallel_size"


@dataclass(frozen=True)
class Topology:
    """GPUs, nodes and, where a node has more GPUs than are used, the visible ones.

    Attributes:
        gpus: tensor_para_size x pipeline_para_size x copies.
        nodes: hosts that they fill.
        cuda_devices: CUDA_VISIBLE_DEVICES of the server's task; None where all GPUs of the nodes are used.
    """

    gpus: int
    nodes: int
    cuda_devices: str | None


def topology(tensor_para_size: int, pipeline_para_size: int, gpus_per_node: int, copies: int = 1) -> Topology:
    """Lay TP x PP x DP GPUs out over whole nodes.

    FasterTransformer uses every GPU that a process sees and the same number on each node, so a model
    takes part of one node or all of several.

    Raises:
        ConfigError: the GPUs neither fit one node nor fill several.
    """
    gpus = tensor_para_size * pipeline_para_size * copies
    if gpus <= gpus_per_node:
        return Topology(gpus, 1, _devices(gpus, gpus_per_node))
    if gpus % gpus_per_node:
        whole = [n * gpus_per_node for n in (gpus // gpus_per_node, gpus // gpus_per_node + 1)]
        size = _size(tensor_para_size, pipeline_para_size, copies)
        raise ConfigError(
            f"{size} = {gpus} GPUs do not fill nodes of {gpus_per_node} GPUs",
            f"take a product of up to {gpus_per_node}, or a multiple of it such as {whole[0]} or {whole[1]} "
            f"({_KEYS}, cluster.gpus_per_node)",
        )
    return Topology(gpus, gpus // gpus_per_node, None)


def spread(nodes: int, tensor_para_size: int, pipeline_para_size: int, gpus_per_node: int, copies: int = 1) -> Topology:
    """Lay as many ranks out over a number of nodes that was given: the same on each, of part of its GPUs or all.

    Args:
        nodes: that were asked for.
        tensor_para_size: GPUs that share a layer.
        pipeline_para_size: groups of layers.
        gpus_per_node: 0 where there are none: a rank is then a process on the CPU.
        copies: of the model.

    Raises:
        ConfigError: the ranks cannot be the same number on each node, or a node has too few GPUs for its share.
    """
    ranks = tensor_para_size * pipeline_para_size * copies
    size = _size(tensor_para_size, pipeline_para_size, copies)
    if ranks % nodes:
        raise ConfigError(
            f"deployment.nodes={nodes} does not divide {size} = {ranks} ranks, of which each node has the same number",
            f"take a divisor of {ranks}, or other sizes ({_KEYS}, deployment.data_parallel_size)",
        )
    share = ranks // nodes
    if not gpus_per_node:
        return Topology(0, nodes, None)
    if share > gpus_per_node:
        raise ConfigError(
            f"deployment.nodes={nodes}: {size} = {ranks} GPUs are {share} on a node, which has {gpus_per_node} "
            "(cluster.gpus_per_node)",
            f"take deployment.nodes={-(-ranks // gpus_per_node)}, or null for as many as they fill",
        )
    return Topology(ranks, nodes, _devices(share, gpus_per_node))


def _size(tensor_para_size: int, pipeline_para_size: int, copies: int) -> str:
    return f"TP {tensor_para_size} x PP {pipeline_para_size}" + (f" x DP {copies}" if copies > 1 else "")


def _devices(used: int, gpus_per_node: int) -> str | None:
    return ",".join(map(str, range(used))) if used < gpus_per_node else None
