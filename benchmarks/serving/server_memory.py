"""What a deployment holds of its machine: memory of its processes, shared memory, stubs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deployment.processes.linux import command_line, descendants

_SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Holdings:
    """At one moment.

    Attributes:
        server_mb, stubs_mb: resident memory of tritonserver and of all its Python stubs together.
        stubs: number of them.
        regions: shared-memory regions of the stubs.
        regions_mb: size of them.
        descriptors: open files of tritonserver.
    """

    server_mb: float
    stubs_mb: float
    stubs: int
    regions: int
    regions_mb: float
    descriptors: int

    def __str__(self) -> str:
        return (
            f"server {self.server_mb:7.1f} MB  {self.stubs:2} stubs {self.stubs_mb:7.1f} MB  /dev/shm {self.regions:2}"
            f" regions {self.regions_mb:5.1f} MB  {self.descriptors} descriptors"
        )


def look(pid: int) -> Holdings:
    """Look at a deployment.

    Args:
        pid: of ``deployment.serve``: ``pid`` of endpoint.json.
    """
    below = {each.pid: " ".join(command_line(each.pid)) for each in descendants([pid])}
    server = next(each for each, line in below.items() if line.split(" ")[0].endswith("tritonserver"))
    stubs = [each for each, line in below.items() if "triton_python_backend_stub" in line.split(" ")[0]]
    prefix = next(part.split("=")[-1] for part in below[server].split(" ") if "shm-region-prefix-name" in part)
    # Stubs end and their regions go while this looks; what has gone is not counted.
    stubs_mb = [megabytes for each in stubs if (megabytes := resident_mb(each))]
    regions = [size for path in _SHARED.glob(f"{prefix}*") if (size := _size(path)) is not None]
    return Holdings(
        server_mb=resident_mb(server),
        stubs_mb=sum(stubs_mb),
        stubs=len(stubs_mb),
        regions=len(regions),
        regions_mb=sum(regions) / 1e6,
        descriptors=len(list(Path(f"/proc/{server}/fd").iterdir())),
    )


def resident_mb(pid: int) -> float:
    """Read how much memory a process has resident: none if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1e3 for line in status.splitlines() if line.startswith("VmRSS")), 0.0)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
