"""An endpoint that is given by a path is found wherever its stages run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs.composed import compose

from handover.endpoint import FILE_NAME, Endpoint
from launcher.config.choices import Stage
from launcher.config.schema import register
from launcher.pipeline import plan_stages
from launcher.plan.paths import RunPaths


@pytest.mark.parametrize("given", ["mine", f"mine/{FILE_NAME}", "localhost:8001", "http://host:8000/v1"])
def test_a_path_is_absolute_in_plans_and_an_address_is_unchanged(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    Endpoint("localhost", grpc_port=8001).write(tmp_path / "mine" / FILE_NAME)
    monkeypatch.chdir(tmp_path)
    register()
    config = compose([f"deployment.endpoint={given}"])
    plans = plan_stages(config, RunPaths.of(config), [Stage.evaluate, Stage.benchmark])[:2]
    expected = str(tmp_path / given) if given.startswith("mine") else given
    assert all(f"--endpoint={expected}" in plan.commands[0].argv for plan in plans)
