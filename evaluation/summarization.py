"""Summarise with a deployment and score it: ``python3 -m evaluation.summarization --data-path=... --prompt=... ...``.

Writes what ``evaluation.tasks.outcome`` lists, and ``predictions.txt``, a summary a line, into the output directory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from evaluation.arguments import TextPairArguments
from evaluation.tasks.metric import share
from evaluation.tasks.texts.rouge import rouge_l, rouge_lsum, rouge_n
from evaluation.tasks.texts.run import Predictions, Scored, TextSample, run_text_task
from handover.errors import exit_status

TASK = "summarization"
_FIGURES: dict[str, tuple[Callable[[str, str], float], str]] = {
    "rouge1": (partial(rouge_n, length=1), "words"),
    "rouge2": (partial(rouge_n, length=2), "pairs of words"),
    "rougeL": (rouge_l, "the longest common subsequence of words"),
    "rougeLsum": (rouge_lsum, "common subsequences of sentences, one a line"),
}


@dataclass(frozen=True)
class Summary(TextSample):
    """One summary.

    Attributes:
        rouge1, rouge2, rougeL, rougeLsum: F-measures; None if the request failed.
    """

    rouge1: float | None = None
    rouge2: float | None = None
    rougeL: float | None = None  # noqa: N815
    rougeLsum: float | None = None  # noqa: N815


def main(argv: Sequence[str]) -> None:
    """Summarise, score, write the results, and fail if any text has no summary."""
    run_text_task(TASK, TextPairArguments.from_argv(argv, description=__doc__), score)


def score(written: Predictions) -> Scored:
    """Compute the mean F-measures of ROUGE over what was summarised."""
    rows = []
    for sample, pair in zip(written.samples, written.pairs, strict=True):
        known = {} if sample.error else {n: of(sample.prediction, pair.reference) for n, (of, _) in _FIGURES.items()}
        figures: list[float | None] = [known.get(name) for name in _FIGURES]
        rows.append(Summary(*dataclasses.astuple(sample), *figures))
    metrics = [
        share(name, (getattr(row, name) for row in rows), f"F-measure of {what}, as rouge-score without stemming")
        for name, (_, what) in _FIGURES.items()
    ]
    return metrics, rows, {}


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "evaluate"))
