"""Build a model repository for Triton's vLLM backend from a Hugging Face directory.

The format is that of triton-inference-server/vllm_backend (README and ``samples/model_repository``, 2026-01): a
``config.pbtxt`` that names the backend and leaves the devices to vLLM, and ``1/model.json`` with settings of vLLM.
The backend adds inputs, outputs and the decoupled policy itself, so tritonserver must be started without
``--disable-auto-complete-config``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from export_scripts.arguments import ExportVllmArguments
from export_scripts.repository.model_repository import link_or_copy, reopen, source_files
from export_scripts.repository.names import check_model_name
from handover.digests import file_digest
from handover.errors import ArtefactError
from handover.manifest import ORIGIN, FileRecord, Manifest, artefact_files
from handover.provenance import made_by
from handover.signatures.sealing import Seal

KIND = "vllm_repository"
WEIGHTS = "1/huggingface"
"""Directory of the Hugging Face files below the model's."""
_TORCH = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_COMMENT = "# Written by Slipway's export. The backend vllm gives the model its inputs and outputs; see model.json.\n"


def build_vllm_repository(arguments: ExportVllmArguments) -> Manifest:
    """Write the repository and, last, its manifest; the weights are hard links, and copies across file systems.

    Raises:
        ConfigError: the model's name is illegal.
        ArtefactError: the Hugging Face directory is incomplete, or the output directory holds foreign files.
    """
    check_model_name(arguments.model_name)
    seal = Seal.open(arguments)
    source = Manifest.read(arguments.huggingface)
    if problems := source.problems(arguments.huggingface, check_digests=False):
        listed = "\n  ".join(problems)
        raise ArtefactError(f"{arguments.huggingface} is not what its manifest says:\n  {listed}", "convert again")
    seal.take_up(arguments.huggingface)
    root, model = arguments.output, arguments.model_name
    reopen(root, KIND)
    records = []
    for record in source.files:
        path = f"{model}/{WEIGHTS}/{record.path}"
        link_or_copy(arguments.huggingface / record.path, root / path)
        records.append(replace(record, path=path))
    texts = {f"{model}/config.pbtxt": _config(model), f"{model}/1/model.json": _engine_settings(arguments)}
    for path, content in texts.items():
        target = root / path
        target.unlink(missing_ok=True)
        target.write_text(content, encoding="utf-8")
        records.append(FileRecord(path, target.stat().st_size, file_digest(target)))
    if foreign := sorted(set(artefact_files(root)) - {record.path for record in records}):
        raise ArtefactError(
            f"{root} holds files that export did not write: {', '.join(foreign[:10])}", "move them away"
        )
    made_from = {
        "huggingface": str(arguments.huggingface),
        "huggingface_digest": source.digest,
        ORIGIN: {**source.made_from, **source.made_by},
        "data_type": arguments.data_type,
    }
    manifest = Manifest(KIND, tuple(sorted(records, key=lambda record: record.path)), made_from, made_by())
    seal.finish("export", root, manifest, source_files(source, arguments.huggingface))
    return manifest


def _config(name: str) -> str:
    """Render the model's configuration: KIND_MODEL leaves the choice of GPUs to vLLM."""
    config = model_config_pb2.ModelConfig(name=name, backend="vllm")
    config.instance_group.add(count=1, kind=model_config_pb2.ModelInstanceGroup.KIND_MODEL)
    return _COMMENT + str(text_format.MessageToString(config, as_utf8=True))


def _engine_settings(arguments: ExportVllmArguments) -> str:
    """Render vLLM's settings; the path of the weights is absolute, since the backend's process starts anywhere."""
    settings: dict[str, Any] = {
        "model": str(Path(arguments.repository).absolute() / arguments.model_name / WEIGHTS),
        "served_model_name": arguments.model_name,
        "dtype": _TORCH[arguments.data_type],
        "tensor_parallel_size": arguments.tensor_para_size,
        "pipeline_parallel_size": arguments.pipeline_para_size,
        "max_model_len": arguments.max_model_len,
        "max_num_seqs": arguments.max_num_seqs,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
    }
    return json.dumps({name: value for name, value in settings.items() if value is not None}, indent=2) + "\n"
