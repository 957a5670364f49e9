"""Score a deployment's own requests again: ``python3 -m evaluation.monitor --endpoint=... --requests=... --state=...``.

The deployment notes a share of its requests (``deployment.openai_sample_log``). Each run takes the newest that were not
scored yet, has the reference score the same tokens in fp32 and in the served number formats, and bets against the
deployment (``evaluation.monitor.bets``). The exit status is 1 once the alarm is raised, and stays so until another
model is served or the state is removed. Writes ``metrics.json``, ``summary.json``, ``requests.csv`` (a row a request,
without its tokens) and ``manifest.json``; for Prometheus ``metrics_file``.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from backends.fastertransformer.engine.errors import EngineError
from evaluation.client.served_model import Target, open_named
from evaluation.divergence.reference import CheckpointReference, open_reference
from evaluation.divergence.served import served_numbers
from evaluation.divergence.stage import Numbers
from evaluation.divergence.streamed import stream
from evaluation.divergence.verdict import FLOOR
from evaluation.monitor.arguments import MonitorArguments, check_files
from evaluation.monitor.bets import score_of
from evaluation.monitor.logged import Chosen, Logged, choose
from evaluation.monitor.published import write_metrics
from evaluation.monitor.state import State, read_state, subject_of, write_state
from evaluation.tasks import outcome as files
from evaluation.tasks.metric import FAILS, HOLDS, LOWER, NEITHER, Metric
from export_scripts.checkpoints.user_files import GivenFiles
from handover.errors import ConfigError, ServerError

TASK = "monitor"
_REFERENCES = "references"
_SQUARE_FLOOR = 2 * FLOOR  # near 0 a divergence is half the mean squared difference of log probabilities


@dataclass(frozen=True)
class Scored:
    """A row of ``requests.csv``.

    Attributes:
        prompt_tokens, tokens: how many it has.
        square: mean squared difference of the answer's log probabilities from the reference's.
        square_of_formats: the same of the reference in the served number formats.
        score: between -1 and 1, below 0 where the former is within the limit.
        evidence: of the test behind this request.
    """

    time_ns: int
    prompt_tokens: int
    tokens: int
    square: float
    square_of_formats: float
    score: float
    evidence: float


def main(argv: Sequence[str]) -> None:
    """Score new requests, bet, write, and fail where the alarm is raised."""
    arguments = MonitorArguments.from_argv(argv, description=__doc__)
    check_files(arguments, None)
    target = open_named(arguments)
    numbers, is_known = served_numbers(target, arguments.precision, arguments.quantization)
    if not is_known:
        raise ConfigError(
            f"{target.url} does not tell its number formats",
            "give evaluation.monitor.precision: fp32, fp16, bf16 or int8",
        )
    given = GivenFiles(arguments.adapter, arguments.checkpoint_tokenizer)
    directory = arguments.references or arguments.output.parent / _REFERENCES
    reference = open_reference(arguments.checkpoint, directory, given)
    digest, limits = target.served.endpoint.model_digest, (arguments.most_ratio, arguments.false_alarms)
    state = read_state(arguments.state, subject_of(reference.digest, digest, str(numbers), *limits))
    try:
        longest = min(arguments.longest, reference.open(Numbers()).config.max_pos_seq_len)
        chosen = choose(arguments.requests, state.time_ns, state.seen, digest, longest, arguments.samples)
        squares = _squares(reference, numbers, chosen.requests) if chosen.requests else np.empty((0, 2))
    finally:
        reference.close()
    state, rows = _bet(state, chosen.requests, squares, limits, str(numbers))
    _write(arguments, target, reference, state, rows, chosen)
    write_state(arguments.state, state, [each.digest for each in chosen.requests])
    if state.reason:
        raise ServerError(
            f"the deployment's log probabilities are not those of its source {arguments.checkpoint}: {state.reason}",
            f"evaluation=divergence tells weights from kernels; a new test begins without {arguments.state}",
        )


def _squares(reference: CheckpointReference, numbers: Numbers, requests: Sequence[Logged]) -> npt.NDArray[np.float64]:
    """Compute X and R of ``evaluation.monitor.bets`` for each request; nothing of the requests stays on the disk."""
    rows = [each.ids for each in requests]
    reference.directory.mkdir(parents=True, exist_ok=True)
    found = list[npt.NDArray[np.float64]]()
    for formats in (Numbers(), numbers):
        with tempfile.TemporaryDirectory(dir=reference.directory) as work:  # its owner's alone
            try:
                scores = stream(reference.open(formats), rows, 1, Path(work), f"reference in {formats}")
            except EngineError as error:
                raise ConfigError(f"the reference cannot be computed here: {error}") from error
            found.append(scores.log_probs.astype(float))
    ends = np.cumsum([len(row) - 1 for row in rows])
    squares = np.empty((len(rows), 2))
    for row, (end, request) in enumerate(zip(ends, requests, strict=True)):
        own, rounded = (each[end - len(request.tokens) : end] for each in found)
        served = np.array(request.log_probs)
        squares[row] = ((served - own) ** 2).mean(), ((rounded - own) ** 2).mean()
    if bad := int((~np.isfinite(squares[:, 1])).sum()):
        raise ConfigError(
            f"of {bad} of {len(rows)} requests the reference in {numbers} is no finite number",
            "evaluation.monitor.precision names the served one",
        )
    return squares


def _bet(
    state: State,
    requests: Sequence[Logged],
    squares: npt.NDArray[np.float64],
    limits: tuple[float, float],
    numbers: str,
) -> tuple[State, list[Scored]]:
    """Bet on each request, in the order of time."""
    rows, (most_ratio, false_alarms) = list[Scored](), limits
    for request, (square, of_formats) in zip(requests, squares.tolist(), strict=True):
        is_finite = math.isfinite(square)
        score = score_of(square, of_formats, most_ratio, _SQUARE_FLOOR) if is_finite else 1.0
        state = replace(state, bets=state.bets.after(score), time_ns=request.time_ns)
        counts = len(request.prompt), len(request.tokens)
        rows.append(Scored(request.time_ns, *counts, square, of_formats, score, state.bets.evidence))
        if not is_finite and not state.reason:
            state = replace(state, reason="a log probability is not a finite number")
    bets, limit = state.bets, 1 / false_alarms
    if not state.reason and bets.most >= limit:
        served, usual = (float(each) ** 0.5 for each in squares.mean(0))
        state = replace(
            state,
            reason=f"of {bets.count} requests there is {bets.most:.3g} times the evidence, limit {limit:g}; in the"
            f" last {len(rows)} they differ by {served:.3g} nats (root mean square), {usual:.3g} by {numbers} alone",
        )
    return state, rows


def _write(
    arguments: MonitorArguments,
    target: Target,
    reference: CheckpointReference,
    state: State,
    rows: Sequence[Scored],
    chosen: Chosen,
) -> None:
    """Write the figures, and print them."""
    served, usual = (
        (math.fsum(getattr(row, name) for row in rows) / len(rows)) ** 0.5 if rows else None
        for name in ("square", "square_of_formats")
    )
    nats, bets = "nats", state.bets
    figures = [
        Metric("evidence", bets.evidence, "", None, bets.count, 0, "that log probabilities are others", LOWER),
        Metric("most_evidence", bets.most, "", None, bets.count, 0, "the largest so far, which counts", LOWER),
        Metric("rms_difference", served, nats, None, len(rows), 0, "of log probabilities in this run", LOWER),
        Metric("rms_of_formats", usual, nats, None, len(rows), 0, "of the number formats alone", NEITHER),
    ]
    verdict = {"verdict": FAILS if state.reason else HOLDS, "reasons": [state.reason] if state.reason else []}
    about = {"model": target.identity, "source": {"digest": reference.digest}, "left_out": chosen.left_out}
    files.write_results(
        arguments.output,
        {"requests.csv": rows},
        {**verdict, **{each.name: each.value for each in figures}, "requests": bets.count},
        files.describe_results(TASK, figures, len(rows), 0, {**about, **verdict}),
        about,
    )
    if arguments.metrics_file is not None:
        limit = 1 / arguments.false_alarms
        write_metrics(arguments.metrics_file, arguments.model, figures, bets.count, limit, state.reason)
    for why, count in chosen.left_out.items():
        sys.stdout.write(f"{count} requests {why} are left out\n")
    for figure in figures:
        sys.stdout.write(f"{figure.line()}\n")
    sys.stdout.write(f"{TASK}: {'ALARM' if state.reason else 'no alarm'} after {bets.count} requests\n")
