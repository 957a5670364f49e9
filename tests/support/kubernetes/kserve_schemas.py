"""Schemas of KServe's objects that are written: the fields that are used, in our words, and no other.

From the types of KServe at commit aaac4e29: ``pkg/apis/serving/v1beta1`` (InferenceService) and ``v1alpha2``
(LLMInferenceService), and the arguments of ``config/runtimes`` and ``config/llmisvcconfig``.
"""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string", "minLength": 1}
_WORDS = {"type": "array", "items": {"type": "string"}}
_NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 55}  # pods' names are longer
_LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
_URI = {"type": "string", "pattern": "^(pvc|s3|gs|hf|https|oci)://[^\\s]+$"}


def _object(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these properties alone."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_SIZES = {
    "type": "object",
    "properties": {"cpu": _TEXT, "memory": _TEXT},
    "required": ["cpu", "memory"],
    "additionalProperties": {"type": "integer", "minimum": 1},  # devices
}
_VARIABLE = _object(
    "name", name=_TEXT, value={"type": "string"},
    valueFrom=_object("secretKeyRef", secretKeyRef=_object("name key", name=_TEXT, key=_TEXT)),
)  # fmt: skip
_CONTAINER = {
    "image": _TEXT,
    "env": {"type": "array", "items": _VARIABLE},
    "resources": _object("requests limits", requests=_SIZES, limits=_SIZES),
}
_PLACING = {
    "nodeSelector": _LABELS,
    "tolerations": _list(_object("key operator effect", key=_TEXT, operator=_TEXT, effect=_TEXT)),
}
_MEMORY = _object("medium sizeLimit", medium={"const": "Memory"}, sizeLimit=_TEXT)


def _resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _object("name labels", name=_NAME, namespace=_NAME, labels=_LABELS)
    head = {"apiVersion": {"const": f"serving.kserve.io/{version}"}, "kind": {"const": kind}, "metadata": metadata}
    return _object("apiVersion kind metadata spec", **head, spec=spec)


_MODEL = _object(
    "modelFormat runtime storageUri args resources",
    modelFormat=_object("name", name={"enum": ["vLLM", "triton"]}, version={"enum": ["1", "2"]}),
    runtime={"enum": ["kserve-vllmserver", "kserve-tritonserver"]},
    protocolVersion={"enum": ["v2", "grpc-v2"]},
    storageUri=_URI,
    args=_WORDS,
    volumeMounts=_list(_object("name mountPath", name=_TEXT, mountPath={"pattern": "^/"})),
    **_CONTAINER,
)
_PREDICTOR = _object(
    "model",
    minReplicas={"type": "integer", "minimum": 0},
    maxReplicas={"type": "integer", "minimum": 1},
    volumes=_list(_object("name", name=_TEXT, emptyDir=_MEMORY)),
    model=_MODEL,
    **_PLACING,
)
_LLM = _object(
    "model template",
    model=_object("uri", uri=_URI, name=_TEXT),
    replicas={"type": "integer", "minimum": 0},
    parallelism=_object("", tensor={"type": "integer", "minimum": 1}),
    router=_object("", gateway={"const": {}}, route={"const": {}}),
    template=_object("containers", containers=_list(_object("name", name={"const": "main"}, **_CONTAINER)), **_PLACING),
)
SCHEMAS = {
    "InferenceService": _resource("v1beta1", "InferenceService", _object("predictor", predictor=_PREDICTOR)),
    "LLMInferenceService": _resource("v1alpha2", "LLMInferenceService", _LLM),
}
"""By kind."""
