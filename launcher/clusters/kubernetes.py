"""Kubernetes: nothing is started from here; manifests are written, which ``kubectl apply -k`` starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from deployment.doors.doors import is_loopback
from handover.errors import ConfigError
from launcher.clusters.cluster import Cluster, Replicas
from launcher.clusters.kubernetes_names import LABEL, PLANS_PATH, check_labels, check_name, is_qualified, quantity_bytes
from launcher.config.choices import ContainerRuntime, Router, Stage
from launcher.config.cluster import ClusterConfig
from launcher.config.deployment import DeploymentConfig
from launcher.config.schema import Config
from launcher.config.secrets import is_secret

_PORTS = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002, "openai_port": 9000}
"""Where a server that stays listens in its pod, where it may choose."""

_OF_SLURM = {
    "partition": "kubernetes.queue is Kueue's",
    "account": "kubernetes.queue is Kueue's",
    "gpus_per_task": "a pod has the GPUs that the model takes on a node",
    "mem": "kubernetes.memory has it for each stage",
    "overcommit": "a pod asks for cluster.cpus_per_task processors",
    "one_task_per_rank": "a pod runs one process, which joins the ranks of its node",
    "setup": "what a stage needs is in its image",
    "srun_args": "there is no srun",
    "container_args": "what the manifests lack, an overlay of kustomize adds",
    "additional_parameters": "what the manifests lack, an overlay of kustomize adds",
}
"""Keys of ``cluster`` that have no meaning here, and what has."""

_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGT]i|[kMGT])?")
_OF_PODS = ("POD_IP", "SLIPWAY_REPLICA", "VLLM_ADDITIONAL_ARGS")
_KEY_OF_SECRET = re.compile(r"[-._A-Za-z0-9]{1,253}")


class Kubernetes(Cluster):
    """A cluster that is told what to run by files."""

    executor = "kubernetes.executor"

    def replicas_are(self, config: Config) -> Replicas:
        """Servers that stay have a pod each; those with clients share one with these."""
        return Replicas.pods if serves_alone(config) else Replicas.children

    def fill_in(self, config: Config) -> None:
        """Settle the ports of a server that stays, and how many processes the conversion's memory holds."""
        deployment = config.deployment
        if serves_alone(config):
            names = ("http_port",) if deployment.engine.is_program else tuple(_PORTS)
            for name in names:
                if getattr(deployment, name) == 0:
                    setattr(deployment, name, _PORTS[name])
        memory = config.kubernetes.memory.get(Stage.convert.name)
        if isinstance(memory, str) and _QUANTITY.fullmatch(memory):
            from export_scripts.conversion.plan.sizing import processes_within

            model = config.export.model
            model.processes = max(1, min(model.processes, processes_within(quantity_bytes(memory))))

    def check(self, config: Config) -> None:
        """Refuse what no manifest can say, and names that Kubernetes does not take."""
        _check_keys(config)
        _check_image(config)
        check_values(config)
        if serves_alone(config):
            _check_doors(config.deployment)
        _check_router(config)
        _check_secrets(config)


def check_values(config: Config) -> None:
    """Refuse values of ``kubernetes`` that no object can have, whichever cluster's files they are written into.

    Raises:
        ConfigError: naming the key.
    """
    given = config.kubernetes
    for key, name in (("namespace", given.namespace), ("queue", given.queue)):
        if name is not None:
            check_name(f"kubernetes.{key}", name, LABEL)
    check_labels("kubernetes.gpu_node_selector", given.gpu_node_selector)
    if not is_qualified(given.gpu_resource) or "/" not in given.gpu_resource:
        raise ConfigError(
            f"kubernetes.gpu_resource={given.gpu_resource} cannot name a resource of nodes",
            "it has a domain: nvidia.com/gpu, nvidia.com/mig-1g.10gb",
        )
    _check_sizes(config)
    _check_places(given.volumes, given.secret_files)
    for variable, place in given.secrets.items():
        _check_secret(variable, str(place))


def serves_alone(config: Config) -> bool:
    """Whether the run's server has no clients in the run."""
    stages = set(config.stages)
    return Stage.deploy in stages and (
        config.deployment.endpoint is not None or not {Stage.evaluate, Stage.benchmark} & stages
    )


def _check_keys(config: Config) -> None:
    usual = ClusterConfig()
    for name, instead in _OF_SLURM.items():
        if (value := getattr(config.cluster, name)) != getattr(usual, name):
            raise ConfigError(f"cluster.{name}={value} says nothing to cluster_type=kubernetes", instead)
    if any(config.container_mounts):
        raise ConfigError(
            "container_mounts: pods see persistent volume claims, not directories of their node",
            "name the claim and its path: kubernetes.volumes={data: /data}",
        )
    if serves_alone(config) and {Stage.evaluate, Stage.benchmark} & set(config.stages):
        raise ConfigError(
            "deploy beside stages that ask deployment.endpoint: the server would stay, and nothing waits for it",
            "start it in a run of its own: stages=[deploy]",
        )
    forced = {stage.name for stage in config.force} & {Stage.convert.name, Stage.export.name}
    if serves_alone(config) and forced and {Stage.convert, Stage.export} & set(config.stages):
        raise ConfigError(
            f"force=[{','.join(sorted(forced))}] in the run of a server that stays: it would start on the result that "
            "is there",
            "convert and export in a run of their own, and then stages=[deploy]",
        )


def _check_image(config: Config) -> None:
    """A pod has one image, in which the runner runs too."""
    if config.cluster.container_runtime is ContainerRuntime.none:
        raise ConfigError("cluster.container_runtime=none: a pod is a container", "leave it out")
    others = set(config.stages) - {Stage.deploy}
    if config.container is None and (others or config.deployment.container is None):
        raise ConfigError(
            "cluster_type=kubernetes without container: a pod has an image",
            "container=registry.example/slipway:1.0: with the code at launcher_scripts_path, see docs/kubernetes.md",
        )
    for key, image in (("container", config.container), ("deployment.container", config.deployment.container)):
        if image is not None and not re.fullmatch(r"[a-zA-Z0-9][-\w./:@]*", image):
            raise ConfigError(f"{key}={image} is no name of an image", "registry/name:tag, or registry/name@sha256:...")
    if config.deployment.container and Stage.deploy in config.stages and not serves_alone(config):
        raise ConfigError(
            "deployment.container: a server and its clients share a pod, which has one image",
            "start the server in a run of its own, stages=[deploy], and give its address as deployment.endpoint; or "
            "take one image for all",
        )


def _check_doors(deployment: DeploymentConfig) -> None:
    """Refuse a server that stays where neither probes nor a Service reach it; its ports are settled."""
    if deployment.host is not None and is_loopback(deployment.host):
        raise ConfigError(
            f"deployment.host={deployment.host}: neither probes nor a Service reach the loopback of a pod",
            "leave it out, and the server listens on its pod's address",
        )
    seen: dict[int, str] = {}
    for name in ("http_port",) if deployment.engine.is_program else _PORTS:
        port = getattr(deployment, name)
        if port in seen:
            raise ConfigError(
                f"deployment.{seen[port]} and deployment.{name} are both {port}", "each door of a pod has its own port"
            )
        if port is not None:
            seen[port] = name


def _check_router(config: Config) -> None:
    """Hold the keys of a router against whether one is to stand before the pods: without one a Service spreads."""
    deployment, is_asked = config.deployment, config.kubernetes.router
    if is_asked and not (serves_alone(config) and deployment.replicas > 1):
        raise ConfigError(
            "kubernetes.router=true without several servers that stay: a router would stand before one pod",
            "give deployment.replicas=2 or more and no stage that asks the server, or leave it out",
        )
    if not serves_alone(config) or deployment.replicas == 1:
        return
    if deployment.router is not Router.haproxy:
        raise ConfigError(
            f"deployment.router={deployment.router} with cluster_type=kubernetes: it finds pods by Kubernetes' own "
            "API, for which it needs rights that are not rendered here",
            "take deployment.router=haproxy, which finds them by DNS",
        )
    for name in ("affinity_header", "router_command"):
        if getattr(deployment, name) is not None and not is_asked:
            raise ConfigError(
                f"deployment.{name} without kubernetes.router: a Service spreads connections, and reads no header",
                "give kubernetes.router=true too, or leave it out",
            )


def _check_sizes(config: Config) -> None:
    for stage, size in config.kubernetes.memory.items():
        if stage not in Stage.__members__:
            raise ConfigError(
                f"kubernetes.memory names {stage}, which is no stage", f"stages are {', '.join(Stage.__members__)}"
            )
        if size is not None:
            _check_quantity(f"kubernetes.memory.{stage}", size)
    _check_quantity("kubernetes.shared_memory", config.kubernetes.shared_memory)


def _check_quantity(key: str, size: object) -> None:
    if not isinstance(size, str) or not _QUANTITY.fullmatch(size) or not quantity_bytes(size):
        raise ConfigError(f"{key} is {size}", "a quantity of memory as Kubernetes writes it: 512Mi, 64Gi")


def _check_places(volumes: Mapping[str, object], secret_files: Mapping[str, object]) -> None:
    """Refuse places that are none, or that hide one another."""
    seen: dict[str, str] = {}
    for key, given in (("volumes", volumes), ("secret_files", secret_files)):
        for name, path in given.items():
            check_name(f"kubernetes.{key}", name)
            text = str(path)
            plain = PurePosixPath(text)
            if not text.startswith("/") or ":" in text or str(plain) != text or ".." in plain.parts or text == "/":
                raise ConfigError(
                    f"kubernetes.{key}.{name} is {path}", "an absolute path without colon and ..: /results"
                )
            if text in seen or text in (PLANS_PATH, "/dev/shm"):
                raise ConfigError(
                    f"kubernetes.{key}.{name} is {path}, where pods have {seen.get(text, 'something else')}",
                    "each has a path of its own",
                )
            seen[text] = name


def _check_secret(name: str, place: str) -> None:
    secret, _, key = place.partition("/")
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or not _KEY_OF_SECRET.fullmatch(key):
        raise ConfigError(
            f"kubernetes.secrets.{name} is not a variable with the secret and the key that hold its value",
            "kubernetes.secrets={HF_TOKEN: huggingface/token}",
        )
    if name in _OF_PODS:
        raise ConfigError(f"kubernetes.secrets.{name}: pods have that variable already", "name another variable")
    check_name(f"kubernetes.secrets.{name}", secret)


def _check_secrets(config: Config) -> None:
    """Hold what is referred to against what the stages read by name; a pod inherits nothing."""
    named = {name for name, value in config.env_vars.items() if value is not None and is_secret(name)}
    named |= set(filter(None, (config.deployment.endpoint_key_env, config.signing.password_env)))
    if missing := sorted(named - set(config.kubernetes.secrets)):
        raise ConfigError(
            f"{missing[0]} is a secret that stages read, and a pod inherits nothing of this environment",
            f"name the secret that holds it: kubernetes.secrets={{{missing[0]}: name/key}}",
        )
