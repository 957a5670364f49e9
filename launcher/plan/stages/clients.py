"""What evaluate and benchmark have in common: both ask a server that must be there."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError
from launcher.config.schema import Config, Stage
from launcher.plan.paths import RunPaths


def check_server(config: Config, paths: RunPaths, stages: Collection[Stage]) -> None:
    """Look for the server that clients will ask: this run's own, a given one, or one that stands.

    Raises:
        ConfigError: there is none, it serves other results, or it serves conversations only.
        ServerError: the given endpoint cannot be read.
    """
    _check_sessions(config, stages)
    if config.deployment.endpoint:
        Endpoint.read(config.deployment.endpoint)
    elif Stage.deploy not in stages:
        _check_standing(paths)


def _check_sessions(config: Config, stages: Collection[Stage]) -> None:
    """The stateful store is for conversations: its tensors have one axis more than evaluation and benchmark send."""
    triton = config.export.triton_deployment
    askers = [stage.value for stage in (Stage.evaluate, Stage.benchmark) if stage in stages]
    if triton.interactive_sessions and askers and not config.deployment.endpoint:
        raise ConfigError(
            f"export.triton_deployment.interactive_sessions={triton.interactive_sessions} makes a stateful store, "
            f"which {' and '.join(askers)} cannot ask",
            "take interactive_sessions=0 for them",
        )


def _check_standing(paths: RunPaths) -> None:
    try:
        served = Endpoint.read(paths.endpoint).model_repository
    except ServerError:
        raise ConfigError(
            f"nothing is deployed: there is no {paths.endpoint}",
            "add deploy to stages, or give deployment.endpoint=<file or host:port>",
        ) from None
    exist = bool(served) and Path(served).is_dir() and paths.model_repository.is_dir()
    if exist and not paths.model_repository.samefile(served):
        raise ConfigError(
            f"nothing of these results is deployed: {paths.endpoint} was copied, it is that of {served}",
            "add deploy to stages; to ask that other server, give its file as deployment.endpoint",
        )
