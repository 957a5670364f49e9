"""Tokens and passwords: they come from the environment, by name, and no file that is written here ever holds one.

Jobs inherit the environment of who submits them: sbatch passes it on, and processes of this machine have it anyway. A
secret that is written into the configuration would stand in plans, in Hydra's files and in the shell's history.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from handover.errors import ConfigError
from launcher.config.choices import ContainerRuntime
from launcher.config.schema import Config

_ENDINGS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "APIKEY")
_PLACES = ("PATH", "FILE", "DIR", "URL")  # a name that ends so says where a secret is
_ASSIGNMENT = re.compile(r"\b([A-Za-z_][A-Za-z0-9_]*)=(?=[\"']?([^\s,;'\"]+))")
_BY_NAME = re.compile(r"\$\{oc\.env:\w+\}")
_ENVIRONMENT = "env_vars"
_KEY_NAMES = ("deployment.endpoint_key_env", "signing.password_env")
"""Keys that name the variable with a secret."""


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is a secret: HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, ...

    TOKENIZERS_PARALLELISM, MAX_TOKENS, NCCL_IB_PKEY and HF_TOKEN_PATH are none.
    """
    words = name.upper().split("_")
    return words[-1] not in _PLACES and any(word == "KEY" or word.endswith(_ENDINGS) for word in words)


def check_command_line(words: Sequence[str]) -> None:
    """Refuse secrets among the settings of a command line, before Hydra keeps it in a file.

    Raises:
        ConfigError: one is written there.
    """
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key in _KEY_NAMES:
            _check_key_name(key, value.strip("'\""))
        if _ENVIRONMENT not in word:
            continue
        try:
            override = OverridesParser.create().parse_override(word)
        except Exception:  # whatever is wrong with it, Hydra says so next
            continue
        _check_variables(dict(_variables(override.key_or_group, override.value())), is_written=True)


def _check_key_name(key: str, name: str) -> None:
    """Refuse what is not the name of a variable that is set: it may be the key itself, which is not shown."""
    if name not in ("", "null") and name not in os.environ:
        raise ConfigError(
            f"{key} does not name a variable of this environment",
            f"export the secret, and give the variable's name: export API_KEY=...; {key}=API_KEY",
        )


def check_secrets(config: Config) -> None:
    """Refuse secrets in the configuration that are not the environment's own.

    Raises:
        ConfigError: ``env_vars`` holds one, or a text somewhere else assigns one to a variable.
    """
    _check_variables(config.env_vars, is_written=False)
    for key, text in _texts(config, ""):
        for name, value in _ASSIGNMENT.findall(text):
            if is_secret(name) and not value.startswith("$"):
                raise ConfigError(f"{key} holds {name}=..., which looks like a secret", _hint(name))


def plain_variables(config: Config) -> dict[str, str]:
    """``env_vars`` without those that are null or secret: what plans and command lines may show."""
    given = {name: value for name, value in config.env_vars.items() if value is not None}
    return {name: str(value) for name, value in given.items() if not is_secret(name)}


def passed_by_name(config: Config) -> list[str]:
    """Flags that have a container of docker, which inherits nothing, take secrets from the environment of the job."""
    keys = config.deployment.endpoint_key_env, config.signing.password_env
    contained = config.cluster.container_runtime is ContainerRuntime.docker
    named = {name for name in config.env_vars if is_secret(name)} | set(filter(None, keys))
    return [f"--env={name}" for name in sorted(named)] if contained else []


def _check_variables(given: Mapping[str, Any], is_written: bool) -> None:
    for name, value in given.items():
        if not is_secret(name) or value is None or str(value) in ("", "null"):
            continue
        is_named = bool(_BY_NAME.fullmatch(str(value))) if is_written else str(value) == os.environ.get(name)
        if not is_named:
            raise ConfigError(f"{_ENVIRONMENT}.{name} looks like a secret, which nothing here writes down", _hint(name))


def _hint(name: str) -> str:
    return (
        f"export {name} in the environment of main.py (on Base Command Platform, of the job), where every stage finds "
        f"it; for docker name it: '{_ENVIRONMENT}.{name}=${{oc.env:{name}}}'"
    )


def _variables(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Variables that a setting gives a value, by name."""
    first, _, name = key.partition(".")
    if first != _ENVIRONMENT:
        return
    if name:
        yield name, value
    elif isinstance(value, dict):
        yield from ((str(inner), one) for inner, one in value.items())


def _texts(section: Any, place: str) -> Iterator[tuple[str, str]]:
    """Every text of the configuration but the variables themselves, with its key."""
    for entry in dataclasses.fields(section):
        key, value = f"{place}{entry.name}", getattr(section, entry.name)
        if dataclasses.is_dataclass(value):
            yield from _texts(value, f"{key}.")
        elif key != _ENVIRONMENT:
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            yield from ((key, one) for one in held if isinstance(one, str))
