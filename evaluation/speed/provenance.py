"""The machine and the time of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """The host on which the client ran (the server's host too, when both share one).

    Attributes:
        cpu: model name of the processor.
        cores: logical cores that this process may use.
        memory_bytes: physical memory.
        gpu: names of the GPUs that nvidia-smi lists, ``2 x NAME``; empty for none.
    """

    cpu: str
    cores: int
    memory_bytes: int
    gpu: str


def describe_machine() -> Machine:
    """Read the host's processor, cores, memory and GPUs; what cannot be read is left empty."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(_cpu_model(), len(os.sched_getaffinity(0)), memory_bytes, _gpu_names())


def timestamp() -> str:
    """Return the wall-clock time now, UTC, ISO 8601 with seconds."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def wall_clock(monotonic_ns: int) -> str:
    """Return the wall-clock time of a reading of the monotonic clock, UTC, ISO 8601 with microseconds."""
    passed = timedelta(microseconds=(time.perf_counter_ns() - monotonic_ns) / 1000)
    return (datetime.now(timezone.utc) - passed).isoformat(timespec="microseconds")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _gpu_names() -> str:
    query = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    try:
        names = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ""
    counts = Counter(name.strip() for name in names if name.strip())
    return ", ".join(f"{count} x {name}" for name, count in counts.items())
