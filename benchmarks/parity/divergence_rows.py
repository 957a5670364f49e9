"""What ``evaluation=divergence`` makes of a model that an engine of this process serves, as a row of a table."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from backends.fastertransformer.engine.engine import Engine
from evaluation.divergence.figures import bootstrap, compare
from evaluation.divergence.reference import CheckpointReference
from evaluation.divergence.stage import Ids, Numbers
from evaluation.divergence.streamed import Scores
from evaluation.divergence.verdict import FLOOR, conclude, decide
from evaluation.divergence.weights import compare_weights
from evaluation.tasks.metric import FAILS, HOLDS
from ft_format.weight_format import FORMATS

TOP, _REFERENCE_TOP = 20, 256
_MOST_RATIO, _MOST_TAIL = 2.0, 4.0  # conf/evaluation/divergence.yaml's
_TOGETHER = 16  # passages that are given to the engine at once
Tell = Callable[[Sequence[Ids]], Scores]
"""Passages' log probabilities as a server tells them."""


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


def judge(
    subject: Subject, state: str, tell: Tell, served: Path, passages: Sequence[Ids], known: tuple[str, bool]
) -> Row:
    """Compare a served model with its source.

    Args:
        subject: the model.
        state: what was done to it.
        tell: the served model.
        served: directory that it serves.
        passages: token ids.
        known: what LAMBADA says, and whether the state is sound.
    """
    source = subject.reference.scores(passages, _REFERENCE_TOP, Numbers())
    rounded = subject.reference.scores(passages, _REFERENCE_TOP, subject.numbers).cut(TOP)
    tokens = np.concatenate([row[1:] for row in passages]).astype(np.int64)
    of_passage = np.repeat(np.arange(len(passages)), [len(row) - 1 for row in passages])
    found, floor = (compare(source, each, tokens) for each in (tell(passages), rounded))
    verdict = decide(found, floor, of_passage, _MOST_RATIO, _MOST_TAIL, str(subject.numbers))
    ratio = bootstrap(lambda at: float(found.kl[at].mean() / (floor.kl[at].mean() + FLOOR)), of_passage)
    weights = compare_weights(subject.reference, served, passages)
    by_all = conclude(verdict, weights, "the engine")
    return Row(
        subject.name,
        subject.numbers.weights.name if subject.numbers.weights in FORMATS[1:] else subject.numbers.data_type,
        state,
        float(found.kl.mean()),
        float(floor.kl.mean()),
        ratio.value,
        ratio.low,
        float(found.flips.mean()),
        verdict.verdict,
        by_all.verdict,
        by_all.cause,
        weights.evidence.replace(str(served), "the served directory"),
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


def write_rows(path: Path | None, rows: Sequence[Row]) -> None:
    """Write all rows so far."""
    if path is not None:
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(asdict(rows[0])), lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(row).items()})
