"""Ray on each node, from which an engine takes the processes of its GPUs: ``deployment.distributed_executor=ray``.

Each supervisor runs ``ray start --block`` for its node, the first one Ray's head; the engine is one program, on the
first node, and starts once Ray runs on all. Ray listens on all of a host's addresses, and who reaches it runs what he
likes there: so every start has a token of its own. As of Ray 2.60 (``ray/scripts/scripts.py``), vLLM 0.33
(``vllm/v1/executor/ray_utils.py``: it knows the nodes by their addresses) and SGLang 0.5.23 (``sglang/srt/ray``).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from deployment.arguments import EngineArguments
from deployment.doors.address import place_of
from deployment.engines.nodes import Meeting
from deployment.engines.process import EngineServer
from deployment.engines.table import PROGRAMS
from handover.errors import ServerError

RAY = "ray"
"""Value of ``deployment.distributed_executor``."""

_PROGRAM = "ray"
_FIRST_WITH_TOKENS = (2, 52)
_ASK_TIMEOUT_S = 120.0
_STARTED = "Ray runtime started."
_OBJECTS_BYTES = 1 << 30
"""For the store of objects; vLLM passes weights and tokens by other ways, and a pod's /dev/shm is small."""
_LONGEST_PLACE = 42
"""Linux limits the path of a socket to 107 bytes; Ray's are in session_<time>_<pid>/sockets below its directory."""


def find_ray(arguments: EngineArguments) -> str:
    """Return Ray's program: that beside the engine's, as in one venv, or the one on PATH."""
    engine = _engine_of(arguments)
    beside = Path(shutil.which(engine) or engine).parent / _PROGRAM
    return str(beside) if beside.is_file() else _PROGRAM


def _engine_of(arguments: EngineArguments) -> str:
    return (arguments.command or PROGRAMS[arguments.engine].command)[0]


def check_ray(arguments: EngineArguments) -> None:
    """Make sure that Ray is there, and keeps strangers out.

    Raises:
        ServerError: it is not, or is too old for that.
    """
    program, least = find_ray(arguments), ".".join(map(str, _FIRST_WITH_TOKENS))
    install = f"install it beside the engine (pip install 'ray>={least}'), or take deployment.distributed_executor=mp"
    if shutil.which(program) is None:
        raise ServerError(
            f"Ray is not here: there is no program '{_PROGRAM}' beside {_engine_of(arguments)} or on PATH", install
        )
    words = (program, "--version")
    asked = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_ASK_TIMEOUT_S)
    version = re.search(r"version (\d+)\.(\d+)", asked.stdout)
    if version is None or (int(version[1]), int(version[2])) < _FIRST_WITH_TOKENS:
        said = (asked.stdout + asked.stderr).strip().splitlines()
        raise ServerError(
            f"{program} --version says '{said[-1] if said else ''}': before {least} Ray runs what anybody sends it "
            "who reaches its ports",
            install,
        )


def node_address(address: str, rank: int) -> str:
    """Return the address of a node for Ray; processes of one host get one each, as 127.0.0.1 stands for all of it."""
    return f"127.0.0.{rank + 2}" if address == "127.0.0.1" else address


def head_of(meeting: Meeting) -> str:
    """Return where Ray's head is, as Ray's programs are told it."""
    return place_of(node_address(meeting.address, 0), meeting.port)


def ray_argv(arguments: EngineArguments, meeting: Meeting, address: str, directory: Path) -> tuple[str, ...]:
    """Build the command line of one node's Ray; pure but for where its program is.

    It offers as many GPUs as the engine uses on the node, so that they are used on all nodes alike.
    """
    gpus = str(arguments.tensor_para_size * arguments.pipeline_para_size // meeting.count)
    words = [find_ray(arguments), "start", "--block", "--node-ip-address", address, "--temp-dir", str(directory)]
    words += ["--num-gpus", gpus, "--num-cpus", gpus, "--object-store-memory", str(_OBJECTS_BYTES)]
    words += ["--dashboard-agent-listen-port", "0", "--log-color", "false"]
    words += ["--min-worker-port", "0", "--max-worker-port", "0"]  # the kernel's: Ray's own may hold the head's port
    if meeting.rank:
        return (*words, "--address", head_of(meeting))
    words += ["--head", "--port", str(meeting.port), "--ray-client-server-port", str(meeting.port + 1)]
    return (*words, "--include-dashboard", "false", "--disable-usage-stats", "--no-monitor")


def ray_environment(environment: Mapping[str, str], token: str) -> dict[str, str]:
    """Return a node's variables with those by which Ray's programs know each other, and refuse all others."""
    others = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}  # of another Ray
    return {**others, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}


class RayNode(EngineServer):
    """Ray's processes of one node.

    Args:
        arguments: of the deployment.
        meeting: which of the nodes this is.
        address: of this node.
        environment: of Ray's processes, among them those that compute.
        directory: private, for its sockets too.
        log: file for what it prints.
        is_again: it is started again.

    Raises:
        ServerError: it cannot be started.
    """

    session = "ray"

    def __init__(
        self,
        arguments: EngineArguments,
        meeting: Meeting,
        address: str,
        environment: Mapping[str, str],
        directory: Path,
        log: Path,
        is_again: bool,
    ) -> None:
        if len(str(directory)) > _LONGEST_PLACE:
            raise ServerError(
                f"Ray cannot put its sockets below {directory}: their paths would be too long for Linux",
                "set TMPDIR to a shorter path, such as /tmp",
            )
        argv = ray_argv(arguments, meeting, address, directory)
        super().__init__("Ray", argv, environment, directory, log, is_again)
        self._has_started = False

    @property
    def has_started(self) -> bool:
        """Whether it runs, and the head knows it."""
        if not self._has_started:
            with self._log.open("rb") as stream:
                stream.seek(self._log_read_bytes)
                self._has_started = _STARTED.encode() in stream.read()
        return self._has_started
