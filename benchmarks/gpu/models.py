"""What is measured on a GPU: models by size, the engine and transformers around random weights, and the GPU's rates.

A model's floor is the time to read its matrices once for every output token, at the bandwidth that is measured in the
same run; with many rows the products' arithmetic takes longer than that, and is given beside it.
"""

from __future__ import annotations

import csv
import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.model.precision import TORCH_TYPES
from backends.fastertransformer.engine.settings import Settings
from benchmarks.gpu.sizes import KINDS as KINDS
from benchmarks.gpu.sizes import QUANTIZATIONS as QUANTIZATIONS
from benchmarks.gpu.sizes import SIZES as SIZES
from benchmarks.gpu.sizes import Size as Size
from benchmarks.gpu.sizes import find_size as find_size
from handover.errors import ConfigError

_PROBE_BYTES = 8 << 30
_PROBE_WIDTH = 8192


@dataclass(frozen=True)
class Rates:
    """What the GPU does at best.

    Attributes:
        read_bytes: of its memory, in a second.
        operations: of a large matrix product of random numbers, in a second.
    """

    read_bytes: float
    operations: float


def measure_rates(data_type: str) -> Rates:
    """Sum 8 GiB, and multiply two large matrices of the given type."""
    numbers = torch.empty(_PROBE_BYTES // 4, dtype=torch.float32, device="cuda").normal_()
    read_s = median_seconds(numbers.sum, 20)
    del numbers
    matrix = torch.randn(_PROBE_WIDTH, _PROBE_WIDTH, dtype=TORCH_TYPES[data_type], device="cuda")
    product_s = median_seconds(lambda: matrix @ matrix, 20)
    return Rates(_PROBE_BYTES / read_s, 2 * _PROBE_WIDTH**3 / product_s)


def kernel_times(work: Callable[[], object]) -> str:
    """Run work once under torch's profiler -> a line a kernel: milliseconds together, launches, name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    kernels = [(each.self_device_time_total / 1000, each.count, each.key[:110]) for each in seen.key_averages()]
    lines = [f"{ms:9.3f} {count:6} {name}" for ms, count, name in sorted(kernels, reverse=True) if ms]
    times = [each.time_range for each in seen.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    span = (max(each.end for each in times) - min(each.start for each in times)) / 1000 if times else 0.0
    busy = f"{sum(ms for ms, _, _ in kernels):9.3f} ms of kernels, {span:.3f} from the first to the last"
    return "\n".join([busy, *lines]) + "\n"


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Time work on the GPU by its own clock, after two runs that do not count."""
    times = []
    for index in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()  # type: ignore[no-untyped-call]
        work()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()
        if index >= 2:
            times.append(begin.elapsed_time(end) / 1000)  # type: ignore[no-untyped-call]
    return statistics.median(times)


@contextmanager
def engine_of(size: Size, data_type: str, int8_mode: int = 0, kind: str = "", **settings: Any) -> Iterator[Engine]:
    """Open the engine, as it is served, around random weights; kind: see KINDS; settings: others of Settings.

    But for its prefix cache: most benchmarks send the same requests again and again, which it would answer in part.
    """
    tidy()
    with tempfile.TemporaryDirectory(prefix="slipway-gpu-") as directory:
        size.write(Path(directory), quantization=next((each for each in kind.split() if each in QUANTIZATIONS), ""))
        ranks = {"tensor_para_size": 1, "pipeline_para_size": 1, "has_prefix_cache": False} | settings
        types = {"data_type": data_type, "model_type": size.model_type, "int8_mode": int8_mode}
        types |= {"rounds_activations": "activations" in kind, "has_fp8_cache": "kv" in kind}
        engine = open_engine(Settings(Path(directory), has_made_up_weights=True, **types, **ranks))
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def peer_of(size: Size, data_type: str) -> Iterator[Any]:
    """Make transformers' network of that shape on the GPU, with random weights."""
    tidy()
    usual = torch.get_default_dtype()
    torch.set_default_dtype(TORCH_TYPES[data_type])
    try:
        with torch.device("cuda"):
            model = size.peer().eval()
    finally:
        torch.set_default_dtype(usual)
    yield model


def tidy() -> None:
    """Free what the model before has left."""
    gc.collect()
    torch.cuda.empty_cache()


class Table:
    """Rows of one dataclass, printed as they come and written as CSV, machine and commit with each.

    Args:
        path: of the CSV; None: none.
        commit: that is measured.
    """

    def __init__(self, path: Path | None, commit: str) -> None:
        self._path, self._rows = path, list[dict[str, Any]]()
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        self._where = {"gpu": gpu, "torch": torch.__version__, "commit": commit}

    def add(self, row: Any) -> None:
        """Print a row, and write all so far."""
        fields = asdict(row)
        if not self._rows:
            print("  ".join(name.rjust(9) for name in fields))
        print("  ".join(_shown(value).rjust(max(9, len(name))) for name, value in fields.items()), flush=True)
        self._rows.append({**{name: _shown(value) for name, value in fields.items()}, **self._where})
        if self._path:
            with self._path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(self._rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(self._rows)


def _shown(value: object) -> str:
    """Numbers with as many digits as mean something; what is missing is empty."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def need_gpu() -> None:
    """Refuse to measure anything else.

    Raises:
        ConfigError: there is none.
    """
    if not torch.cuda.is_available():
        raise ConfigError("there is no GPU here", "python3 -m benchmarks.engine.generate measures on a CPU")
