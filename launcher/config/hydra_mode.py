"""Hydra composes the whole configuration once to see ``hydra.mode``, a sixth of what main.py takes to start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf


def compose_for_it_only_where_it_is_said() -> None:
    """Replace how Hydra learns its mode: where neither an override nor the primary file says it, it has none."""
    usual: Callable[..., Any] = Hydra.get_mode

    def get_mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        is_said = any("hydra" in override.partition("=")[0] for override in overrides)
        if is_said or config_name is None or _says_it(self, config_name):
            return usual(self, config_name, overrides)
        return None

    setattr(Hydra, "get_mode", get_mode)  # noqa: B010  (mypy lets no method be assigned)


def _says_it(hydra: Hydra, config_name: str) -> bool:
    try:
        found = hydra.config_loader.repository.load_config(config_name)  # type: ignore[attr-defined]
        return found is None or OmegaConf.select(found.config, "hydra.mode") is not None
    except Exception:  # composing words it
        return True
