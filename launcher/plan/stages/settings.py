"""What all stages derive from the configuration in the same way."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handover.signatures.arguments import PKCS11, SigningArguments, TrustArguments
from launcher.config.choices import ContainerRuntime
from launcher.config.options import filled
from launcher.config.schema import Config, SigningConfig
from launcher.config.secrets import plain_variables
from launcher.plan.paths import RunPaths
from launcher.plan.plan import Resources
from launcher.plan.topology import Topology, spread, topology

_CLEARING_S = 30.0


@dataclass
class _Signing:
    signing: SigningConfig


@dataclass
class Known:
    """What the check of a stage has found out, for those of the stages after it.

    Attributes:
        model: the checkpoint that is converted; empty where none is opened.
        is_encoder_decoder: it is a T5.
    """

    model: str = ""
    is_encoder_decoder: bool = False


def environment(config: Config) -> dict[str, str]:
    """``env_vars`` without those that are null, and without secrets, which jobs inherit: no plan holds one."""
    return plain_variables(config)


def resources(
    config: Config, time_limit: str, nodes: int, gpus_per_node: int, container: str | None = None
) -> Resources:
    """Resources of a stage, in a container of its own or the run's, unless there is nothing to run that."""
    mounts = tuple(mount for mount in config.container_mounts if mount)
    container = container or config.container
    if config.cluster.container_runtime is ContainerRuntime.none:
        container = None
    return Resources(nodes, gpus_per_node, time_limit, container, mounts)


def grace_s(config: Config) -> float:
    """Return the seconds that a server and all that runs beside it have to end, after those for requests in flight."""
    return config.deployment.exit_timeout_s + _CLEARING_S


def signing(config: Config) -> SigningArguments:
    """Return by which key stages sign, and whose signatures count; what is a file is absolute."""
    key = config.signing.key
    if key is not None and not key.startswith(PKCS11):
        key = os.path.abspath(os.path.expanduser(key))
    return filled(SigningArguments, _Signing(config.signing), signing_key=key)


def trust(config: Config) -> dict[str, Any]:
    """Return what of it a stage is told that signs nothing."""
    given = signing(config)
    return {entry.name: getattr(given, entry.name) for entry in dataclasses.fields(TrustArguments)}


def serving_topology(config: Config) -> Topology:
    """GPUs and nodes that the served model takes; all on one node where there is no GPU and no number is given."""
    tensor_para_size = config.export.model.tensor_model_parallel_size
    pipeline_para_size = config.export.triton_deployment.pipeline_model_parallel_size
    gpus_per_node, deployment = config.cluster.gpus_per_node or 0, config.deployment
    copies = (deployment.data_parallel_size or 1) if deployment.engine.is_program else 1
    if deployment.nodes is not None and deployment.engine.is_program:
        return spread(deployment.nodes, tensor_para_size, pipeline_para_size, gpus_per_node, copies)
    if not gpus_per_node:
        return Topology(0, 1, None)
    return topology(tensor_para_size, pipeline_para_size, gpus_per_node, copies)


def asked_endpoint(config: Config, paths: RunPaths) -> str:
    """What evaluate and benchmark ask: the endpoint that was given, a file by its absolute path, or the run's own."""
    given = config.deployment.endpoint
    if not given:
        return str(paths.endpoint)
    path = Path(given).expanduser()  # relative to where main.py was started, and stages run elsewhere
    return str(path.absolute()) if path.exists() else given


def expected_repository(config: Config, paths: RunPaths) -> Path | None:
    """The repository that the endpoint must serve; None where another deployment was given on purpose."""
    return None if config.deployment.endpoint else paths.model_repository
