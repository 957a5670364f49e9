"""A real Slurm of two nodes or more with accounting, everything below one directory, for as long as its parent lives.

Each node is a slurmd in its own UTS, mount and pid namespace: own host name, own /dev/shm, own /etc/hosts, own
process table. Ending a node's first process therefore ends whatever a job has left there. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from support import PATIENCE_S
from support.slurm.slurm_files import write_files

NODES = ("node1", "node2")
PROGRAMS = ("gcc", "slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "sbatch", "srun", "unshare")

_INSTALL = Path(__file__).resolve().parents[2] / "install"
_SQL = Path("/usr/share")  # below it: mysql/mysql_..., since MariaDB 11 mariadb/mariadb_...
_PR_SET_PDEATHSIG = 1
_FINAL_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")

# The first process of a node. bash waits for orphans, as init does; arguments: name, hosts file, slurmd's command.
_NODE = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs -o size=2g tmpfs /dev/shm
shift 2
"$@" &
wait
"""


class SlurmCluster:
    """The cluster; a context manager.

    Args:
        directory: everything is kept there. It must be short: the paths of sockets are at most 107 characters.
        nodes: their names.
    """

    def __init__(self, directory: Path, nodes: Sequence[str] = NODES) -> None:
        self.directory, self.nodes = directory, nodes
        self.environment = {"SLURM_CONF": str(directory / "slurm.conf")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start every daemon and wait until all nodes are idle and the accounting answers."""
        self._check_requirements()
        try:
            self._database_port = write_files(self.directory, self.nodes)
            self._build_plugin()
            self._start_munge()
            self._start_database()
            self._start_slurm()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every daemon and everything that jobs have left on the nodes."""
        for name in reversed(self._processes):
            process = self._processes[name]
            if name in self.nodes:
                process.kill()  # the node's first process dies with it, and all others with that one
            else:
                process.terminate()
            try:
                process.wait(240)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(240)
        self._processes.clear()

    @property
    def daemons(self) -> Mapping[str, int]:
        """Pid of each daemon; a node's is that of the process that holds its namespaces."""
        return {name: process.pid for name, process in self._processes.items()}

    def client_environment(self) -> dict[str, str]:
        """Return the environment of a shell on the login node."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("NGC_", "SLURM_", "SBATCH_"))}
        return {**mine, **self.environment}

    def run(self, *argv: str, cwd: Path | None = None, timeout_s: float = 180) -> str:
        """Run a client command; returns what it printed."""
        result = subprocess.run(
            argv, cwd=cwd, env=self.client_environment(), capture_output=True, text=True, check=False, timeout=timeout_s
        )
        assert result.returncode == 0, f"{argv}: {result.returncode}\n{result.stdout}{result.stderr}"
        return result.stdout

    def states(self, *jobs: str) -> dict[str, str]:
        """Accounting's state of each job, such as COMPLETED; the part before ' by <uid>'."""
        printed = self.run("sacct", "-X", "-n", "-P", "-o", "JobIDRaw,State", "-j", ",".join(jobs))
        rows = [line.split("|") for line in printed.splitlines()]
        return {job: state.split()[0] for job, state in rows}

    def wait_for_end(self, *jobs: str, timeout_s: float = PATIENCE_S) -> dict[str, str]:
        """Wait until accounting has the final state of every job."""
        found: dict[str, str] = {}

        def all_final() -> bool:
            found.update(self.states(*jobs))
            return set(found) >= set(jobs) and all(found[job] in _FINAL_STATES for job in jobs)

        wait_until(all_final, lambda: f"jobs still at {found}\n{self._output('squeue')}\n", 0.5, timeout_s)
        return found

    @contextlib.contextmanager
    def controller_away(self) -> Iterator[None]:
        """Without slurmctld, as while it is restarted or another takes over; jobs and nodes go on."""
        process = self._processes.pop("slurmctld")
        process.terminate()
        process.wait(240)
        try:
            yield
        finally:
            self._spawn("slurmctld", "slurmctld", "-D")
            self._wait_for("slurmctld", lambda: self._answers("scontrol", "ping"))

    def processes_on(self, node: str) -> dict[int, str]:
        """Pid and command line of what runs on a node, beside the node's own daemon."""
        found = {}
        for entry in self._entries_of(node):
            with contextlib.suppress(OSError):
                argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                if argv and argv[0] not in ("bash", "slurmd"):
                    found[int(entry.name)] = " ".join(argv)
        return found

    def names_on(self, node: str) -> list[str]:
        """What the processes of a node call themselves, those without a command line too."""
        names = []
        for entry in self._entries_of(node):
            with contextlib.suppress(OSError):
                names.append((entry / "comm").read_text().strip())
        return names

    def _entries_of(self, node: str) -> Iterator[Path]:
        namespace = os.readlink(f"/proc/{self._first_process(node)}/ns/pid")
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns" / "pid") == namespace:
                    yield entry

    def shared_memory_of(self, node: str) -> list[str]:
        """Names in a node's /dev/shm."""
        return sorted(path.name for path in (self.root_of(node) / "dev/shm").iterdir())

    def root_of(self, node: str) -> Path:
        """What a node sees as its root directory."""
        return Path(f"/proc/{self._first_process(node)}/root")

    def _first_process(self, node: str) -> int:
        holder = self._processes[node].pid
        return int(Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0])

    def _check_requirements(self) -> None:
        missing = [program for program in PROGRAMS if not shutil.which(program)]
        assert not missing, f"there is no {', '.join(missing)} here; run {_INSTALL}"
        assert os.geteuid() == 0, "the Slurm tests give each node a host name of its own, which takes root"

    def received_options(self, job: str) -> dict[str, list[str]]:
        """pyxis's options that slurmd received, for each step of a job that had any; see container_options.c."""
        files = sorted((self.directory / "containers").glob(f"{job}.*"))
        return {file.name: file.read_text().splitlines() for file in files}

    def _build_plugin(self) -> None:
        source = Path(__file__).with_name("container_options.c")
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]
        made = subprocess.run(
            ["gcc", *flags, f"-o{self.directory / 'container_options.so'}", str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0 and not made.stderr, made.stderr

    def _start_munge(self) -> None:
        place = self.directory / "munge"
        key = place / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={place / name}" for option, name in files.items()]
        self._spawn("munged", "munged", "--foreground", "--force", "--num-threads=2", *options)
        self._wait_for("munged", (place / "socket").exists)

    def _start_database(self) -> None:
        place = self.directory / "db"
        server = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={place}", "--innodb-log-file-size=8M"]
        server += ["--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0", "--skip-log-bin"]
        found = [sorted(_SQL.glob(f"m*/m*_system_tables{part}.sql"))[0] for part in ("", "_data")]
        tables = [file.read_text() for file in found]
        script = "\n".join(["create database mysql;", "use mysql;", *tables])
        made = subprocess.run(
            [*server, "--bootstrap"], input=script, capture_output=True, text=True, check=False, timeout=180
        )
        assert made.returncode == 0, made.stderr
        listen = ["--skip-grant-tables", "--bind-address=127.0.0.1", f"--port={self._database_port}"]
        files = [f"--socket={place / 'socket'}", f"--pid-file={place / 'pid'}"]
        self._spawn("mariadbd", *server, *listen, *files)
        self._wait_for("mariadbd", (place / "socket").exists)

    def _start_slurm(self) -> None:
        self._spawn("slurmdbd", "slurmdbd", "-D")
        self._wait_for("slurmdbd", lambda: self._answers("sacctmgr", "-n", "list", "cluster"))
        self._spawn("slurmctld", "slurmctld", "-D")
        hosts = str(self.directory / "hosts")
        for node in self.nodes:
            namespaces = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
            self._spawn(node, *namespaces, "bash", "-c", _NODE, "node", node, hosts, "slurmd", "-D", "-N", node)
        self._wait_for("slurmctld", self._is_up)

    def _is_up(self) -> bool:
        """All nodes are idle, and accounting knows the cluster (jobs of before would be lost to sacct)."""
        idle = self._output("sinfo", "-h", "-N", "-o", "%N %t").split("\n")
        known = self._output("sacctmgr", "-n", "-P", "list", "cluster", "format=Cluster,ControlPort").split("|")
        return idle == [f"{node} idle" for node in self.nodes] and known[0] == "slipway" and known[1] != "0"

    def _answers(self, *argv: str) -> bool:
        return subprocess.run(argv, env=self.client_environment(), capture_output=True, check=False).returncode == 0

    def _output(self, *argv: str) -> str:
        result = subprocess.run(argv, env=self.client_environment(), capture_output=True, text=True, check=False)
        return result.stdout.strip()

    def _spawn(self, name: str, *argv: str) -> None:
        with (self.directory / f"{name}.out").open("wb") as output:
            self._processes[name] = subprocess.Popen(
                argv,
                env=self.client_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the tests; stop() comes in their wake
                preexec_fn=_die_with_parent,
            )

    def _wait_for(self, name: str, is_ready: Callable[[], bool]) -> None:
        process = self._processes[name]
        wait_until(lambda: process.poll() is not None or is_ready(), lambda: self._explain(name), 0.05)
        assert process.poll() is None, self._explain(name)

    def _explain(self, name: str) -> str:
        logs: Sequence[Path] = sorted([*self.directory.glob("*.log"), *self.directory.glob("*.out")])
        tails = [f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-10:]) for log in logs]
        return f"{name} did not come up\n" + "\n".join(tails)


@contextlib.contextmanager
def started(nodes: Sequence[str] = NODES) -> Iterator[SlurmCluster]:
    """Idle nodes; only the commands that get ``client_environment()`` see them.

    Not below pytest's own temporary directory: the paths of sockets must stay short.
    """
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with SlurmCluster(directory, nodes) as cluster:
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def wait_until(
    condition: Callable[[], bool],
    explain: Callable[[], str],
    interval_s: float = 0.1,
    timeout_s: float = PATIENCE_S,
) -> None:
    """Wait for a condition; an AssertionError with the explanation if it does not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{explain()} after {timeout_s:g} s"
        time.sleep(interval_s)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
