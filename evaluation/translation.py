"""Translate with a deployment and score it: ``python3 -m evaluation.translation --data-path=... --prompt=... ...``.

Writes what ``evaluation.tasks.outcome`` lists, and ``predictions.txt``, a translation a line, into the output
directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics.bleu import BLEU

from evaluation.arguments import TextPairArguments
from evaluation.tasks.metric import HIGHER, Metric
from evaluation.tasks.texts.run import Predictions, Scored, run_text_task
from handover.errors import exit_status

TASK = "translation"
_BOOTSTRAPS = 1000
_TWO_SIDED_95 = 1.96


def main(argv: Sequence[str]) -> None:
    """Translate, score, write the results, and fail if any text has no translation."""
    run_text_task(TASK, TextPairArguments.from_argv(argv, description=__doc__), score)


def score(written: Predictions) -> Scored:
    """Compute sacrebleu's corpus BLEU over what was translated; its standard error is by bootstrap."""
    bleu = BLEU(force=True)  # no warning where a text looks tokenised
    predictions, references = [list(texts) for texts in zip(*written.answered, strict=True)] or ([], [])
    value = error = None
    basis: dict[str, Any] = {}
    if predictions:
        resamples = _BOOTSTRAPS if len(predictions) > 1 else 1
        found = bleu.corpus_score(predictions, [references], n_bootstrap=resamples)
        value = float(found.score)
        error = float(found._ci) / _TWO_SIDED_95 if resamples > 1 else None  # noqa: SLF001
        basis = {"bleu": found.format(width=2), "signature": str(bleu.get_signature())}
    failed = len(written.samples) - len(predictions)
    definition = "corpus BLEU of sacrebleu, 13a tokens, 0 to 100"
    return [Metric("bleu", value, "BLEU", error, len(predictions), failed, definition, HIGHER)], written.samples, basis


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "evaluate"))
