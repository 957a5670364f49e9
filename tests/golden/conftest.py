"""Hydra's state, fresh for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra.core.global_hydra import GlobalHydra

from launcher.config.schema import register


@pytest.fixture(autouse=True)
def schema() -> Iterator[None]:
    register()
    yield
    GlobalHydra.instance().clear()
