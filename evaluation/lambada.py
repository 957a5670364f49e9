"""Evaluate a deployment on LAMBADA: ``python3 -m evaluation.lambada --endpoint=... --output=... --data-path=...``.

Writes what ``evaluation.tasks.outcome`` lists into the output directory.
"""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.arguments import LambadaArguments
from evaluation.client.served_model import Target
from evaluation.client.tokenizer import Tokenizer
from evaluation.tasks.lambada.data import KNOWN_FILES, check_data, read_texts
from evaluation.tasks.lambada.score import score_sample, summarise
from evaluation.tasks.lambada.span_scoring import SpanScorer
from evaluation.tasks.lambada.spans import Sample, Span, prepare_sample
from evaluation.tasks.outcome import Outcome
from evaluation.tasks.target import find_target, find_tokenizer
from handover.errors import exit_status

TASK = "lambada"


def main(argv: Sequence[str]) -> None:
    """Evaluate, write the results, and fail if any sample has no score."""
    arguments = LambadaArguments.from_argv(argv, description=__doc__)
    digest = check_data(arguments.data_path, arguments.data_sha256)
    texts = read_texts(arguments.data_path, arguments.samples)
    target = find_target(TASK, arguments)
    tokenizer = find_tokenizer(target, arguments.tokenizer)
    samples = _prepare(texts, tokenizer, target)
    spans: dict[Span, bool] = {}
    for sample in samples:
        for span, wants_log_prob in sample.spans.items():
            spans[span] = spans.get(span, False) or wants_log_prob
    answers = SpanScorer(target, arguments, tokenizer).score(spans)
    scores = [score_sample(sample, answers) for sample in samples]
    outcome = Outcome(
        task=TASK,
        metrics=summarise(scores),
        samples=scores,
        cut_contexts=sum(1 for score in scores if score.cut_tokens),
        data={"file": arguments.data_path.name, "sha256": digest, "known_as": KNOWN_FILES.get(digest, "")},
    )
    outcome.write(arguments.output, target)
    outcome.show()


def _prepare(texts: Sequence[str], tokenizer: Tokenizer, target: Target) -> list[Sample]:
    limit, is_t5 = target.served.max_positions, target.interface.is_encoder_decoder
    samples = [prepare_sample(index, text, tokenizer, limit, is_t5) for index, text in enumerate(texts)]
    if cut := sum(1 for sample in samples if sample.cut_tokens):
        print(f"{cut} of {len(samples)} contexts are cut on the left to the model's {limit} positions")
    return samples


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "evaluate"))
