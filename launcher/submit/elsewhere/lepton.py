"""DGX Cloud Lepton: a job's specification in JSON, which ``lep job create --file`` takes (leptonai 0.27)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.submit.elsewhere.launcher import Launcher
from launcher.submit.elsewhere.script import Script

_WITHOUT_GPU = "cpu.large"
_SHARED_MEMORY_MB = 8192


class Lepton(Launcher):
    """Specifications of ``lep job create``."""

    name = "lepton"
    suffix = ".json"

    def render(self, script: Script, file: Path) -> str:
        """Return the specification; a flag of the command line wins over what it says, such as another shape."""
        shape = f"gpu.{script.gpus}x{script.gpu_type.lower()}" if script.gpus else _WITHOUT_GPU
        variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in script.variables.items()]
        variables += [
            {"name": name, "value_from": {"secret_name_ref": place.partition("/")[0] or name}}
            for name, place in script.secrets.items()
        ]
        job = {
            "resource_shape": shape,
            "container": {
                **({"image": script.image} if script.image else {}),
                "command": ["/bin/bash", "-c", script.shell("LEPTON_JOB_WORKER_INDEX", "hostname -i")],
            },
            "completions": script.nodes,
            "parallelism": script.nodes,
            "intra_job_communication": script.nodes > 1,
            "shared_memory_size": _SHARED_MEMORY_MB,
            "envs": variables,
            "mounts": [{"from": name, "path": "/", "mount_path": path} for name, path in script.volumes.items()],
        }
        return json.dumps(job, indent=1) + "\n"

    def start(self, script: Script, file: Path) -> list[str]:
        """Return the command that starts it."""
        return ["lep", "job", "create", f"--name={script.name}", f"--file={file}"]
