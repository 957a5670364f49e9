"""SkyPilot: a task in YAML, which ``sky launch`` takes (schema of SkyPilot 0.14, ``sky/utils/schemas.py``)."""

from __future__ import annotations

import math
from pathlib import Path

import yaml

from launcher.clusters.kubernetes_names import quantity_bytes
from launcher.submit.elsewhere.launcher import Launcher
from launcher.submit.elsewhere.script import Script

_OWN_ADDRESS = 'echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p"'


class _Dumper(yaml.SafeDumper):
    """One that writes a script line by line."""


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _text)


class SkyPilot(Launcher):
    """Tasks of ``sky launch``."""

    name = "skypilot"
    suffix = ".yaml"

    def render(self, script: Script, file: Path) -> str:
        """Return the task."""
        resources = {
            "cpus": f"{script.cpus}+",
            **({"memory": f"{math.ceil(quantity_bytes(script.memory) / 1e9)}+"} if script.memory else {}),
            **({"accelerators": f"{script.gpu_type}:{script.gpus}"} if script.gpus else {}),
            **({"image_id": f"docker:{script.image}"} if script.image else {}),
        }
        task = {
            "name": script.name,
            "num_nodes": script.nodes,
            "resources": resources,
            **({"volumes": {path: name for name, path in script.volumes.items()}} if script.volumes else {}),
            **({"envs": dict(script.variables)} if script.variables else {}),
            **({"secrets": dict.fromkeys(script.secrets)} if script.secrets else {}),
            "run": script.shell("SKYPILOT_NODE_RANK", _OWN_ADDRESS),
        }
        return str(yaml.dump(task, Dumper=_Dumper, sort_keys=False, width=1_000))

    def start(self, script: Script, file: Path) -> list[str]:
        """Return the command that starts it; secrets are handed on by name."""
        secrets = [f"--secret={name}" for name in script.secrets]
        return ["sky", "launch", "--yes", f"--cluster={script.name}", *secrets, str(file)]
