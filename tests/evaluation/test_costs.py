"""What a deployment costs, read from this host."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest

from evaluation.speed.tables.costs import (
    COST_FIGURES,
    ENERGY_FIGURES,
    CostMeter,
    GpuReading,
    Nvml,
    family,
    gpu_figures,
    load_time_s,
    mean_power_watts,
)
from handover.endpoint import Endpoint

LOG = """W1120 23:59:58.900000 1 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"
I1120 23:59:59.250000 1 model_lifecycle.cc:472] "loading: fastertransformer:1"
I1120 23:59:59.300000 1 model_lifecycle.cc:472] "loading: preprocessing:1"
I1120 23:59:59.400000 1 model_lifecycle.cc:839] "successfully loaded 'preprocessing'"
I1121 00:00:02.750000 1 model_lifecycle.cc:839] "successfully loaded 'fastertransformer'"
"""


def test_load_time_is_read_from_tritons_log_over_midnight(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(LOG)
    assert load_time_s(tmp_path / "server.log", "fastertransformer") == pytest.approx(3.5)
    assert load_time_s(tmp_path / "server.log", "preprocessing") == pytest.approx(0.1)
    assert load_time_s(tmp_path / "server.log", "ensemble") is None
    assert load_time_s(tmp_path / "none.log", "ensemble") is None


def test_memory_and_processor_time_of_all_processes_below_the_deployment() -> None:
    # A parent with a child that fills 64 MB and then works for as long as it is asked.
    child = "import sys; data = bytearray(64 << 20); print('filled', flush=True); sum(iter(int, 1))"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    running = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert running.stdout is not None
        running.stdout.readline()
        assert len(family(running.pid)) == 2
        with CostMeter(Endpoint("127.0.0.1", pid=running.pid, start_s=4.5), None, "m") as meter:
            time.sleep(0.5)
    finally:
        os.killpg(running.pid, 9)
        running.wait()
    figures = meter.figures
    assert list(figures) == [*COST_FIGURES, *ENERGY_FIGURES]
    assert figures["server_memory_peak_bytes"] > 64 << 20  # type: ignore[operator]
    assert 0.1 < figures["server_cpu_cores"] < 1.5  # type: ignore[operator]
    assert figures["client_cpu_cores"] < 0.5  # type: ignore[operator]
    assert figures["server_start_s"] == 4.5


def test_a_deployment_elsewhere_has_empty_figures() -> None:
    with CostMeter(Endpoint("10.1.2.3", pid=os.getpid()), None, "m") as meter:
        pass
    missing = {name for name, value in meter.figures.items() if value is None}
    assert missing == {*COST_FIGURES, *ENERGY_FIGURES} - {"client_cpu_cores"}


def test_gpu_samples_are_condensed_by_hand() -> None:
    samples = [[GpuReading(50, 10), GpuReading(100, 20)], [GpuReading(0, 30), GpuReading(50, 5)], []]
    assert gpu_figures(samples) == {"gpu_utilisation_mean_percent": 50.0, "gpu_memory_peak_bytes": 35}
    assert set(gpu_figures([]).values()) == {None}


class Library:
    """Stands in for libnvidia-ml.so with two GPUs, the second of which does not answer."""

    def nvmlInitWithFlags(self, flags: object) -> int:  # noqa: N802
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        ctypes.c_void_p.from_buffer(handle._obj).value = 100 + index.value
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, share: Any) -> int:  # noqa: N802
        share._obj.gpu = 73
        return 0 if ctypes.cast(handle, ctypes.c_void_p).value == 100 else 15

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> int:  # noqa: N802
        memory._obj.used = 5 << 30
        return 0 if memory._obj.version == 0x02000028 else 25  # nvmlMemory_v2 of nvml.h

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, energy: Any) -> int:  # noqa: N802
        energy._obj.value = 70_000 if ctypes.cast(handle, ctypes.c_void_p).value == 101 else 5_000
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, processes: Any) -> int:  # noqa: N802
        is_asked_for_the_number, count._obj.value = processes is None, 1
        if is_asked_for_the_number:
            return 7  # NVML_ERROR_INSUFFICIENT_SIZE
        processes[0].pid = 4343 if ctypes.cast(handle, ctypes.c_void_p).value == 101 else 4242
        processes[0].usedGpuMemory = 1 << 30
        return 0


def test_only_gpus_that_answer_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", Library())
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    library = Nvml.open()
    assert library is not None
    assert library.read() == [GpuReading(73.0, 5 << 30)]
    library.close()


def test_energy_is_that_of_the_gpus_that_the_servers_processes_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", Library())
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    library = Nvml.open()
    assert library is not None
    assert library.energy_mj({4343, 1}) == 70_000
    assert library.energy_mj({1}) == 75_000  # processes of a container are not known by these ids: all GPUs
    library.close()


def test_mean_power_by_hand() -> None:
    assert mean_power_watts(1_000_000, 1_350_000, 0.5) == pytest.approx(700)  # 350 J in half a second
    assert mean_power_watts(None, 5, 1) is None
    assert mean_power_watts(5, None, 1) is None
    assert mean_power_watts(5, 4, 1) is None  # the driver was loaded again in between


def test_without_a_driver_there_are_no_gpu_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", no_library)
    assert Nvml.open() is None
