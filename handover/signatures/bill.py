"""A CycloneDX bill of materials for a model: its files, what they were made from, and measured figures.

``cyclonedx-python-lib`` has no model card, so that the document is written here; the tests validate it by that library.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from handover.manifest import Manifest
from handover.provenance import VERSION

SPECIFICATION = "1.6"
_NAMES = ("model_name", "checkpoint", "title")
"""Keys of ``made_from`` that name the model, the first that is there."""
_TASK = "text-generation"
Figures = Iterable[Mapping[str, Any]]
"""Each has type, value and slice, as CycloneDX's performance metrics, and may have a confidence interval."""


def bill_of_materials(
    stage: str, manifest: Manifest, made: Mapping[str, str], made_from: Mapping[str, str], figures: Figures
) -> str:
    """Render the bill of a directory."""
    said = manifest.made_from
    name = next((str(said[key]).rstrip("/").rpartition("/")[2] for key in _NAMES if said.get(key)), manifest.kind)
    model = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": name,
        "version": manifest.digest,
        "description": f"{manifest.kind.replace('_', ' ')}, written by the stage {stage}",
        "modelCard": {"modelParameters": {"task": _TASK, **_architecture(said)}, **_measured(figures)},
        "properties": [
            {"name": f"slipway:{key}", "value": value if isinstance(value, str) else json.dumps(value)}
            for key, value in sorted(said.items())
        ],
        "components": [_file(f"made/{path}", path, digest) for path, digest in sorted(made.items())],
    }
    sources = [_file(f"from/{path}", path, digest) for path, digest in sorted(made_from.items())]
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{stage} {manifest.digest}')}",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "slipway", "version": VERSION}]},
            "component": model,
        },
        "components": sources,
        "dependencies": [{"ref": "model", "dependsOn": [each["bom-ref"] for each in sources]}],
    }
    return json.dumps(content, indent=1) + "\n"


def _architecture(said: Mapping[str, Any]) -> dict[str, str]:
    known = {"modelArchitecture": said.get("source_format"), "architectureFamily": said.get("family")}
    return {name: str(value) for name, value in known.items() if value}


def _measured(figures: Figures) -> dict[str, Any]:
    found = [dict(figure) for figure in figures]
    return {"quantitativeAnalysis": {"performanceMetrics": found}} if found else {}


def _file(reference: str, name: str, digest: str) -> dict[str, Any]:
    return {
        "type": "file",
        "bom-ref": reference,
        "name": name,
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }
