"""The resources of a deployment: memory, processor and GPU use during a measurement, and the start-up time.

They are read on this host only: the figures of a server on another machine, or of another user, are empty.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pynvml

from evaluation.speed.tables import formulas
from handover.endpoint import Endpoint

COST_FIGURES = {
    "server_memory_peak_bytes": "sum over the server's processes of VmHWM, each one's peak since it started; pages "
    "that they share count in each",
    "server_cpu_cores": "processor time of the server's processes / duration",
    "client_cpu_cores": "processor time of the client / duration; near 1 the client limits what is measured",
    "gpu_utilisation_mean_percent": "NVML's share of time with a kernel running, mean over samples and GPUs",
    "gpu_memory_peak_bytes": "NVML's used memory, summed over the GPUs, the highest sample",
    "server_start_s": "from starting tritonserver to the first generation",
    "server_load_s": "from Triton's line that it loads the model to the one that it has",
}
"""Columns and their formulas."""
ENERGY_FIGURES = {
    "gpu_power_mean_watts": "energy by NVML's counters / duration, warm-up included; of the GPUs that the server's "
    "processes use, or of all where NVML does not name those"
}
"""The same, in columns at the end of the tables."""

_SERVER_LOG = "server.log"
_SAMPLE_EVERY_S = 0.5
_LOADING = re.compile(r"^[IWE](\d{4} \d\d:\d\d:\d\d\.\d+).*\] \"?(loading: |successfully loaded ')([^:']+)")


@dataclass(frozen=True)
class GpuReading:
    """A sample of one GPU.

    Attributes:
        utilisation_percent: share of the last sample period (some ms to 1 s) in which a kernel ran.
        used_bytes: memory in use, by any process, without the driver's own.
    """

    utilisation_percent: float
    used_bytes: int


class Nvml:
    """NVIDIA's management library, initialised, with a handle for each GPU that gives one."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):
                self._handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))

    @classmethod
    def open(cls) -> Nvml | None:
        """Initialise the library; None where there is no driver or no GPU."""
        try:
            pynvml.nvmlInit()
            return cls()
        except pynvml.NVMLError:
            return None

    def read(self) -> list[GpuReading]:
        """Read every GPU that answers."""
        readings = []
        for handle in self._handles:
            with contextlib.suppress(pynvml.NVMLError):
                share = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
                # The second version's ``used`` leaves out what the driver keeps for itself.
                used_bytes = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used
                readings.append(GpuReading(float(share), int(used_bytes)))
        return readings

    def energy_mj(self, pids: Collection[int]) -> float | None:
        """Add up the energy counters of the GPUs that the processes use, in millijoules since the driver was loaded.

        NVML does not know processes by the ids that they have inside a container; all GPUs count where it names none.
        Returns None where a GPU has no such counter (before Volta).
        """
        used = [handle for handle in self._handles if _processes(handle) & set(pids)]
        try:
            return math.fsum(pynvml.nvmlDeviceGetTotalEnergyConsumption(each) for each in used or self._handles)
        except pynvml.NVMLError:
            return None

    def close(self) -> None:
        """Shut the library down."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _processes(handle: Any) -> set[int]:
    try:
        return {int(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except pynvml.NVMLError:
        return set()


class CostMeter:
    """Measures while its ``with`` block runs; ``figures`` holds COST_FIGURES and ENERGY_FIGURES after it.

    Args:
        endpoint: endpoint of the deployment.
        log: path of the server's log; None if unknown.
        model: Triton's name of the model.
    """

    def __init__(self, endpoint: Endpoint, log: Path | None, model: str) -> None:
        self.figures: dict[str, float | None] = dict.fromkeys((*COST_FIGURES, *ENERGY_FIGURES))
        self.figures["server_start_s"] = endpoint.start_s
        self.figures["server_load_s"] = load_time_s(log, model) if log is not None else None
        self._root = endpoint.pid if is_here(endpoint) else None
        self._stop = threading.Event()
        self._samples: list[list[GpuReading]] = []
        self._thread: threading.Thread | None = None
        self._nvml: Nvml | None = None

    def __enter__(self) -> CostMeter:
        self._nvml = Nvml.open() if self._root is not None else None
        if self._nvml is not None:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        self._energy_mj = self._read_energy_mj()
        self._started_ns, self._client_s = time.perf_counter_ns(), time.process_time()
        self._before = usage_of(self._root)
        return self

    def __exit__(self, *_: object) -> None:
        elapsed_s = (time.perf_counter_ns() - self._started_ns) / formulas.NANOSECONDS_PER_S
        client_s, after = time.process_time() - self._client_s, usage_of(self._root)
        energy_mj = self._read_energy_mj()
        if self._thread is not None and self._nvml is not None:
            self._stop.set()
            self._thread.join()
            self._nvml.close()
        self.figures |= {
            "server_memory_peak_bytes": after[1] if after else None,
            "server_cpu_cores": (after[0] - self._before[0]) / elapsed_s if after and self._before else None,
            "client_cpu_cores": client_s / elapsed_s,
            **gpu_figures(self._samples),
            "gpu_power_mean_watts": mean_power_watts(self._energy_mj, energy_mj, elapsed_s),
        }

    def _read_energy_mj(self) -> float | None:
        if self._nvml is None or self._root is None:
            return None
        return self._nvml.energy_mj({process.pid for process in family(self._root)})

    def _sample(self) -> None:
        assert self._nvml is not None
        while not self._stop.wait(_SAMPLE_EVERY_S):
            self._samples.append(self._nvml.read())


def gpu_figures(samples: Sequence[Sequence[GpuReading]]) -> dict[str, float | None]:
    """Compute the GPU figures from samples of all GPUs; None without samples."""
    shares = [reading.utilisation_percent for sample in samples for reading in sample]
    memory = [sum(reading.used_bytes for reading in sample) for sample in samples if sample]
    return {"gpu_utilisation_mean_percent": formulas.mean(shares), "gpu_memory_peak_bytes": max(memory, default=None)}


def mean_power_watts(before_mj: float | None, after_mj: float | None, elapsed_s: float) -> float | None:
    """Return the mean power in watts between two readings of the energy counters; None where either is missing."""
    if before_mj is None or after_mj is None or after_mj < before_mj or elapsed_s <= 0:
        return None
    return (after_mj - before_mj) / 1000 / elapsed_s


def is_here(endpoint: Endpoint) -> bool:
    """Return whether the deployment's process can be read: it runs on this host and its id is known."""
    local = ("127.0.0.1", "::1", "localhost", socket.gethostname())
    return endpoint.host in local and endpoint.pid is not None and Path(f"/proc/{endpoint.pid}").is_dir()


def usage_of(root: int | None) -> tuple[float, int] | None:
    """Add up processor seconds and peak bytes of a process and its descendants; None where nothing can be read."""
    cpu_s, peak_bytes, is_known = 0.0, 0, False
    for process in family(root) if root is not None else ():
        try:
            times = process.cpu_times()
            status = Path(f"/proc/{process.pid}/status").read_text()  # psutil has no peak
        except (OSError, psutil.Error):
            continue  # it has ended meanwhile
        cpu_s += times.user + times.system
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        peak_bytes += int(found[1]) * 1024 if found else 0
        is_known = True
    return (cpu_s, peak_bytes) if is_known else None


def family(root: int) -> list[psutil.Process]:
    """List a process and all its descendants; empty where the process has ended."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def server_log(endpoint: str) -> Path | None:
    """Find the log beside an endpoint file, or in the directory that holds one; None for ``host:port``."""
    source = Path(endpoint)
    directory = source if source.is_dir() else source.parent if source.is_file() else None
    return None if directory is None else directory / _SERVER_LOG


def load_time_s(log: Path, model: str) -> float | None:
    """Read from Triton's log how long a model took to load; None where the log does not say."""
    times: dict[str, datetime] = {}
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        found = _LOADING.match(line)
        if found and found[3] == model:
            # Triton's lines have no year; any leap year parses every day.
            times[found[2]] = datetime.strptime(f"2024{found[1]}", "%Y%m%d %H:%M:%S.%f")
    begun, ended = times.get("loading: "), times.get("successfully loaded '")
    if begun is None or ended is None:
        return None
    elapsed_s = (ended - begun).total_seconds()
    return elapsed_s if elapsed_s >= 0 else None
