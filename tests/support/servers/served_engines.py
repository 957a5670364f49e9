"""Servers of other projects under supervision, with a stand-in for their programs."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployment.arguments import EngineArguments
from handover.endpoint import Endpoint
from launcher.plan.plan import PYTHON, Resources, python_module
from launcher.run.on_this_host import ThisHost
from support.engine_programs import PATH
from support.servers.served import wait_for

PROJECT = Path(__file__).resolve().parents[3]


class Served:
    """``python -m deployment.engines.serve`` over the stand-in, in a process of its own, or one a node of this host."""

    def __init__(
        self,
        directory: Path,
        place: Path,
        how: str = "",
        engine: str = "vllm",
        python: str = PYTHON,
        **settings: Any,
    ) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.place, self.file, self.log = place, place / "endpoint.json", place / "server.log"
        self.output = place / "output.txt"
        settings = {"data_type": "fp32", **settings}
        arguments = EngineArguments(engine, directory, "llama", self.file, self.log, **settings)
        module = python_module("deployment.engines.serve", arguments)
        module = replace(module, argv=(python, *module.argv[1:]))
        with self.output.open("wb") as stream:
            self.process = subprocess.Popen(
                ThisHost().wrap(module, Resources(settings.get("nodes", 1))),
                cwd=PROJECT,
                env={**os.environ, "PATH": PATH, "STAND_IN": how},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> Endpoint:
        wait_for(lambda: "serving" in self.text or self.process.poll() is not None)
        assert self.process.poll() is None, self.text
        return Endpoint.read(self.file)

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def printed(self) -> str:
        """What the programs have printed, in the order of their nodes."""
        return "".join(log.read_text() for log in sorted(self.place.glob(f"{self.log.stem}*{self.log.suffix}")))

    @property
    def children(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"^child (\d+) region", self.printed, re.MULTILINE)]

    def assert_nothing_is_left(self) -> None:
        regions = re.findall(r"region (\S+)$", self.printed, re.MULTILINE)
        assert self.children and len(regions) == len(self.children)
        wait_for(lambda: not any(is_alive(pid) for pid in self.children))
        wait_for(lambda: not any((Path("/dev/shm") / name).exists() for name in regions))
        wait_for(lambda: not list(self.place.glob(".endpoint*")) and not self.file.exists())


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
