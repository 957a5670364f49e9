"""Other load tools on an OpenAI API: NVIDIA's aiperf, and Triton's perf_analyzer, each asking given request bodies."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.clients.figures import Times
from benchmarks.clients.load_client import libraries
from evaluation.speed.tables.formulas import NANOSECONDS_PER_MS
from evaluation.speed.transport.openai_events import read_events
from handover.errors import ServerError


class PerfAnalyzer:
    """Triton's load tool, the binary in tritonclient's wheel.

    Args:
        root: ``http://host:port`` of the API.
        model: name of the model there.
        bodies: of the requests, which stream.
        directory: for its files.
    """

    def __init__(self, root: str, model: str, bodies: Sequence[dict[str, Any]], directory: Path) -> None:
        self._root, self._model, self._directory = root, model, directory
        self._data = directory / "perf_analyzer.json"
        self._data.write_text(json.dumps({"data": [{"payload": [body]} for body in bodies]}))
        self._environment = {**os.environ, **libraries(directory)}

    def turn(self, concurrency: int, count: int) -> list[Times]:
        """Let it ask at least that many requests."""
        export, report = self._directory / "perf_analyzer_export.json", self._directory / "perf_analyzer.csv"
        argv = [
            *(str(Path(sys.executable).parent / "perf_analyzer"), "-m", self._model, "-u"),
            *(self._root.removeprefix("http://"), "--service-kind", "openai", "--endpoint", "v1/completions"),
            *("--async", "--input-data", str(self._data), "--concurrency-range", str(concurrency)),
            *("--measurement-mode", "count_windows", "--measurement-request-count", str(-(-count // 3))),
            *("--stability-percentage", "999", "--profile-export-file", str(export), "-f", str(report)),
        ]
        export.unlink(missing_ok=True)  # it refuses to overwrite one
        ended = subprocess.run(argv, env=self._environment, capture_output=True, text=True, check=False)
        if not report.is_file() or len(list(csv.DictReader(report.open()))) != 1:
            raise ServerError(f"perf_analyzer measured nothing: {(ended.stdout + ended.stderr)[:600]}")
        requests = json.loads(export.read_text())["experiments"][0]["requests"]
        report.unlink()
        return [_times(request) for request in requests]


def wall_to_monotonic_ns() -> int:
    """Return what must be added to the wall clock to get ``time.perf_counter_ns``."""
    return time.perf_counter_ns() - time.time_ns()


def _times(request: dict[str, Any]) -> Times:
    outputs = [output["response"].encode() + b"\n" for output in request["response_outputs"]]
    tokens = read_events(list(zip(request["response_timestamps"], outputs, strict=True)))
    shift_ns = wall_to_monotonic_ns()
    sent_ns, first_ns, last_ns = request["timestamp"], tokens.times_ns[0], tokens.times_ns[-1]
    return Times(sent_ns + shift_ns, first_ns + shift_ns, last_ns + shift_ns, sum(tokens.counts))


class AiPerf:
    """NVIDIA's aiperf, from an environment of its own.

    Args:
        program: path of its program.
        root: ``http://host:port`` of the API.
        model: name of the model there.
        bodies: of the requests, which stream.
        directory: for its files.
    """

    def __init__(self, program: Path, root: str, model: str, bodies: Sequence[dict[str, Any]], directory: Path) -> None:
        self._directory, self._tokenizer = directory, directory / "tokenizer"
        self._inputs = directory / "aiperf_inputs.json"
        sessions = [{"session_id": str(number), "payloads": [body]} for number, body in enumerate(bodies)]
        self._inputs.write_text(json.dumps({"data": sessions}))
        write_tokenizer(self._tokenizer)
        self._command = [str(program.absolute()), "profile", "-m", model, "--url", root]

    def turn(self, concurrency: int, count: int) -> list[Times]:
        """Let it ask that many requests after a warm-up of as many as are in flight."""
        output = self._directory / "aiperf"
        argv = [
            *(*self._command, "--endpoint-type", "completions", "--streaming", "--custom-dataset-type", "inputs-json"),
            *("--input-file", str(self._inputs), "--concurrency", str(concurrency), "--request-count", str(count)),
            *("--warmup-request-count", str(concurrency), "--tokenizer", str(self._tokenizer)),
            *("--use-server-token-count", "--output-artifact-dir", str(output), "--ui", "none"),
        ]
        records = output / "profile_export.jsonl"
        records.unlink(missing_ok=True)
        ended = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=self._directory)
        if not records.is_file():
            raise ServerError(f"aiperf measured nothing: {(ended.stdout + ended.stderr)[-600:]}")
        found = [json.loads(line) for line in records.read_text().splitlines()]
        failed = [record["error"] for record in found if record.get("error")]
        if failed:
            raise ServerError(f"requests of aiperf failed: {str(failed[0])[:600]}")
        return [_of_record(record) for record in found if record["metadata"]["benchmark_phase"] == "profiling"]


def _of_record(record: dict[str, Any]) -> Times:
    sent_ns, metrics = record["metadata"]["request_start_ns"] + wall_to_monotonic_ns(), record["metrics"]
    names = ("time_to_first_token", "request_latency")
    first_ns, last_ns = (sent_ns + metrics[name]["value"] * NANOSECONDS_PER_MS for name in names)
    return Times(sent_ns, first_ns, last_ns, metrics["output_sequence_length"]["value"])


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer that is never used: aiperf wants one, and counts by the server's ``usage``."""
    directory.mkdir()
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "word": 1}, "unk_token": "[UNK]"}
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    missing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (directory / "tokenizer.json").write_text(json.dumps({**content, **missing}))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
