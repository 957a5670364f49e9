"""How each container runtime is told to run a command: a class each, from words to words.

Directories are mounted at the same path inside, so that a plan means the same on the host and in the container.
Standard library only.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME")
_RANK_VARIABLES = (  # what a process that mpirun started knows itself and its daemon by: OpenMPI 4 with its PMIx
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK")),
    *("OMPI_MCA_ess", "OMPI_MCA_orte_ess_num_procs"),
    *(f"PMIX_{name}" for name in ("BFROP_BUFFER_TYPE", "DSTORE_ESH_BASE_PATH", "GDS_MODULE", "HOSTNAME", "NAMESPACE")),
    *(f"PMIX_{name}" for name in ("PTL_MODULE", "RANK", "SECURITY_MODE", "SERVER_TMPDIR", "SYSTEM_TMPDIR", "VERSION")),
    *(f"PMIX_SERVER_URI{version}" for version in ("2", "21", "3", "4")),
)


Step = Callable[..., tuple[str, ...]]


@dataclass(frozen=True)
class Container:
    """A container in which a command runs.

    Attributes:
        image: as the runtime names it.
        mounts: directories to mount at the same path.
        directory: to start in.
        env: whose values shall hold although the image has its own.
        with_gpus: show the node's GPUs.
        more: flags for docker and apptainer.
        nodes: on which it runs, from the first.
        tasks_per_node: processes on each.
    """

    image: str
    mounts: Sequence[str]
    directory: str
    env: Mapping[str, str]
    with_gpus: bool
    more: Sequence[str]
    nodes: int = 1
    tasks_per_node: int = 1


class Runtime(ABC):
    """What starts containers.

    Attributes:
        srun_options: that this Slurm's srun must know.
    """

    srun_options: tuple[str, ...] = ()

    @abstractmethod
    def start(self, container: Container, step: Step) -> tuple[str, ...]:
        """Return what precedes a command that runs in a container."""

    def removal(self, image: str) -> tuple[str, ...]:
        """Command that removes a job's container from a node; empty where none is left."""
        return ()


def container_name(image: str) -> str:
    """What the steps of this job call the container of an image, so that only the first of them imports it."""
    digest = hashlib.sha256(image.encode()).hexdigest()[:8]
    return f"slipway-{os.environ.get('SLURM_JOB_ID', 'JOB')}-{digest}"


class Pyxis(Runtime):
    """Flags of srun (https://github.com/NVIDIA/pyxis). An image is as enroot names it, or a squashfs file."""

    srun_options = ("--container-image", "--container-env")

    def start(self, container: Container, step: Step) -> tuple[str, ...]:
        """Return a step with its container; what is not named of the environment is inherited."""
        listed = ",".join(f"{path}:{path}" for path in container.mounts)
        # no_exec: a step has a container of its own, with its own environment, over files that are there already.
        flags = (f"--container-image={container.image}", f"--container-name={container_name(container.image)}:no_exec")
        names = (f"--container-env={','.join(sorted(container.env))}",) if container.env else ()
        return step(*flags, f"--container-mounts={listed}", f"--container-workdir={container.directory}", *names)

    def removal(self, image: str) -> tuple[str, ...]:
        """Command that removes the named container; where pyxis does so itself, there is none of that name."""
        return ("enroot", "remove", "--force", f"pyxis_{container_name(image)}")


class Apptainer(Runtime):
    """A program that srun starts. An image is a file, a URI, or the name of one in a registry, as for docker."""

    def start(self, container: Container, step: Step) -> tuple[str, ...]:
        """Return a step that starts apptainer; what is not named of the environment is inherited."""
        image, env = container.image, container.env
        is_name = "://" not in image and not image.startswith(("/", ".")) and not image.endswith(".sif")
        binds = (f"--bind={path}:{path}" for path in container.mounts)
        variables = (f"--env={_quote_field(f'{name}={env[name]}')}" for name in sorted(env))
        flags = (*binds, *variables, f"--pwd={container.directory}", *(["--nv"] if container.with_gpus else []))
        source = f"docker://{image}" if is_name else image
        return (*step(), "apptainer", "exec", *flags, *container.more, source)


class Docker(Runtime):
    """A Docker container for each process, as if on the host but for its files.

    It shares the host's network, processes and shared memory, which MPI needs between ranks, and writes as the user
    who runs the job. It inherits no variable.
    """

    def start(self, container: Container, step: Step) -> tuple[str, ...]:
        """Return docker's words; a lone process needs no mpirun, as the runner is on the first node already."""
        env, nodes, tasks_per_node = container.env, container.nodes, container.tasks_per_node
        is_rank = nodes * tasks_per_node > 1
        words = ["docker", "run", "--rm", "--network=host", "--pid=host", "--ipc=host", "--cap-add=IPC_LOCK"]
        words += [f"--user={os.getuid()}:{os.getgid()}", *(["--gpus=all"] if container.with_gpus else [])]
        words += [f"--volume={path}:{path}" for path in container.mounts] + [f"--workdir={container.directory}"]
        words += [f"--env={name}" for name in (*_JOB_VARIABLES, *(_RANK_VARIABLES if is_rank else ()))]
        words += [f"--env={name}={env[name]}" for name in sorted(env)]
        return (*(_mpirun(nodes, tasks_per_node) if is_rank else ()), *words, *container.more, container.image)


RUNTIMES: Mapping[str, Runtime] = {"pyxis": Pyxis(), "docker": Docker(), "apptainer": Apptainer()}


def _quote_field(pair: str) -> str:
    """Apptainer takes what holds a second '=' for a line of comma-separated values."""
    return '"' + pair.replace('"', '""') + '"' if pair.count("=") > 1 else pair


def _mpirun(nodes: int, tasks_per_node: int) -> tuple[str, ...]:
    """Prefix that starts a command on the first nodes of the allocation; OpenMPI asks Slurm for their names.

    Its daemons are started as an overlapping step, so that they do not wait for one that runs already.
    """
    size = ["-np", str(nodes * tasks_per_node), "--map-by", f"ppr:{tasks_per_node}:node", "--oversubscribe"]
    return ("mpirun", "--allow-run-as-root", *size, "-mca", "plm_slurm_args", "--overlap")
