"""Hydra's mode is what Hydra itself finds, and the configuration is not composed for it where nothing says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from launcher.config.hydra_mode import compose_for_it_only_where_it_is_said
from launcher.config.schema import PROJECT_DIR, register

FILES = {
    "says_it": "hydra: {mode: MULTIRUN}\n",
    "by_a_default": "defaults: [{override hydra/job_logging: none}]\nhydra: {verbose: true}\n",
    "broken": "a: [\n",
}


@pytest.mark.parametrize(
    ("name", "overrides", "compositions"),
    [
        *(("config", [], 0), ("config", ["stages=[convert]"], 0), ("by_a_default", [], 0)),
        *(("config", ["hydra.mode=MULTIRUN"], 1), ("config", ["++hydra.mode=RUN"], 1), ("says_it", [], 1)),
        *(("broken", [], 1), ("absent", [], 1)),
    ],
)
def test_the_mode_is_hydras(
    name: str, overrides: list[str], compositions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    for file, content in FILES.items():
        (tmp_path / f"{file}.yaml").write_text(content)
    usual, compose, composed = Hydra.get_mode, Hydra.compose_config, []

    def note_and_compose(*given: Any, **named: Any) -> Any:
        composed.append(named)
        return compose(*given, **named)

    monkeypatch.setattr(Hydra, "get_mode", usual)  # for what is replaced to be restored
    compose_for_it_only_where_it_is_said()
    directory = PROJECT_DIR / "conf" if name == "config" else tmp_path
    with hydra.initialize_config_dir(str(directory), version_base="1.3"):
        main = GlobalHydra.instance().hydra
        assert main
        expected = usual(main, name, overrides)
        monkeypatch.setattr(Hydra, "compose_config", note_and_compose)
        assert main.get_mode(name, overrides) == expected
    assert len(composed) == compositions
    assert (expected == RunMode.MULTIRUN) == (name == "says_it" or overrides == ["hydra.mode=MULTIRUN"])
