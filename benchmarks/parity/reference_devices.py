"""Is the reference that a GPU streams the one that a CPU streams? Divergence of one from the other, and times.

    python3 -m benchmarks.parity.reference_devices --csv=devices.csv        # beside the first GPU
    python3 -m benchmarks.parity.reference_devices --formats='["bf16"]' --models='["llama_demo"]'

``of_format`` is the divergence of the CPU's reference in that format from the CPU's in fp32, for comparison: what
``evaluation=divergence`` allows twice of. In fp32 the two must be the same to the order of sums.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.parity.divergence_rows import read_texts, rounded, write_rows
from benchmarks.parity.models import DEMO
from benchmarks.parity.planted_hub import LONGEST, MODELS, VOCAB
from evaluation.client.tokenizer import load_tokenizer
from evaluation.divergence.corpus import make_passages
from evaluation.divergence.figures import compare
from evaluation.divergence.reference import open_reference
from evaluation.divergence.stage import LayeredModel, Numbers
from evaluation.divergence.streamed import Scores, stream
from export_scripts.arguments import HUGGINGFACE, ConvertArguments
from export_scripts.checkpoints.user_files import NOTHING_GIVEN
from export_scripts.convert import convert
from handover.arguments import ScriptArguments
from handover.errors import ServerError, exit_status

_TRAINED, _MOST_KL, _TOP = ("gpt3_demo", "llama_demo", "moe_demo"), 1e-6, 256
_LONGEST = min(256, LONGEST)


@dataclass(frozen=True)
class DevicesArguments(ScriptArguments):
    """What is looked at."""

    models: tuple[str, ...] = field(default=(*_TRAINED, *MODELS), metadata={"help": "JSON list"})
    formats: tuple[str, ...] = field(default=("fp32", "bf16", "fp16"), metadata={"help": "JSON list"})
    passages: int = field(default=16, metadata={"help": "of up to 256 tokens"})
    devices: tuple[str, str] = field(default=("cpu", "cuda"), metadata={"help": "JSON list of two"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})


@dataclass(frozen=True)
class Row:
    """A model in one format.

    Attributes:
        mean_kl, most_kl: of the second device's scores from the first's, nats.
        of_format: the mean, of the first device's from its own in fp32.
        first_s, second_s: to stream them.
    """

    model: str
    format: str
    tokens: int
    mean_kl: float
    most_kl: float
    most_log_prob_change: float
    flips: int
    of_format: float
    first_s: float
    second_s: float


def main(argv: Sequence[str]) -> None:
    """Print a row for each model and format; fail where two references in fp32 differ."""
    arguments, rows = DevicesArguments.from_argv(argv, description=__doc__), list[Row]()
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as directory:
            for row in _look_at(name, arguments, Path(directory)):
                rows.append(row)
                sys.stdout.write("  ".join(f"{key} {value}" for key, value in rounded(row).items()) + "\n")
                sys.stdout.flush()
    write_rows(arguments.csv, rows)
    if different := [row.model for row in rows if row.format == "fp32" and not row.mean_kl <= _MOST_KL]:
        raise ServerError(f"in fp32 the references differ of {', '.join(different)}", "look at the rows")


def _look_at(name: str, arguments: DevicesArguments, directory: Path) -> Iterator[Row]:
    source = directory / "source"
    if name in _TRAINED:
        source = DEMO.parents[1] / name / "checkpoints"
        form = ConvertArguments(source, directory / "converted", 1, "bf16", format=HUGGINGFACE)
        convert(form)
        documents, tokenizer = read_texts(), load_tokenizer(directory / "converted")
        passages = make_passages(documents, tokenizer, _LONGEST, arguments.passages, 1 << 30)
    else:
        MODELS[name].save(source)
        drawn = np.random.default_rng(1).integers(2, VOCAB, 60_000).tolist()
        passages = make_passages([tuple(drawn)], None, _LONGEST, arguments.passages, 1 << 30)
    tokens = np.concatenate([row[1:] for row in passages]).astype(np.int64)
    reference = open_reference(source, directory / "references", NOTHING_GIVEN)

    def scores(number_format: str, device: str) -> tuple[Scores, float]:
        begin = time.monotonic()
        numbers = Numbers(number_format)
        model = LayeredModel(reference.open(numbers).directory, reference.model_type, numbers, torch.device(device))
        work = directory / f"work {number_format} {device} {begin}"
        return stream(model, passages, _TOP, work, f"{name} {number_format} {device}"), time.monotonic() - begin

    first, second = arguments.devices
    exact, _ = scores("fp32", first)
    for number_format in arguments.formats:
        (ours, ours_s), (theirs, theirs_s) = scores(number_format, first), scores(number_format, second)
        found, floor = compare(ours, theirs, tokens), compare(exact, ours, tokens)
        change = float(np.abs(ours.log_probs - theirs.log_probs).max())
        means = float(found.kl.mean()), float(found.kl.max()), change, int(found.flips.sum()), float(floor.kl.mean())
        yield Row(name, number_format, len(tokens), *means, ours_s, theirs_s)
    reference.close()


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "reference_devices"))
