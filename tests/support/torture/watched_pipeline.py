"""Run the five stages again and again, each time in a fork of this process, which has everything imported.

Convert and export are the real ones; a server and its clients are stood in for by functions that write what those
write, through the same functions. All of it happens in one process, so that its file operations have an order.

    LD_PRELOAD=file_operations.so python watched_pipeline.py ROOT CHECKPOINT

Requests are lines of JSON on standard input, the answers lines on standard output: see ``Request``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

import hydra  # noqa: E402

from export_scripts import convert, export  # noqa: E402
from handover import provenance  # noqa: E402
from handover.durable import write_atomically  # noqa: E402
from handover.endpoint import RUN_VARIABLE, Endpoint  # noqa: E402
from handover.errors import SlipwayError  # noqa: E402
from handover.manifest import Manifest, record_files  # noqa: E402
from launcher import pipeline, runner  # noqa: E402
from launcher.config.schema import Config, register, to_typed  # noqa: E402

STAGES = "convert,export,deploy,evaluate,benchmark"
_TIMEOUT_S = 120


@dataclass(frozen=True)
class Request:
    """One run.

    Attributes:
        output: file for what it prints.
        force: all stages are redone.
        stop_after: operations after which it is killed; negative: never.
        is_torn: half of the next operation is done as well, where it is a write.
        log: file for the operations; None: they are not written down.
    """

    output: str
    force: bool = False
    stop_after: int = -1
    is_torn: bool = False
    log: str | None = None


def measure(argv: Sequence[str]) -> None:
    """Write what an evaluation, a benchmark or a report leaves: plain files, atomic ones, a manifest."""
    (output,) = (Path(part.partition("=")[2]) for part in argv if part.startswith("--output="))
    output.mkdir(parents=True, exist_ok=True)
    (output / "samples.csv").write_text("index,score\n0,1\n")
    write_atomically(output / "metrics.json", '{"metrics": [1]}\n')
    Manifest("evaluation", record_files(output), {"samples": 1}).write(output)


PROGRAMS: dict[str, Callable[[Sequence[str]], None]] = {
    "export_scripts.convert": convert.main,
    "export_scripts.export": export.main,
    "evaluation.lambada": measure,
    "evaluation.benchmark": measure,
    "evaluation.report": measure,
}


class Here:
    """Stands in for ``launcher.run.steps.Step``: the program runs in this process, a server is its endpoint file."""

    last_lines = ""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path, *_: Any) -> None:
        name, given = argv[argv.index("-m") + 1], argv[argv.index("-m") + 2 :]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as stream:
            stream.write(f"{name}\n")
        self.status: int | None = 0
        self.endpoint: Path | None = None
        if name == "deployment.serve":
            (self.endpoint,) = (Path(part.partition("=")[2]) for part in given if part.startswith("--endpoint="))
            self.endpoint.parent.mkdir(parents=True, exist_ok=True)
            Endpoint("127.0.0.1", grpc_port=1, run=env[RUN_VARIABLE]).write(self.endpoint)
            self.status = None
            return
        try:
            PROGRAMS[name](list(given))
        except SlipwayError as error:
            self.last_lines, self.status = str(error), 1

    def wait(self, seconds: float) -> int | None:
        return self.status

    def stop(self, *_: Any, **__: Any) -> None:
        if self.endpoint and self.status is None:
            self.endpoint.unlink()
            self.status = 0


def compose(root: Path, checkpoint: Path, force: bool) -> Config:
    overrides = [f"stages=[{STAGES}]", f"force=[{STAGES if force else ''}]", f"base_results_dir={root}/results"]
    overrides += ["export.run.model_train_name=tiny", f"export.model.checkpoint_path={checkpoint}"]
    overrides += ["cluster_type=interactive", "cluster=interactive", "export.model.tensor_model_parallel_size=2"]
    overrides += ["export.model.processes=1"]  # else their operations have no order
    overrides += ["benchmark.lengths=[[2,2]]", "benchmark.batch_sizes=[1]", f"launcher_scripts_path={PROJECT}"]
    with hydra.initialize_config_dir(str(PROJECT / "conf"), version_base="1.3"):
        return to_typed(hydra.compose("config", overrides=overrides))


def run(config: Config, request: Request, watched: Path) -> None:
    """Be the forked process."""
    signal.alarm(_TIMEOUT_S)
    printed = os.open(request.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if request.log else -1
    ctypes.CDLL(None).watch(str(watched).encode(), ctypes.c_long(request.stop_after), int(request.is_torn), log)
    status = 99
    try:
        pipeline.launch(config)
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def main(root: Path, checkpoint: Path) -> None:
    register()
    provenance.read_commit = lambda: "commit"
    runner.Step = Here  # type: ignore[assignment, attr-defined, misc]
    configs = {force: compose(root, checkpoint, force) for force in (False, True)}
    say("ready")
    for line in sys.stdin:
        request = Request(**json.loads(line))
        child = os.fork()
        if not child:
            run(configs[request.force], request, root)
        say(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
