"""The drop-in engine and vLLM on the same GPUs, by turns, from one command.

    python3 -m benchmarks.peers.compare --csv=compare.csv                   # random weights of Llama 3.1 8B's shape
    python3 -m benchmarks.peers.compare --model=/path/to/Llama-3.1-8B --vllm-python=/path/to/venv/bin/python

Each engine runs in processes of its own, never two at a time (with --one-process in one): whole answers first (static
requests of equal rows, then requests of mixed lengths at once), then streams (a closed loop of clients with lengths as
in logs of chats, then Poisson arrivals at parts of the highest rate, which is the peer's where there is one). Both get
the same tokens at the same times, greedy, and end at no token. With --model both also continue the same prompts, and
the share of equal tokens is in the table. --vllm-python is the Python that has vLLM; --peer-path is put in front of its
PYTHONPATH, and --peer-env are variables of its environment. A build of vLLM without FlashInfer's sampler, and random
weights, need

    --peer-env='["VLLM_USE_FLASHINFER_SAMPLER=0", "VLLM_ALLOW_INSECURE_SERIALIZATION=1"]'

--peer-settings are further arguments of its engine, as ["attention_backend=TRITON_ATTN"]. The table has a row for each
case and figure: medians over --rounds with their lowest and highest values, slipway / vllm as ``ratio``, versions and
commits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.sizes import KINDS
from benchmarks.peers.models import ComparedModel, made_up_model, real_model
from benchmarks.peers.table import Lines, comparison_rows, print_rows, write_csv
from benchmarks.peers.workloads import OFFLINE, ONLINE, Job
from handover.arguments import ScriptArguments
from handover.errors import ConfigError, ServerError, exit_status, nearest

SLIPWAY, VLLM, NONE = "slipway", "vllm", "none"
_ROOT = Path(__file__).resolve().parents[2]
_TYPES = ("fp16", "bf16", "fp32")


@dataclass(frozen=True)
class CompareArguments(ScriptArguments):
    """Compare the drop-in engine with vLLM."""

    model: Path | None = field(default=None, metadata={"help": "directory of Hugging Face; else a made-up model"})
    size: str = field(default="Llama 3.1 8B", metadata={"help": "shape of the made-up model"})
    data_type: str = field(default="fp16", metadata={"help": f"on both sides: {', '.join(_TYPES)}"})
    kind: str = field(
        default="", metadata={"help": f"of the drop-in engine's numbers if the model is made up: {', '.join(KINDS)}"}
    )
    tensor_para_size: int = field(default=1, metadata={"help": "GPUs that share each layer, on both sides"})
    parts: tuple[str, ...] = field(default=(OFFLINE, ONLINE), metadata={"help": "JSON list: offline, online"})
    one_process: bool = field(default=False, metadata={"help": "for all parts of an engine, which starts once a round"})
    rounds: int = field(default=1, metadata={"help": "turns of both engines; the medians count"})
    rows: tuple[int, ...] = field(default=(1, 8, 64), metadata={"help": "JSON list: rows of a static request"})
    lengths: tuple[tuple[int, int], ...] = field(
        default=((60, 20), (200, 200)), metadata={"help": "JSON list of [input, output] of static requests, in tokens"}
    )
    repeats: int = field(default=5, metadata={"help": "measurements of each static case; the median counts"})
    burst: int = field(default=256, metadata={"help": "requests of mixed lengths at once; 0: none"})
    burst_lengths: tuple[tuple[int, int], ...] = field(
        default=((20, 400), (20, 200)), metadata={"help": "JSON list: their fewest and most tokens in, and out"}
    )
    clients: int = field(default=256, metadata={"help": "of the closed loop; 0: none"})
    requests: int = field(default=1024, metadata={"help": "that the clients send together"})
    shares: tuple[float, ...] = field(
        default=(0.3, 0.6, 0.9), metadata={"help": "JSON list: Poisson rates as parts of the highest rate"}
    )
    rates: tuple[float, ...] = field(default=(), metadata={"help": "JSON list: the rates themselves, in requests/s"})
    seconds: float = field(default=15.0, metadata={"help": "of arrivals at each rate"})
    longest: int = field(default=4096, metadata={"help": "tokens of input and output that the peer makes room for"})
    memory: float = field(default=0.9, metadata={"help": "part of the GPU's memory that the peer may take"})
    kv_cache_bytes: int = field(default=0, metadata={"help": "of the drop-in engine; 0: its own choice"})
    peer: str = field(default=VLLM, metadata={"help": f"{VLLM}, or {NONE}: the drop-in engine alone"})
    vllm_python: Path | None = field(default=None, metadata={"help": "Python that has vLLM; this one if not given"})
    peer_path: Path | None = field(default=None, metadata={"help": "directory with vLLM, for its PYTHONPATH"})
    peer_env: tuple[str, ...] = field(default=(), metadata={"help": "JSON list of NAME=value, for the peer alone"})
    peer_settings: tuple[str, ...] = field(
        default=(), metadata={"help": "JSON list of NAME=value, further engine arguments of the peer"}
    )
    timeout_s: float = field(default=1200.0, metadata={"help": "of each process"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file, where this is no git checkout"})


def check_arguments(arguments: CompareArguments) -> None:
    """Refuse what cannot be compared.

    Raises:
        ConfigError: an unknown word, no GPU, or rates without a loop that shows the highest.
    """
    words = [("--parts", word, (OFFLINE, ONLINE)) for word in arguments.parts]
    words += [("--peer", arguments.peer, (VLLM, NONE)), ("--data-type", arguments.data_type, _TYPES)]
    words += [("--kind", arguments.kind, KINDS if arguments.model is None else ("",))]
    for flag, word, legal in words:
        if word not in legal:
            raise ConfigError(f"{flag}: there is no {word!r}", nearest(word, legal))
    if ONLINE in arguments.parts and arguments.shares and not arguments.clients and not arguments.rates:
        raise ConfigError("without clients there is no highest rate that shares are parts of", "give --rates")
    if arguments.tensor_para_size < 1:
        raise ConfigError(f"tensor_para_size {arguments.tensor_para_size}", "give the number of GPUs, 1 or more")
    if len(arguments.burst_lengths) != 2 or any(not 0 < fewest <= most for fewest, most in arguments.burst_lengths):
        raise ConfigError(f"burst_lengths {arguments.burst_lengths}", "give [[fewest, most] in, [fewest, most] out]")
    for flag, pairs in (("--peer-env", arguments.peer_env), ("--peer-settings", arguments.peer_settings)):
        for pair in pairs:
            if "=" not in pair:
                raise ConfigError(f"{flag} holds {pair!r}, which is not NAME=value")


class Turns:
    """Runs the engines' processes one after another, and keeps what they measured.

    Args:
        arguments: of the command.
        model: that both serve.
        directory: for jobs and results.
    """

    def __init__(self, arguments: CompareArguments, model: ComparedModel, directory: Path) -> None:
        self._arguments, self._model, self._directory = arguments, model, directory
        self._rates = tuple(arguments.rates)
        self.lines: dict[str, Lines] = {}
        self.failures: list[str] = []

    def run(self) -> Iterator[None]:
        """Run all processes; yields after each, when ``lines`` has its figures."""
        given = self._arguments
        engines = (SLIPWAY,) if given.peer == NONE else (VLLM, SLIPWAY)
        for number in range(given.rounds):
            for parts in [given.parts] if given.one_process else [(part,) for part in given.parts]:
                for engine in engines:
                    self._turn(engine, parts, self._directory / f"{number}-{'-'.join(parts)}-{engine}")
                    yield

    def _turn(self, engine: str, parts: tuple[str, ...], place: Path) -> None:
        output = place.with_suffix(".jsonl")
        job = self._job(parts, output)
        job.write(place.with_suffix(".json"))
        print(f"{engine}, {' and '.join(parts)}", flush=True)
        status = self._start(engine, place.with_suffix(".json"))
        found = [json.loads(line) for line in output.read_text().splitlines()] if output.is_file() else []
        self.lines.setdefault(engine, []).extend(found)
        if status:
            self.failures.append(f"{engine}'s {' and '.join(parts)} part ({status})")
        if ONLINE in parts and not self._rates:
            rates = (line["figures"].get("rate_per_s") for line in found)
            self._rates = tuple(rate for rate in rates if rate)

    def _job(self, parts: tuple[str, ...], output: Path) -> Job:
        given, model = self._arguments, self._model
        return Job(
            parts=parts,
            model=str(model.directory),
            is_made_up=model.is_made_up,
            shape=given.size if model.is_made_up else "",
            checkpoint=str(model.checkpoint),
            model_type=model.model_type,
            data_type=given.data_type,
            kind=given.kind,
            tensor_para_size=given.tensor_para_size,
            vocab=model.vocab,
            longest=min(given.longest, model.positions or given.longest),
            memory=given.memory,
            kv_cache_bytes=given.kv_cache_bytes,
            rows=given.rows,
            lengths=given.lengths,
            repeats=given.repeats,
            burst=given.burst,
            burst_lengths=given.burst_lengths,
            clients=given.clients,
            requests=given.requests,
            shares=given.shares,
            rates_per_s=self._rates,
            seconds=given.seconds,
            peer_settings=given.peer_settings,
            output=str(output),
        )

    def _start(self, engine: str, job: Path) -> str:
        """Run a process to its end; returns how it failed, empty if it did not. What it leaves behind is ended too."""
        python, env = sys.executable, dict(os.environ)
        paths = [str(_ROOT)]
        if engine == VLLM:
            python = str(self._arguments.vllm_python or python)
            env |= dict(pair.split("=", 1) for pair in self._arguments.peer_env)
            paths = [*([str(self._arguments.peer_path)] if self._arguments.peer_path else []), *paths]
        env["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH")])])
        command = [python, "-m", f"benchmarks.peers.{engine}", f"--job={job}"]
        process = subprocess.Popen(command, cwd=_ROOT, env=env, start_new_session=True)
        try:
            status = process.wait(self._arguments.timeout_s)
            return f"status {status}" if status else ""
        except subprocess.TimeoutExpired:
            return f"not done after {self._arguments.timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(argv: Sequence[str]) -> None:
    """Measure both engines, print and write the table."""
    arguments = CompareArguments.from_argv(argv, description=__doc__)
    check_arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="slipway-compare-") as scratch:
        directory = Path(scratch)
        model = (
            made_up_model(arguments.size, arguments.data_type, directory / "model", arguments.kind)
            if arguments.model is None
            else real_model(arguments.model, arguments.data_type, arguments.tensor_para_size, directory / "shards")
        )
        turns = Turns(arguments, model, directory)
        name = arguments.size if model.is_made_up else model.directory.name
        numbers = "+".join(filter(None, (arguments.data_type, arguments.kind)))
        for _ in turns.run():
            rows = list(comparison_rows(turns.lines, name, numbers, arguments.commit))
            if arguments.csv is not None:
                write_csv(arguments.csv, rows)
    print_rows(rows)
    if turns.failures:
        raise ServerError(f"these processes failed: {'; '.join(turns.failures)}", "their output above says why")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.peers.compare"))
