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
from backends.fastertransformer.engine.precision import TORCH_TYPES
from backends.fastertransformer.engine.settings import Settings
from handover.errors import ConfigError

_POSITIONS = 2048
_PROBE_BYTES = 8 << 30
_PROBE_WIDTH = 8192


@dataclass(frozen=True)
class Size:
    """A GPT: NeMo's published dimensions."""

    layers: int
    hidden: int
    heads: int
    vocab: int

    def weight_bytes(self, item_bytes: int, is_int8: bool = False) -> int:
        """Of the matrices that every token needs: the layers', and the table that is its head."""
        return self._layers_numel * (1 if is_int8 else item_bytes) + self.vocab * self.hidden * item_bytes

    def operations(self, batch: int, input_length: int, output_length: int) -> int:
        """Of the matrix products of a generation; the head is needed for output tokens only."""
        tokens = batch * (input_length + output_length - 1)
        return 2 * (self._layers_numel * tokens + self.vocab * self.hidden * batch * output_length)

    @property
    def _layers_numel(self) -> int:
        return self.layers * 12 * self.hidden**2


SIZES = {
    "124M": Size(12, 768, 12, 50304),
    "1.3B": Size(24, 2048, 16, 51200),
    "5B": Size(24, 4096, 32, 51200),
    "20B": Size(44, 6144, 48, 51200),
    "43B": Size(48, 8192, 64, 256000),
}


def find_size(name: str) -> Size:
    """Give the dimensions of a model by name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in SIZES:
        raise ConfigError(f"no model is called {name}", f"there are {', '.join(SIZES)}")
    return SIZES[name]


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


def config_ini(size: Size) -> str:
    """Describe a model as FasterTransformer's converters do."""
    return (
        f"[gpt]\nhead_num = {size.heads}\nsize_per_head = {size.hidden // size.heads}\n"
        f"inter_size = {4 * size.hidden}\nnum_layer = {size.layers}\nvocab_size = {size.vocab}\n"
        f"max_pos_seq_len = {_POSITIONS}\nstart_id = 0\nend_id = 0\n"
    )


@contextmanager
def engine_of(size: Size, data_type: str, int8_mode: int = 0, **settings: Any) -> Iterator[Engine]:
    """Open the engine, as it is served, around random weights; settings: others of Settings."""
    tidy()
    with tempfile.TemporaryDirectory(prefix="slipway-gpu-") as directory:
        Path(directory, "config.ini").write_text(config_ini(size))
        ranks = {"tensor_para_size": 1, "pipeline_para_size": 1} | settings
        engine = open_engine(
            Settings(Path(directory), data_type=data_type, int8_mode=int8_mode, has_made_up_weights=True, **ranks)
        )
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def peer_of(size: Size, data_type: str) -> Iterator[Any]:
    """Make transformers' GPT-2 of that shape on the GPU, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocab, n_positions=_POSITIONS, n_embd=size.hidden, n_layer=size.layers, n_head=size.heads
    )
    tidy()
    usual = torch.get_default_dtype()
    torch.set_default_dtype(TORCH_TYPES[data_type])
    try:
        with torch.device("cuda"):
            model = GPT2LMHeadModel(config).eval()
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
        self._where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit}

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
        raise ConfigError("there is no GPU here", "python3 -m benchmarks.generate measures on a CPU")
