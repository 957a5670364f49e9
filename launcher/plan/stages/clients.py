"""What evaluate and benchmark have in common: both ask a server that must be there."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from evaluation.client.openai_client import read_key
from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError
from launcher.config.choices import Stage
from launcher.config.schema import Config
from launcher.plan.adapter_checks import asked_adapters
from launcher.plan.paths import RunPaths
from launcher.plan.stages import deploy
from launcher.plan.stages.settings import environment

_OPERATION = re.compile(
    r"--(?:model-repository|endpoint|log|host|\w+-port|api-keys-file|openai-[\w-]+|\w+-timeout-s|restart|open-apis|signing-[\w-]+)="
)
"""Arguments of a server that change nothing of what is measured."""
_TOKENIZERS = "tokenizer.json", "vocab.json", "gpt2-vocab.json", "tokenizer.model"


def check_server(config: Config, paths: RunPaths, stages: Collection[Stage]) -> None:
    """Look for the server that clients will ask: this run's own, a given one, or one that stands.

    Raises:
        ConfigError: there is none, it serves other results, or it serves conversations only.
        ServerError: the given endpoint cannot be read.
    """
    _check_sessions(config, stages)
    _check_keys(config)
    if Stage.benchmark in stages and None not in (names := asked_adapters(config)):
        raise ConfigError(
            f"deployment.adapter={names[0]} with the stage benchmark, which asks the model alone",
            "leave it out, add null to it, or take stages without benchmark",
        )
    if config.deployment.endpoint:
        endpoint = Endpoint.read(config.deployment.endpoint, config.deployment.endpoint_key_env)
        if endpoint.is_openai and not config.dry_run:
            read_key(endpoint)
    elif Stage.deploy not in stages:
        _check_standing(config, paths)


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


def _check_keys(config: Config) -> None:
    """Refuse keys of an API that is not asked."""
    deployment = config.deployment
    for key in ("endpoint_key_env", "endpoint_tokenizer"):
        if getattr(deployment, key) and not deployment.endpoint:
            raise ConfigError(
                f"deployment.{key} is given without deployment.endpoint, to which it belongs",
                "give deployment.endpoint=http://host:port/v1 too, or leave it out",
            )
    if deployment.endpoint_tokenizer and not Path(deployment.endpoint_tokenizer).expanduser().is_dir():
        raise ConfigError(
            f"deployment.endpoint_tokenizer: there is no directory {deployment.endpoint_tokenizer}",
            "name the directory of the served model's tokenizer files",
        )


def api_tokenizer(config: Config, paths: RunPaths) -> Path | None:
    """Tokenizer files for an OpenAI API that was given: those that are named, or those of this run's checkpoint.

    None where another server is asked, which has its own beside the shards, or where nothing of this run is there.
    """
    endpoint, named = config.deployment.endpoint, config.deployment.endpoint_tokenizer
    if named:
        return Path(named).expanduser().absolute()
    if not endpoint or "://" not in endpoint:
        return None
    places = [paths.ft_checkpoint, paths.huggingface, *([paths.tokenizer] if paths.tokenizer else []), paths.checkpoint]
    return next(
        (path for path in places if path.is_dir() and any((path / name).is_file() for name in _TOKENIZERS)), None
    )


def served_by(config: Config, paths: RunPaths) -> str:
    """What of the asked server decides the answers and the speed, for the fingerprint of what is measured.

    Everything that the run says of its own server counts but where it listens, how long it waits and what it shows to
    others; of a given endpoint that its file describes, what is served by which programs.
    """
    given = config.deployment.endpoint
    if given:
        return _described(Path(given).expanduser())
    server, deployment = deploy.plan_server(config, paths), config.deployment
    words = [word for command in server.commands for word in command.argv if not _OPERATION.match(word)]
    resources, tasks = server.resources, server.commands[-1].tasks_per_node
    words += [f"{name}={value}" for name, value in server.env.items() if name not in environment(config)]
    words += [f"nodes={resources.nodes}", f"gpus_per_node={resources.gpus_per_node}", f"tasks_per_node={tasks}"]
    if deployment.replicas > 1:
        words += [f"replicas={deployment.replicas}", f"router={deployment.router}"]
    return " ".join([*words, *filter(None, [resources.container])])


def _described(source: Path) -> str:
    if not source.exists():
        return ""
    found = Endpoint.read(source)
    settings = [f"{name}={value}" for name, value in sorted(found.settings.items())]
    return " ".join(filter(None, [found.engine, found.model_digest or found.model_repository, *settings]))


def _check_standing(config: Config, paths: RunPaths) -> None:
    try:
        endpoint = Endpoint.read(paths.endpoint)
    except ServerError:
        raise ConfigError(
            f"nothing is deployed: there is no {paths.endpoint}",
            "add deploy to stages, or give deployment.endpoint=<file, host:port or http://host:port/v1>",
        ) from None
    served, engine = endpoint.model_repository, config.deployment.engine
    if endpoint.engine and endpoint.engine != engine:
        raise ConfigError(
            f"the server that stands is {endpoint.engine}, and deployment.engine={engine} would be noted as measured",
            f"give deployment.engine={endpoint.engine}, or add deploy to stages",
        )
    exist = bool(served) and Path(served).is_dir() and paths.model_repository.is_dir()
    if exist and not paths.model_repository.samefile(served):
        raise ConfigError(
            f"nothing of these results is deployed: {paths.endpoint} was copied, it is that of {served}",
            "add deploy to stages; to ask that other server, give its file as deployment.endpoint",
        )
