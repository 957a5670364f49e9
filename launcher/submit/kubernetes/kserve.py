"""KServe's objects of an exported model: who serves it from where, told what the run's own server would be told.

Field names are those of ``serving.kserve.io`` v1beta1 (InferenceService) and v1alpha2 (LLMInferenceService), runtimes
those that KServe installs: ``kserve-vllmserver``, ``kserve-tritonserver``, and for LLMInferenceService templates, whose
container has the name ``main``. A runtime's arguments come first, those of an object after them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from deployment.arguments import EngineArguments
from deployment.engines.table import MODEL_PLACE, VLLM, build_argv
from handover.durable import write_atomically
from handover.errors import ConfigError
from launcher.clusters.kubernetes import check_values
from launcher.clusters.kubernetes_names import Names, literal, run_name
from launcher.config.choices import Engine, Stage
from launcher.config.schema import Config
from launcher.plan.paths import RunPaths
from launcher.plan.stages import deploy_program
from launcher.plan.stages.settings import environment, serving_topology
from launcher.submit.kubernetes.directory import as_text
from launcher.submit.kubernetes.pods import Manifest, Pods

_URI = re.compile(r"[a-z][a-z0-9+.-]*://\S+")
_CPUS = 4
_OF_THE_RUNTIME = ("host", "http_port")
"""Arguments of an engine's program that KServe's runtimes settle."""


def check(config: Config, paths: RunPaths) -> None:
    """Refuse what KServe's runtimes do not serve, and what a manifest must say that is not known; nothing if not asked.

    Raises:
        ConfigError: naming the key.
    """
    if config.export.manifest is None:
        return
    engine, layout = config.deployment.engine, serving_topology(config)
    check_values(config)
    if engine not in (Engine.vllm, Engine.slipway):
        raise ConfigError(
            f"export.manifest=kserve with deployment.engine={engine}: {_reason(engine)}",
            "take deployment.engine=vllm, which serves the Hugging Face directory, or deployment.engine=slipway",
        )
    if layout.nodes > 1:
        raise ConfigError(
            f"export.manifest=kserve with {layout.gpus} GPUs on {layout.nodes} nodes: KServe's runtimes serve a model "
            "on one node",
            "lower tensor or pipeline parallelism, or take cluster_type=kubernetes, which renders a LeaderWorkerSet",
        )
    if config.deployment.affinity_header is not None:
        raise ConfigError(
            "export.manifest=kserve with deployment.affinity_header: KServe's gateway chooses among its replicas",
            "leave it out",
        )
    if not config.kubernetes.memory.get(Stage.deploy.name):
        raise ConfigError(
            "export.manifest=kserve without kubernetes.memory.deploy: KServe's runtimes give a server 2Gi",
            "say what the server takes of its node's memory: kubernetes.memory.deploy=64Gi",
        )
    if engine is Engine.slipway and not _image(config):
        raise ConfigError(
            "export.manifest=kserve with deployment.engine=slipway and without container: Triton's own image has not "
            "the drop-in engine",
            "container=registry.example/slipway-triton:24.10: docker/Dockerfile is its recipe",
        )
    _uri(config, paths)


def _reason(engine: Engine) -> str:
    """Why an engine has no manifest."""
    if engine is Engine.vllm_triton:
        return "its model.json names the weights by their path in the results, and KServe mounts them at /mnt/models"
    if engine is Engine.fastertransformer:
        return "its model_checkpoint_path counts from the server's working directory, which KServe does not set"
    return "KServe has no runtime of it"


def files_of(config: Config, paths: RunPaths) -> dict[Path, str]:
    """Return the files by their paths, in a directory of the run's results; none where they are not asked for."""
    if config.export.manifest is None:
        return {}
    objects = [_for_vllm, _for_llm] if config.deployment.engine is Engine.vllm else [_for_triton]
    manifests = [make(config, paths) for make in objects]
    return {paths.results / "kserve" / f"{each['kind'].lower()}.yaml": as_text(each) for each in manifests}


def preview(config: Config, paths: RunPaths) -> str:
    """Return the files as they would be written."""
    return "".join(f"=== {file}\n{text}" for file, text in files_of(config, paths).items())


def write(config: Config, paths: RunPaths) -> None:
    """Write the files."""
    for file, text in files_of(config, paths).items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)


def _for_vllm(config: Config, paths: RunPaths) -> Manifest:
    words = _vllm_flags(config, paths, _OF_THE_RUNTIME)
    model = {"modelFormat": {"name": "vLLM"}, "runtime": "kserve-vllmserver", "args": list(map(literal, words))}
    return _inference_service(config, paths, "vllm", model)


def _for_triton(config: Config, paths: RunPaths) -> Manifest:
    """Return the object of a model repository; the engine's processes share memory, of which the runtime has little."""
    deployment = config.deployment
    flags = ["--disable-auto-complete-config", f"--exit-timeout-secs={deployment.exit_timeout_s}"]
    memory = {"medium": "Memory", "sizeLimit": config.kubernetes.shared_memory}
    model = {
        "modelFormat": {"name": "triton", "version": "2"},
        "runtime": "kserve-tritonserver",
        "protocolVersion": "v2",
        "args": [*flags, *map(literal, deployment.server_args)],
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    return _inference_service(config, paths, "triton", model, volumes=[{"name": "shared-memory", "emptyDir": memory}])


def _inference_service(config: Config, paths: RunPaths, suffix: str, model: Manifest, **pod: object) -> Manifest:
    container = {
        "storageUri": _uri(config, paths),
        **_image(config),
        "env": _environment(config, paths),
        "resources": _resources(config),
    }
    count = config.deployment.replicas
    predictor = {
        "minReplicas": count,
        "maxReplicas": count,
        **_placing(config, paths),
        **pod,
        "model": {**model, **container},
    }
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": _metadata(config, paths, suffix),
        "spec": {"predictor": predictor},
    }


def _for_llm(config: Config, paths: RunPaths) -> Manifest:
    """Return the object whose template starts vLLM: its tensor parallelism is a field, the rest are flags."""
    words = _vllm_flags(config, paths, (*_OF_THE_RUNTIME, "model_name", "tensor_para_size"))
    flags = {"name": "VLLM_ADDITIONAL_ARGS", "value": literal(shlex.join(words))}  # a shell reads them
    container = {
        "name": "main",
        **_image(config),
        "env": [*_environment(config, paths), flags],
        "resources": _resources(config),
    }
    spec = {
        "model": {"uri": _uri(config, paths), "name": config.export.run.model_train_name},
        "replicas": config.deployment.replicas,
        "parallelism": {"tensor": config.export.model.tensor_model_parallel_size},
        "router": {"gateway": {}, "route": {}},
        "template": {**_placing(config, paths), "containers": [container]},
    }
    return {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceService",
        "metadata": _metadata(config, paths, "llm"),
        "spec": spec,
    }


def _vllm_flags(config: Config, paths: RunPaths, leave_out: Collection[str]) -> list[str]:
    """Return the flags that the run's own deploy stage would give the program."""
    *_, command = deploy_program.plan(config, paths).commands
    arguments = replace(EngineArguments.from_argv(command.argv[3:]), command=("vllm", MODEL_PLACE))
    told = {name: flag for name, flag in VLLM.flags.items() if name not in leave_out}
    return list(build_argv(replace(VLLM, flags=told), arguments, 0)[2:])


def _pods(config: Config, paths: RunPaths) -> Pods:
    given = config.kubernetes
    names = Names(run_name(given.name, config.export.run.model_train_name, paths.results))
    return Pods(names, given, config.cluster.cpus_per_task, "")


def _metadata(config: Config, paths: RunPaths, suffix: str) -> Manifest:
    names = _pods(config, paths).names
    namespace = config.kubernetes.namespace
    where = {"namespace": namespace} if namespace else {}
    return {"name": f"{names.run}-{suffix}", **where, "labels": names.selector}


def _image(config: Config) -> Manifest:
    """Return the image, where one is given in the place of the runtime's own; vLLM is in none of the stages' images."""
    of_stages = config.container if config.deployment.engine is Engine.slipway else None
    image = config.deployment.container or of_stages
    return {"image": image} if image else {}


def _environment(config: Config, paths: RunPaths) -> list[Manifest]:
    plain = [{"name": name, "value": literal(value)} for name, value in sorted(environment(config).items())]
    return [*plain, *_pods(config, paths).secrets()]


def _resources(config: Config) -> Manifest:
    """Return requests and limits; of what is left out here the runtime's count, which are small."""
    gpus = serving_topology(config).gpus
    given = {
        "cpu": str(config.cluster.cpus_per_task or _CPUS),
        "memory": str(config.kubernetes.memory[Stage.deploy.name]),
        **({config.kubernetes.gpu_resource: gpus} if gpus else {}),
    }
    return {"requests": given, "limits": given}


def _placing(config: Config, paths: RunPaths) -> Manifest:
    return _pods(config, paths).placing() if serving_topology(config).gpus else {}


def _uri(config: Config, paths: RunPaths) -> str:
    """Return where KServe finds the model: as it is given, or below the path at which pods have a claim.

    Raises:
        ConfigError: it is no address, or no claim has the model.
    """
    given = config.export.manifest_uri
    if given is not None:
        if not _URI.fullmatch(given):
            raise ConfigError(f"export.manifest_uri={given} is no address", "s3://bucket/model, pvc://claim/model")
        return given
    for claim, path in config.kubernetes.volumes.items():
        if paths.model_repository.is_relative_to(str(path)):
            return f"pvc://{claim}/{paths.model_repository.relative_to(str(path))}"
    raise ConfigError(
        f"export.manifest=kserve: {paths.model_repository} is on none of kubernetes.volumes, and nothing says where "
        "the cluster finds it",
        f"kubernetes.volumes={{CLAIM: {paths.model_repository.parent}}}, or export.manifest_uri=s3://bucket/model",
    )
