"""The program that serves, of an engine of another project, and its first words."""

from __future__ import annotations

import shlex
from typing import Any

from deployment.engines.table import PROGRAMS, VLLM, EngineProgram
from handover.errors import ConfigError, shortened
from launcher.config.schema import Config


def program_of(config: Config) -> EngineProgram:
    """The program that computes: vLLM also where it is a backend of Triton."""
    return PROGRAMS.get(str(config.deployment.engine), VLLM)


def command_of(config: Config) -> tuple[str, ...]:
    """Words of ``deployment.command``; empty where it is not given."""
    return words_of(config.deployment.command, "deployment.command", shlex.join(program_of(config).command))


def words_of(given: Any, key: str, usual: str) -> tuple[str, ...]:
    """Words of a command that is text or a list; empty where it is not given.

    Args:
        given: value of the key.
        key: for messages.
        usual: what is taken where nothing is given.

    Raises:
        ConfigError: it is neither text nor a list of words, or its quotes are not closed.
    """
    try:
        words = shlex.split(given) if isinstance(given, str) else list(map(str, given or ()))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{key} is {shortened(repr(given))}: {error}",
            f"it is text such as '/path/to/venv/bin/{usual}', or a list of words",
        ) from None
    if given is not None and not any(words):
        raise ConfigError(f"{key} is empty", f"leave it at null for '{usual}'")
    return tuple(words)
