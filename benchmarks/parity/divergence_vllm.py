"""What ``evaluation=divergence`` finds where vLLM serves: defects of the served files, and of what vLLM computes.

    python3 -m benchmarks.parity.divergence_vllm --command='[".venv-vllm/bin/vllm", "serve"]' --csv=vllm.csv

``llama_demo`` is converted, a defect is planted in a copy of the directory, and ``deployment.engine=vllm``'s own server
program serves it. Where the directory is sound and vLLM is told another number by ``--hf-overrides``, divergence has
to call it "kernels", else "weights". Without ``--command`` it is the vLLM on PATH.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.parity.divergence_rows import TOP, Row, Subject, compare_layers, judge, read_texts, write_rows
from benchmarks.parity.limits_fp8 import IN_FILES
from benchmarks.parity.models import DEMO
from benchmarks.parity.planted_hub import configure
from deployment.arguments import EngineArguments
from evaluation.client.served_model import open_target
from evaluation.client.tokenizer import load_tokenizer
from evaluation.divergence.corpus import make_passages
from evaluation.divergence.reference import open_reference
from evaluation.divergence.served import ask_scores
from evaluation.divergence.stage import Ids, Numbers
from evaluation.divergence.streamed import Scores
from evaluation.divergence.verdict import KERNELS, WEIGHTS
from evaluation.tasks.metric import FAILS
from evaluation.tasks.scoring import Scorer
from export_scripts.arguments import HUGGINGFACE, ConvertArguments
from export_scripts.checkpoints.user_files import NOTHING_GIVEN
from export_scripts.convert import convert
from handover.arguments import ScriptArguments
from handover.errors import ServerError, exit_status
from handover.manifest import FILE_NAME as MANIFEST

_NAME, _LONGEST, _SOUND, _START_S = "llama_demo", 256, "sound", 900.0
_CHOSEN = (
    *("input norm x 1.02", "o_proj: two heads' columns swapped", "gate and up swapped", "down_proj x 1.02"),
    *("down_proj: a row in 16 zeroed", "k_proj: halves swapped"),
)
_OF_FILES: dict[str, Callable[[Path], None]] = {
    **{name: IN_FILES[name] for name in _CHOSEN},
    "rope theta 10% off": configure(lambda said: said.update(rope_theta=11000.0)),
}
_OF_VLLM: dict[str, dict[str, Any]] = {
    "vLLM is told rope theta 10% off": {"rope_parameters": {"rope_type": "default", "rope_theta": 11000.0}},
    "vLLM is told rms_norm_eps 1e-3 in place of 1e-5": {"rms_norm_eps": 1e-3},
}


@dataclass(frozen=True)
class VllmArguments(ScriptArguments):
    """What is looked at."""

    command: tuple[str, ...] = field(default=(), metadata={"help": "JSON list: vLLM's program and first words"})
    formats: tuple[str, ...] = field(default=("bf16",), metadata={"help": "JSON list of fp32, fp16 and bf16"})
    states: tuple[str, ...] = field(
        default=(_SOUND, *_OF_FILES, *_OF_VLLM), metadata={"help": "JSON list: sound, and names of defects"}
    )
    passages: int = field(default=16, metadata={"help": "of up to 256 tokens"})
    engine_args: tuple[str, ...] = field(default=("--enforce-eager",), metadata={"help": "JSON list: vLLM's own flags"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})


def main(argv: Sequence[str]) -> None:
    """Print a row for each format and state; the last line counts verdicts and causes that are wrong."""
    arguments = VllmArguments.from_argv(argv, description=__doc__)
    rows, wrong = list[Row](), 0
    for number_format in arguments.formats:
        with tempfile.TemporaryDirectory() as directory:
            for row in _look_at(arguments, number_format, Path(directory)):
                rows.append(row)
                cause = "" if row.state == _SOUND else KERNELS if row.state in _OF_VLLM else WEIGHTS
                is_wrong = (row.by_all == FAILS) != (row.should == FAILS) or row.cause != cause
                wrong += is_wrong
                said = f"{row.mean_kl:.3g} / {row.kl_of_format:.3g} = {row.ratio:.3g} flips {row.flips:.2%}"
                verdicts = f"{row.by_texts} {row.by_all} {row.cause}{'  WRONG' if is_wrong else ''}"
                sys.stdout.write(f"{row.model} {row.format:<5} {row.state:<48} {said} {verdicts}\n")
                sys.stdout.flush()
                write_rows(arguments.csv, rows)
    sys.stdout.write(f"{wrong} of {len(rows)} verdicts or causes are wrong\n")


def _look_at(arguments: VllmArguments, number_format: str, directory: Path) -> Iterator[Row]:
    served, source = directory / "served", DEMO.parents[1] / _NAME / "checkpoints" / f"{_NAME}.nemo"
    convert(ConvertArguments(source, served, 1, number_format, format=HUGGINGFACE))
    (served / MANIFEST).unlink()  # else a damaged copy would be refused before it is served
    reference = open_reference(source, directory / "references", NOTHING_GIVEN)
    subject = Subject(f"{_NAME} by vLLM", Numbers(number_format), reference, served)
    passages = make_passages(read_texts(), load_tokenizer(served), _LONGEST, arguments.passages, 1 << 30)
    for state in arguments.states:
        copied = shutil.copytree(served, directory / "damaged")
        _OF_FILES.get(state, lambda directory: None)(copied)
        told = _tell(arguments, copied, number_format, directory, _OF_VLLM.get(state), passages)
        yield judge(subject, state, told, passages, compare_layers(subject, copied, passages), ("", state == _SOUND))
        shutil.rmtree(copied)
    reference.close()


def _tell(
    arguments: VllmArguments,
    served: Path,
    number_format: str,
    place: Path,
    overrides: dict[str, Any] | None,
    passages: Sequence[Ids],
) -> Scores:
    """Let vLLM score passages."""
    more = (*arguments.engine_args, *(("--hf-overrides", json.dumps(overrides)) if overrides else ()))
    given = EngineArguments(
        "vllm",
        served,
        _NAME,
        place / "endpoint.json",
        place / "server.log",
        number_format,
        command=arguments.command,
        max_model_len=2 * _LONGEST,
        engine_args=more,
        start_timeout_s=_START_S,
    )
    with _serving(given), Scorer(open_target(str(given.endpoint), _NAME, batch_size=8), 600) as scorer:
        return ask_scores(scorer, passages, TOP, 8)


@contextmanager
def _serving(given: EngineArguments) -> Iterator[None]:
    """Serve until the block ends.

    Raises:
        ServerError: the server ends before it serves.
    """
    server = subprocess.Popen([sys.executable, "-m", "deployment.engines.serve", *given.to_argv()])
    try:
        while not given.endpoint.is_file():
            if server.poll() is not None:
                raise ServerError(f"vLLM has ended with {server.returncode}", f"look at {given.log}")
            time.sleep(1)
        yield
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "divergence_vllm"))
