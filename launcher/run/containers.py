"""How each container runtime is told to run a command: pure functions from words to words.

Directories are mounted at the same path inside, so that a plan means the same on the host and in the container.
Standard library only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME")
_RANK_VARIABLES = (  # what a process that mpirun started knows itself and its daemon by: OpenMPI 4 with its PMIx
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK")),
    *("OMPI_MCA_ess", "OMPI_MCA_orte_ess_num_procs"),
    *(f"PMIX_{name}" for name in ("BFROP_BUFFER_TYPE", "DSTORE_ESH_BASE_PATH", "GDS_MODULE", "HOSTNAME", "NAMESPACE")),
    *(f"PMIX_{name}" for name in ("PTL_MODULE", "RANK", "SECURITY_MODE", "SERVER_TMPDIR", "SYSTEM_TMPDIR", "VERSION")),
    *(f"PMIX_SERVER_URI{version}" for version in ("2", "21", "3", "4")),
)


def outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Leave out what the mount of another directory shows anyway, such as results below the repository."""
    chosen = list(dict.fromkeys(paths))
    return tuple(path for path in chosen if not set(map(str, PurePath(path).parents)) & set(chosen))


def container_name(image: str) -> str:
    """What the steps of this job call the container of an image, so that only the first of them imports it."""
    digest = hashlib.sha256(image.encode()).hexdigest()[:8]
    return f"slipway-{os.environ.get('SLURM_JOB_ID', 'JOB')}-{digest}"


def pyxis(image: str, mounts: Sequence[str], directory: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """Flags that pyxis gives srun (https://github.com/NVIDIA/pyxis).

    Args:
        image: as enroot names it, or a squashfs file.
        mounts: directories to mount at the same path.
        directory: to start in.
        env: whose values shall hold although the image has its own; the rest of the environment is inherited.
    """
    listed = ",".join(f"{path}:{path}" for path in mounts)
    # no_exec: a step has a container of its own, with its own environment, over files that are there already.
    flags = (f"--container-image={image}", f"--container-name={container_name(image)}:no_exec")
    names = (f"--container-env={','.join(sorted(env))}",) if env else ()
    return (*flags, f"--container-mounts={listed}", f"--container-workdir={directory}", *names)


def pyxis_removal(image: str) -> tuple[str, ...]:
    """Command that removes a job's container from a node; where pyxis does so itself, there is none of that name."""
    return ("enroot", "remove", "--force", f"pyxis_{container_name(image)}")


def apptainer(
    image: str, mounts: Sequence[str], directory: str, env: Mapping[str, str], with_gpus: bool, more: Sequence[str]
) -> tuple[str, ...]:
    """Prefix of a command that runs in an Apptainer image.

    Args:
        image: a file, a URI, or the name of an image in a registry, as pyxis and docker take it.
        mounts: directories to mount at the same path.
        directory: to start in.
        env: whose values shall hold although the image has its own; the rest of the environment is inherited.
        with_gpus: show the node's GPUs.
        more: flags.
    """
    is_name = "://" not in image and not image.startswith(("/", ".")) and not image.endswith(".sif")
    source = f"docker://{image}" if is_name else image
    binds = tuple(f"--bind={path}:{path}" for path in mounts)
    variables = tuple(f"--env={_quote_field(f'{name}={env[name]}')}" for name in sorted(env))
    gpus = ("--nv",) if with_gpus else ()
    return ("apptainer", "exec", *binds, *variables, f"--pwd={directory}", *gpus, *more, source)


def _quote_field(pair: str) -> str:
    """Apptainer takes what holds a second '=' for a line of comma-separated values."""
    return '"' + pair.replace('"', '""') + '"' if pair.count("=") > 1 else pair


def docker(
    image: str,
    mounts: Sequence[str],
    directory: str,
    env: Mapping[str, str],
    is_rank: bool,
    with_gpus: bool,
    more: Sequence[str],
) -> tuple[str, ...]:
    """Prefix of a command that runs in a Docker container of its own, as if on the host but for its files.

    The container shares the host's network, processes and shared memory, which MPI needs between ranks, and
    writes as the user who runs the job.

    Args:
        image: its name.
        mounts: directories to mount at the same path.
        directory: to start in.
        env: variables to set, as docker inherits none.
        is_rank: pass on what mpirun tells the process.
        with_gpus: show the node's GPUs.
        more: flags.
    """
    words = ["docker", "run", "--rm", "--network=host", "--pid=host", "--ipc=host", "--cap-add=IPC_LOCK"]
    words += [f"--user={os.getuid()}:{os.getgid()}", *(["--gpus=all"] if with_gpus else [])]
    words += [f"--volume={path}:{path}" for path in mounts] + [f"--workdir={directory}"]
    words += [f"--env={name}" for name in (*_JOB_VARIABLES, *(_RANK_VARIABLES if is_rank else ()))]
    words += [f"--env={name}={env[name]}" for name in sorted(env)]
    return (*words, *more, image)


def mpirun(nodes: int, tasks_per_node: int) -> tuple[str, ...]:
    """Prefix that starts a command on the first nodes of the allocation; OpenMPI asks Slurm for their names.

    Its daemons are started as an overlapping step, so that they do not wait for one that runs already.
    """
    size = ["-np", str(nodes * tasks_per_node), "--map-by", f"ppr:{tasks_per_node}:node", "--oversubscribe"]
    return ("mpirun", "--allow-run-as-root", *size, "-mca", "plm_slurm_args", "--overlap")
