"""``python -m launcher doctor``: check what a run will need on this host, and name the mend.

Standard library only at import time; a check that needs more imports it itself.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from handover.errors import SlipwayError
from handover.progress import human_bytes
from handover.slurm_variables import defaults, for_clients

_TIMEOUT_S = 30
_LOW_SPACE_BYTES = 20_000_000_000
_USUAL_PORTS = (8000, 8001, 8002)
_LEAST_DRIVER = 580  # of CUDA 13.0, which torch 2.13 from PyPI is built with
_IMMEDIATE_S = 10  # for a node to be free
_MARK = "slipway-doctor:"
_SAYS = f"echo {_MARK}"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        state: ok, note (works, but know it) or bad.
        mend: what to do, where something is bad.
    """

    check: str
    state: str
    text: str
    mend: str = ""

    def __str__(self) -> str:
        mend = f"\n             mend: {self.mend}" if self.mend else ""
        return f"  {self.check:<14} {self.state:<5} {self.text}{mend}"


def examine(results: Path, srun_args: Sequence[str] = ()) -> Iterator[Finding]:
    """Run every check that applies here.

    Args:
        results: directory that results will go to; it and its file system are looked at.
        srun_args: such as ``--partition=gpu``: where Slurm shall try.
    """
    checks: list[Callable[[], Finding]] = [check_python, check_tritonserver, lambda: check_space(results)]
    checks += [check_ports, check_gpus]
    for check in checks:
        yield check()
    if shutil.which("nvidia-smi"):
        yield from (check_driver(), check_compiler())
    if not shutil.which("srun"):
        yield Finding("slurm", "note", "no srun here: cluster_type=auto runs on this machine")
        return
    slurm = check_slurm()
    yield slurm
    if slurm.state != "bad":
        yield from (check_pmix(), check_pyxis(), *check_node(results, srun_args))


def check_python() -> Finding:
    """The interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 10) <= sys.version_info[:2] <= (3, 12):
        return Finding("python", "ok", f"{version}  {sys.executable}")
    return Finding("python", "bad", version, "take Python 3.10 to 3.12: PYTHON=python3.12 make demo")


def check_tritonserver() -> Finding:
    """The server and the libraries of its Python stub."""
    from deployment.doors.known_faults import faults_of, find_version, reachable
    from deployment.triton.installation import locate

    try:
        binary = locate("slipway").binary
    except SlipwayError as error:
        return Finding("tritonserver", "bad", error.problem, error.hint)
    version = find_version(binary)
    alone, guarded = (len(reachable(version, is_guarded)) for is_guarded in (False, True))
    faults = f"{len(faults_of(version))} publicly known faults, see SECURITY.md; clients reach {alone} of them, behind "
    text = f"{version or 'of unknown version'}  {binary}  {faults}the guard {guarded}"
    return Finding("tritonserver", "note" if alone else "ok", text)


def check_space(results: Path) -> Finding:
    """Free space where the results go."""
    directory = _existing(results)
    free_bytes = shutil.disk_usage(directory).free
    text = f"{human_bytes(free_bytes)} free at {directory}"
    if not os.access(directory, os.W_OK):
        return Finding("space", "bad", f"{directory} cannot be written", "choose another base_results_dir")
    if free_bytes < _LOW_SPACE_BYTES:
        return Finding("space", "note", text + "; a checkpoint in fp16 takes 2 bytes a parameter")
    return Finding("space", "ok", text)


def check_ports() -> Finding:
    """Triton's usual ports."""
    taken = []
    for port in _USUAL_PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                taken.append(port)
    if taken:
        return Finding("ports", "note", f"{', '.join(map(str, taken))} in use; by default free ports are taken")
    return Finding("ports", "ok", ", ".join(map(str, _USUAL_PORTS)) + " free")


def check_gpus() -> Finding:
    """GPUs and how they are linked: NCCL hangs where peers cannot reach each other."""
    if not shutil.which("nvidia-smi"):
        return Finding("gpus", "note", "no nvidia-smi here: the drop-in engine runs on the CPU")
    status, listed = _run("nvidia-smi", "-L")
    count = listed.count("GPU ")
    if status or not count:
        return Finding("gpus", "bad", "nvidia-smi lists no GPU", "check the driver: nvidia-smi")
    _, topology = _run("nvidia-smi", "topo", "-m")
    links = {word for line in topology.splitlines() if line.startswith("GPU") for word in line.split()}
    slow = [word for word in ("SYS", "NODE", "PHB") if word in links]
    if slow:
        text = f"{count}, some linked across {'/'.join(slow)}: tensor parallelism over them is slow and can hang"
        return Finding("gpus", "note", text, "see nvidia-smi topo -m; take GPUs that NVLink connects")
    return Finding("gpus", "ok", str(count))


def check_driver() -> Finding:
    """Whether the GPUs' driver runs the CUDA of the torch that the lock file names."""
    _, text = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    version = text.split("\n", 1)[0].strip()
    if version.split(".")[0].isdecimal() and int(version.split(".")[0]) >= _LEAST_DRIVER:
        return Finding("driver", "ok", version)
    mend = f"torch for GPUs needs driver {_LEAST_DRIVER} or newer (CUDA 13.0)"
    return Finding("driver", "bad", version or "nvidia-smi names no driver version", mend)


def check_compiler() -> Finding:
    """Whether the GPU kernels can be compiled here: Triton builds its launcher with the host's C compiler."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    mend = "Debian, Ubuntu: apt-get install gcc libc6-dev python3-dev; without it the engine does not start on a GPU"
    if not compiler:
        return Finding("compiler", "bad", "no C compiler here, which the GPU kernels need", mend)
    with tempfile.TemporaryDirectory(prefix="slipway-doctor-") as directory:
        source = Path(directory, "module.c")
        source.write_text("#include <Python.h>\nint module(void) { return PY_MAJOR_VERSION; }\n")
        headers = f"-I{sysconfig.get_path('include')}"
        output = str(source.with_suffix(".so"))
        status, text = _run(compiler, str(source), "-shared", "-fPIC", headers, "-o", output)
    if status:
        lines = text.strip().splitlines() or ["it does not start"]
        return Finding("compiler", "bad", f"{compiler} builds no Python module: {lines[0]}", mend)
    return Finding("compiler", "ok", compiler)


def check_slurm() -> Finding:
    """The controller."""
    status, text = _run("scontrol", "ping")
    if status == 0 and " UP" in text:
        return Finding("slurm", "ok", text.strip().splitlines()[0])
    return Finding("slurm", "bad", "the controller does not answer", "check scontrol ping and SLURM_CONF")


def check_pmix() -> Finding:
    """PMIx, without which all MPI ranks think that they are rank 0."""
    _, text = _run("srun", "--mpi=list")
    if "pmix" in text:
        return Finding("pmix", "ok", ", ".join(sorted({word for word in text.split() if word.startswith("pmix")})))
    mend = "install Slurm's pmix plugin, or give cluster.srun_args=[--mpi=pmi2] where no program takes MPI itself"
    return Finding("pmix", "bad", "srun --mpi=list has no pmix", mend)


def check_pyxis() -> Finding:
    """pyxis, which gives srun its --container-image."""
    _, text = _run("srun", "--help")
    if "--container-image" in text:
        return Finding("pyxis", "ok", "srun takes --container-image")
    return Finding("pyxis", "note", "srun has no --container-image: leave container unset")


def check_node(results: Path, srun_args: Sequence[str]) -> tuple[Finding, ...]:
    """Whether a node sees a file that was just written to the results, and has the interpreter of the jobs."""
    directory = _existing(results)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".slipway-doctor-") as file:
        script = f"{_SAYS} shared; test -e {shlex.quote(file.name)} && {_SAYS} sees; "
        script += f"{shlex.quote(sys.executable)} -c pass && {_SAYS} runs"
        size = (f"--immediate={_IMMEDIATE_S}", "--nodes=1", "--ntasks=1")
        usual = [f"--{option}={value}" for option, value in defaults(os.environ).items()]
        _, text = _run("srun", *size, *usual, *srun_args, "sh", "-c", script)
    said = {line.removeprefix(f"{_MARK} ") for line in text.splitlines() if line.startswith(_MARK)}
    if not said:
        return (_refused(text),)
    shared = Finding("shared files", "ok", f"a node sees {directory}")
    if "sees" not in said:
        mend = "choose a base_results_dir on shared storage"
        shared = Finding("shared files", "bad", f"a node does not see {directory}", mend)
    if "runs" in said:
        return shared, Finding("nodes", "ok", f"a node runs {sys.executable}")
    mend = "put the checkout with its .venv on shared storage"
    return shared, Finding("nodes", "bad", f"a node cannot run {sys.executable}", mend)


def _refused(text: str) -> Finding:
    """Word why srun gave no node; nothing is known of shared files then."""
    said = [line.removeprefix("srun: ").removeprefix("error: ") for line in text.splitlines() if "srun: " in line]
    reason = next((line for line in said if not line.startswith("job ")), "srun said nothing")
    if any(word in text for word in ("Immediate", "queued and waiting", "temporarily unable", "nodes are busy")):
        return Finding("nodes", "note", f"no node was free within {_IMMEDIATE_S} s: not looked at", "try again later")
    _, partitions = _run("sinfo", "-h", "-o", "%R")
    legal = ", ".join(sorted(set(partitions.split()))) or "sinfo lists none"
    return Finding(
        "nodes", "bad", f"srun refuses: {reason}", f"give --partition ({legal}) or --account as the jobs have"
    )


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _run(*command: str) -> tuple[int, str]:
    try:
        ended = subprocess.run(
            command, env=for_clients(os.environ), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 1, ""
    return ended.returncode, ended.stdout + ended.stderr
