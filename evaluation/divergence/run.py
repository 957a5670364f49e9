"""Compare a deployment with its source over a corpus: ``python3 -m evaluation.divergence --endpoint=... --output=...``.

Writes ``metrics.json`` (figures, verdict, cause), ``summary.json`` (the verdict alone), ``figures.csv`` (a row a
figure, with its interval), ``places.csv`` (a row a token), ``by_position.csv``, ``by_length.csv``, ``passages.csv``,
``layers.csv`` where the served weights are on this machine, and ``manifest.json``. The exit status is 1 where it fails.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.client.served_identity import check_unchanged
from evaluation.client.served_model import Target, open_named
from evaluation.client.tokenizer import Tokenizer
from evaluation.divergence.arguments import DivergenceArguments, check_files
from evaluation.divergence.corpus import Ids, digest_of, make_passages, read_documents
from evaluation.divergence.figures import Divergence, Interval, by_groups, compare, intervals, metrics, octave
from evaluation.divergence.reference import CheckpointReference, open_reference
from evaluation.divergence.served import ask_scores, find_top, served_numbers
from evaluation.divergence.stage import Numbers
from evaluation.divergence.streamed import Scores
from evaluation.divergence.verdict import FORMAT, Places, Verdict, conclude, decide
from evaluation.divergence.weights import WeightsFound, compare_weights
from evaluation.tasks import outcome as files
from evaluation.tasks.metric import FAILS, INCONCLUSIVE
from evaluation.tasks.scoring import Scorer
from evaluation.tasks.target import find_tokenizer
from export_scripts.checkpoints.user_files import GivenFiles
from handover.errors import ConfigError, ServerError
from models.directory import CONFIG_FILE, read_json

TASK = "divergence"
_REFERENCES = "references"
_GUESSED = "bf16"  # what servers compute in, most of them


def main(argv: Sequence[str]) -> None:
    """Ask the server, compute the reference, compare, write, and fail where divergence fails."""
    arguments = DivergenceArguments.from_argv(argv, description=__doc__)
    check_files(arguments, None)
    documents = read_documents(arguments.data_path)
    target = _open(arguments)
    given = GivenFiles(arguments.adapter, arguments.checkpoint_tokenizer)
    directory = arguments.references or arguments.output.parent / _REFERENCES
    reference = open_reference(arguments.checkpoint, directory, given)
    with Scorer(target, arguments.timeout_s) as scorer:
        passages = _passages(arguments, target, scorer, documents)
        top = min(find_top(scorer, target, arguments.top), target.served.vocab_size or arguments.top)
        served = ask_scores(scorer, passages, top, target.batch_size)
    check_unchanged(arguments.endpoint, target.served.endpoint, arguments.model)
    comparison = _Comparison(arguments, target, reference, passages, served, max(top, 1))
    try:
        verdict, weights = comparison.judge()
    finally:
        reference.close()
    comparison.write(verdict, weights)
    is_ = "is " * (verdict.verdict == INCONCLUSIVE)
    sys.stdout.write("\n".join([f"divergence {is_}{verdict.verdict}", *verdict.reasons]) + "\n")
    if verdict.verdict == FAILS:
        raise ServerError(
            f"the served model diverges from its source {arguments.checkpoint}: {'; '.join(verdict.reasons)}",
            f"look at {arguments.output / 'by_position.csv'} and layers.csv; export again with force=[convert,export]",
        )


def _open(arguments: DivergenceArguments) -> Target:
    target = open_named(arguments)
    if target.capabilities:
        sys.stdout.write(f"{target.capabilities.line()}\n")
    if not target.interface.takes_ids or target.interface.is_encoder_decoder:
        raise ConfigError(
            f"model '{arguments.model}' takes no token ids of texts that it continues",
            "take model=fastertransformer; an encoder-decoder is compared with evaluation=parity",
        )
    return target


def _passages(
    arguments: DivergenceArguments, target: Target, scorer: Scorer, documents: Sequence[str | Ids]
) -> list[Ids]:
    tokenizer: Tokenizer | None = None
    if any(isinstance(each, str) for each in documents):
        tokenizer = find_tokenizer(target, arguments.tokenizer)
    positions, longest = target.served.max_positions, arguments.longest_passage
    if positions is not None:
        longest = min(longest, positions - scorer.spare_positions(1))
    limits = (target.served.vocab_size, target.served.first_prompt_id)
    vocab_size = min((each for each in limits if each), default=2**31)
    return make_passages(documents, tokenizer, longest, arguments.samples, vocab_size)


@dataclass(frozen=True)
class _Comparison:
    """What is compared.

    Attributes:
        served: the server's scores.
        top: log probabilities of a place that the server told; what the reference is cut to where formats are compared.
    """

    arguments: DivergenceArguments
    target: Target
    reference: CheckpointReference
    passages: Sequence[Ids]
    served: Scores
    top: int

    @property
    def tokens(self) -> Places:
        """The scored tokens."""
        return np.concatenate([row[1:] for row in self.passages]).astype(np.int64)

    @property
    def numbers_of_passages(self) -> Places:
        """The number of each place's passage."""
        return np.repeat(np.arange(len(self.passages)), [len(row) - 1 for row in self.passages])

    @property
    def formats(self) -> tuple[Numbers, bool]:
        """The served number formats, and whether they are known or named."""
        return served_numbers(self.target, self.arguments.precision, self.arguments.quantization)

    def source_scores(self, numbers: Numbers) -> Scores:
        """Compute the source's scores in number formats, or read them where they are kept."""
        return self.reference.scores(self.passages, self.arguments.reference_top, numbers)

    def divergence(self, scores: Scores) -> Divergence:
        """Compare scores with the source's in fp32."""
        return compare(self._source, scores, self.tokens)

    @cached_property
    def _source(self) -> Scores:
        return self.source_scores(Numbers())

    def judge(self) -> tuple[Verdict, WeightsFound]:
        """Decide by the number formats, and by the served weights where they are on this machine."""
        directory = self.arguments.served_weights or self.target.served.directory
        numbers, is_known = self.formats
        quantization = self.arguments.quantization or ""  # of the directory; what becomes FP8 when loaded is not in it
        weights = compare_weights(self.reference, directory, self.passages, quantization)
        verdict = self._decide(numbers)
        if verdict.verdict == FAILS and not is_known and (usual := self._decide(Numbers(_GUESSED))).verdict != FAILS:
            hint = f"give evaluation.divergence.precision={_GUESSED} if that is what is served"
            said = f"the server does not tell its number format, and {usual.reasons[0]}: {hint}"
            verdict = Verdict(INCONCLUSIVE, (said,), FORMAT)
        if verdict.verdict == FAILS and not numbers.quantization and self._is_quantized(directory):
            hint = "evaluation.divergence.quantization names it (fp8, fp8_block, int4, mxfp4)"
            said = f"{directory} is quantized and the checkpoint is not, and what that alone does is not known: {hint}"
            verdict = Verdict(INCONCLUSIVE, (*verdict.reasons, said), FORMAT)
        return conclude(verdict, weights, self.target.served.endpoint.engine), weights

    def _is_quantized(self, directory: Path | None) -> bool:
        """Return whether a served directory says weights in another format, and the checkpoint does not."""
        said = directory is not None and read_json(directory / CONFIG_FILE, ConfigError).get("quantization_config")
        own = self.reference.source.own
        return bool(said) and not (own and own.quantization)

    def _decide(self, numbers: Numbers) -> Verdict:
        rounding = self.divergence(self.source_scores(numbers).cut(self.top).as_told(self.served, self.tokens))
        limits = self.arguments.most_ratio, self.arguments.most_tail_ratio
        return decide(self.divergence(self.served), rounding, self.numbers_of_passages, *limits, str(numbers))

    def write(self, verdict: Verdict, weights: WeightsFound) -> None:
        """Write everything into the output directory, the manifest last."""
        found, of_passage = self.divergence(self.served), self.numbers_of_passages
        known = intervals(found, of_passage)
        figures = metrics(known, len(of_passage))
        said: dict[str, Any] = {"verdict": verdict.verdict, "reasons": list(verdict.reasons), "cause": verdict.cause}
        source = {"checkpoint": str(self.arguments.checkpoint), "digest": self.reference.digest}
        source |= {"computed_by": f"the drop-in engine in fp32, streamed from {self.reference.source.source_map.name}"}
        source |= {"served_formats": str(self.formats[0]), "log_probabilities_of_a_place": str(self.top)}
        data, model = self._data(), self.target.identity
        about = {"data": data, "model": model, "source": source}
        files.write_results(
            self.arguments.output,
            self._tables(found, known, weights),
            {**said, **{metric.name: metric.value for metric in figures}, "source": source, "model": model["model"]},
            files.describe_results(TASK, figures, len(self.passages), 0, {**about, **said}),
            about,
        )

    def _tables(
        self, found: Divergence, known: Mapping[str, Interval], weights: WeightsFound
    ) -> dict[str, Sequence[Any]]:
        of_passage, lengths = self.numbers_of_passages, np.array(list(map(len, self.passages)))
        positions = np.concatenate([np.arange(1, length) for length in lengths])
        columns = (of_passage, positions, self.tokens, found.served, found.reference, found.kl, found.rest, found.flips)
        names = ("passage", "position", "token", "served_log_prob", "source_log_prob", "kl", "untold_mass", "flips")
        tables: dict[str, Sequence[Any]] = {
            "figures.csv": [{"figure": name, **asdict(each)} for name, each in known.items()],
            "places.csv": [
                dict(zip(names, (each.item() for each in row), strict=True)) for row in zip(*columns, strict=True)
            ],
            "by_position.csv": by_groups(found, octave(positions), "from_position"),
            "by_length.csv": by_groups(found, lengths[of_passage], "tokens"),
            "passages.csv": by_groups(found, of_passage, "passage"),
        }
        return tables | ({"layers.csv": weights.layers} if weights.layers else {})

    def _data(self) -> dict[str, str]:
        file: Path | None = self.arguments.data_path
        return {"file": file.name if file else "the package's texts", "sha256": digest_of(self.passages)}
