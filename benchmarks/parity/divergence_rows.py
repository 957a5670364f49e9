"""What ``evaluation=divergence`` makes of a model that an engine of this process serves, as a row of a table."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from backends.fastertransformer.engine.engine import Engine
from evaluation.divergence.corpus import read_documents
from evaluation.divergence.figures import bootstrap, compare
from evaluation.divergence.reference import CheckpointReference
from evaluation.divergence.stage import Ids, Numbers
from evaluation.divergence.streamed import Scores
from evaluation.divergence.verdict import FLOOR, conclude, decide
from evaluation.divergence.weights import WeightsFound, compare_weights
from evaluation.tasks.metric import FAILS, HOLDS
from ft_format.weight_format import FORMATS

TOP, _REFERENCE_TOP = 20, 256
_MOST_RATIO, _MOST_TAIL = 2.0, 4.0  # conf/evaluation/divergence.yaml's
_TOGETHER = 16  # passages that are given to the engine at once
_OF_LAYERS, _CHARACTERS = 4, 60_000  # passages by which layers are compared; of each text


@dataclass(frozen=True)
class Subject:
    """A model in one number format.

    Attributes:
        name: of the model.
        numbers: the served formats.
        reference: of the source.
        served: directory.
    """

    name: str
    numbers: Numbers
    reference: CheckpointReference
    served: Path

    @property
    def format(self) -> str:
        """What a table calls the formats."""
        numbers = self.numbers
        return numbers.quantization or (numbers.weights.name if numbers.weights in FORMATS[1:] else numbers.data_type)


@dataclass(frozen=True)
class Row:
    """What divergence makes of a model; ``should`` is what it ought to say."""

    model: str
    format: str
    state: str
    mean_kl: float
    kl_of_format: float
    ratio: float
    ratio_low: float
    flips: float
    by_texts: str
    by_all: str
    cause: str
    evidence: str
    lambada: str
    should: str


def read_texts() -> list[str]:
    """Read the beginnings of the package's texts, of which no more is scored."""
    return [str(text)[:_CHARACTERS] for text in read_documents(None)]


def compare_layers(subject: Subject, served: Path, passages: Sequence[Ids]) -> WeightsFound:
    """Compare a served directory's layers with the source's on a few passages of each length."""
    found = compare_weights(subject.reference, served, passages[:_OF_LAYERS], subject.numbers.quantization)
    return replace(found, evidence=found.evidence.replace(str(served), "the served directory"))


def judge(
    subject: Subject,
    state: str,
    told: Scores,
    passages: Sequence[Ids],
    weights: WeightsFound,
    known: tuple[str, bool],
) -> Row:
    """Compare a served model with its source.

    Args:
        subject: the model.
        state: what was done to it.
        told: the served model's scores of the passages.
        passages: token ids.
        weights: what the comparison of layers says.
        known: what LAMBADA says, and whether the state is sound.
    """
    source = subject.reference.scores(passages, _REFERENCE_TOP, Numbers())
    rounded = subject.reference.scores(passages, _REFERENCE_TOP, subject.numbers).cut(TOP)
    tokens = np.concatenate([row[1:] for row in passages]).astype(np.int64)
    of_passage = np.repeat(np.arange(len(passages)), [len(row) - 1 for row in passages])
    found, floor = (compare(source, each, tokens) for each in (told, rounded))
    verdict = decide(found, floor, of_passage, _MOST_RATIO, _MOST_TAIL, str(subject.numbers))
    ratio = bootstrap(lambda at: float(found.kl[at].mean() / (floor.kl[at].mean() + FLOOR)), of_passage)
    by_all = conclude(verdict, weights, "the engine")
    return Row(
        subject.name,
        subject.format,
        state,
        float(found.kl.mean()),
        float(floor.kl.mean()),
        ratio.value,
        ratio.low,
        float(found.flips.mean()),
        verdict.verdict,
        by_all.verdict,
        by_all.cause,
        weights.evidence,
        known[0],
        HOLDS if known[1] else FAILS,
    )


def tell_by_engine(engine: Engine, passages: Sequence[Ids]) -> Scores:
    """Score passages by the drop-in engine."""
    found: list[Scores] = []
    for begin in range(0, len(passages), _TOGETHER):
        asked = [engine.parse(_tensors(row)) for row in passages[begin : begin + _TOGETHER]]
        for told in engine.generate(asked):
            ids, top = (told[f"context_top_{what}"][0, 1:] for what in ("ids", "log_probs"))
            found.append(Scores(told["context_log_probs"][0, 1:], ids.astype(np.int32), top))
    return Scores(
        *(np.concatenate([getattr(each, name) for each in found]) for name in ("log_probs", "top_ids", "top"))
    )


def _tensors(row: Ids) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.array([row], np.uint32),
        "input_lengths": np.array([[len(row)]], np.uint32),
        "request_output_len": np.zeros((1, 1), np.uint32),
        "is_return_context_log_probs": np.array([[True]]),
        "num_context_top_log_probs": np.array([[TOP]], np.uint32),
    }


def rounded(row: Any) -> dict[str, Any]:
    """Return what a dataclass has, numbers to four digits."""
    return {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in asdict(row).items()}


def write_rows(path: Path | None, rows: Sequence[Any]) -> None:
    """Write all rows so far, dataclasses of one kind, if a file is asked for."""
    if path is not None:
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(asdict(rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(rounded, rows))
