"""Time generation on a CPU against llama.cpp on the same random weights, threads and inputs, in alternation.

    python3 -m venv peer && peer/bin/pip install --no-binary=llama-cpp-python llama-cpp-python==0.3.36 numpy
    python3 -m benchmarks.peers.compare_cpu --python=peer/bin/python --csv=llama_cpp.csv

The model has the shape of a Llama of 160M; each number format is a GGUF file for the one side (int8: Q8_0, matrices in
blocks of 32 numbers) and a directory of Hugging Face for the other (int8: int8_mode 1, a scale for each output). Both
decode greedily and never stop early; each has one process, and they take turns. Rates are of the median of wall-clock
time, and the second ratio of processor time, which other processes change less: compare it with ``--threads=1``, for
threads that wait for each other spend processor time too. ``equal`` is the share of tokens on which both agree.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from backends.fastertransformer.engine.settings import Settings
from benchmarks.engine.generate import Ask, BenchmarkArguments, EngineProcess, Side, make_cases, save_model, time_both
from benchmarks.peers.gguf_file import FORMATS, write_gguf
from handover.arguments import ScriptArguments
from handover.errors import ConfigError, ServerError, exit_status

_PEER = Path(__file__).with_name("llama_cpp_side.py")


@dataclass(frozen=True)
class LlamaCppArguments(ScriptArguments):
    """Compare the drop-in engine on a CPU with llama.cpp."""

    python: Path = field(metadata={"help": "Python that has llama-cpp-python"})
    formats: tuple[str, ...] = field(default=tuple(FORMATS), metadata={"help": f"JSON list of {', '.join(FORMATS)}"})
    layers: int = field(default=12, metadata={"help": "transformer blocks"})
    hidden: int = field(default=768, metadata={"help": "width; heads are 64 wide"})
    rows: tuple[int, ...] = field(default=(1, 8, 32), metadata={"help": "JSON list: rows of a batch"})
    input_length: int = field(default=60, metadata={"help": "tokens of every input"})
    output_length: int = field(default=40, metadata={"help": "tokens of every output"})
    threads: int = field(default=2, metadata={"help": "on both sides"})
    rounds: int = field(default=5, metadata={"help": "measurements of each side; the medians count"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in FORMATS:
                raise ConfigError(f"formats: there is no {name!r}", f"give some of {', '.join(FORMATS)}")


class PeerProcess:
    """llama.cpp in a process of its own; see llama_cpp_side.py.

    Args:
        arguments: of the command.
        model: a GGUF file.

    Attributes:
        version: of llama-cpp-python.
    """

    def __init__(self, arguments: LlamaCppArguments, model: Path) -> None:
        longest = arguments.input_length + arguments.output_length
        numbers = (arguments.threads, max(arguments.rows), longest)
        command = [str(arguments.python), str(_PEER), str(model), *map(str, numbers)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.version, self._processor_s = str(self._answer()["version"]), 0.0

    def generate(self, asks: Sequence[Ask]) -> list[list[int]]:
        """See benchmarks.engine.generate.generate_by_engine."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"prompts": [ask.prompt for ask in asks], "count": asks[0].count}) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        self._processor_s = found["processor_s"]
        return found["tokens"]  # type: ignore[no-any-return]

    def processor_s(self) -> float:
        """Return the processor time up to the last answer, in seconds."""
        return self._processor_s

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line.startswith("{"):
            raise ServerError("llama.cpp's process has ended", f"run {_PEER.name} with the Python given to see why")
        return json.loads(line)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Line:
    """A row of the table: output tokens/s, ratios of the engine to its peer, and the share of equal tokens."""

    number_format: str
    rows: int
    llama_cpp: float
    engine: float
    ratio: float
    ratio_of_processor_time: float
    equal: float
    version: str


def compare(arguments: LlamaCppArguments, number_format: str, place: Path, tensors: Any, config: Any) -> list[Line]:
    """Measure both sides with one number format."""
    write_gguf(config, tensors, number_format, place / f"{number_format}.gguf")
    is_int8 = number_format == "int8"
    data_type = "fp32" if is_int8 else number_format
    ways = {"int8_mode": int(is_int8), "has_prefix_cache": False}
    engine = EngineProcess(Settings(place / "model", 1, 1, data_type, arguments.threads, "Llama", **ways))
    peer = PeerProcess(arguments, place / f"{number_format}.gguf")
    sys.stdout.write(f"{engine.description}\n")
    sizes, lines = _sizes(arguments), list[Line]()
    for rows in arguments.rows:
        asks = make_cases(sizes, (rows,))[f"batch {rows}"]
        theirs, ours = np.array(peer.generate(asks)), np.array(engine.generate(asks))
        sides = (
            Side(partial(peer.generate, asks), peer.processor_s),
            Side(partial(engine.generate, asks), engine.processor_s),
        )
        (their_s, their_spent), (our_s, our_spent) = time_both(sides, arguments.rounds)
        tokens, equal = rows * arguments.output_length, float((theirs == ours).mean())
        ratios = their_s / our_s, their_spent / our_spent
        lines.append(Line(number_format, rows, tokens / their_s, tokens / our_s, *ratios, equal, peer.version))
        rates = f"{lines[-1].llama_cpp:12.1f} {lines[-1].engine:12.1f}"
        sys.stdout.write(f"{number_format:6} {rows:5} {rates} {ratios[0]:6.2f} {ratios[1]:18.2f} {equal:6.2f}\n")
        sys.stdout.flush()
    engine.close()
    peer.close()
    return lines


def _sizes(arguments: LlamaCppArguments) -> BenchmarkArguments:
    lengths = {"input_length": arguments.input_length, "output_length": arguments.output_length}
    return BenchmarkArguments("llama", layers=arguments.layers, hidden=arguments.hidden, **lengths)


def main(argv: Sequence[str]) -> None:
    """Print a table, and write it."""
    arguments = LlamaCppArguments.from_argv(argv, description=__doc__)
    lines = list[Line]()
    with tempfile.TemporaryDirectory(prefix="slipway-llama-cpp-") as temporary:
        place = Path(temporary)
        model = save_model(_sizes(arguments), place / "model")
        config = json.loads((place / "model" / "config.json").read_text())
        tensors = {name: values.numpy() for name, values in model.state_dict().items()}
        titles = f"{'format':6} {'rows':>5} {'llama.cpp':>12} {'engine':>12}  ratio  of processor time  equal"
        sys.stdout.write(f"{titles}  (output tokens/s)\n")
        for number_format in arguments.formats:
            lines += compare(arguments, number_format, place, tensors, config)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(lines[0])))
            writer.writeheader()
            writer.writerows(map(asdict, lines))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.peers.compare_cpu"))
