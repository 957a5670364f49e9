"""Read the jobs in a directory by the packages of their launchers, and print what these understood, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def skypilot(file: Path) -> dict[str, Any]:
    import sky

    task = sky.Task.from_yaml(str(file))
    (resources,) = task.resources
    return {
        "nodes": task.num_nodes,
        "gpus": resources.accelerators or {},
        "image": resources.image_id[None],
        "env": task.envs,
        "volumes": task.volumes,
        "run": task.run,
    }


def lepton(file: Path) -> dict[str, Any]:
    from leptonai.api.v1.types.job import LeptonJobUserSpec

    said = json.loads(file.read_text())
    spec = LeptonJobUserSpec(**said)
    understood = spec.model_dump(by_alias=True, exclude_unset=True)
    assert understood == said, "it drops what it does not know"
    assert spec.container.command and spec.envs is not None
    return {
        "nodes": spec.completions,
        "shape": spec.resource_shape,
        "image": spec.container.image,
        "env": {each.name: each.value for each in spec.envs if each.value},
        "secrets": {each.name: each.value_from.secret_name_ref for each in spec.envs if each.value_from},
        "run": spec.container.command[-1],
    }


def main(directory: Path) -> None:
    read = {"skypilot": skypilot, "lepton": lepton}
    found = {
        f"{folder}/{file.name}": function(file)
        for folder, function in read.items()
        for file in sorted((directory / folder).iterdir())
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
