"""Compare a deployment with its source: ``python3 -m evaluation.parity --endpoint=... --output=... --checkpoint=...``.

Writes ``metrics.json`` (figures, verdict, what computed the source), ``summary.json`` (the verdict alone),
``prompts.csv`` (a row a prompt, with its first differing token), ``positions.csv`` (a row a token),
``scales.csv`` (a row a tensor) and ``manifest.json``. The exit status is 1 where parity fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from evaluation.arguments import ADAPTER
from evaluation.client.connecting import connect
from evaluation.client.model_connection import ModelFiles, Query
from evaluation.client.openai_capabilities import Capabilities
from evaluation.client.served_identity import check_unchanged
from evaluation.client.served_model import DeployedModel, Target, open_named
from evaluation.client.tokenizer import load_tokenizer
from evaluation.parity.arguments import ParityArguments, check_arguments, served_precision
from evaluation.parity.comparison import GENERATED, ParityOutcome, Position, Served, compare, decide, summarise
from evaluation.parity.distances import PassageFindings, joined
from evaluation.parity.numbers import compare_numbers
from evaluation.parity.prompts import Ids, encode_prompts, read_prompts
from evaluation.parity.references import HuggingFaceReference, Reference, open_reference
from evaluation.parity.survey import make_twin, served_formats, survey
from evaluation.tasks import outcome as files
from evaluation.tasks.metric import FAILS, INCONCLUSIVE
from evaluation.tasks.scoring import Scorer
from evaluation.tasks.target import with_adapter
from export_scripts.checkpoints.user_files import GivenFiles
from handover.digests import file_digest
from handover.errors import ConfigError, ServerError
from handover.progress import Progress

_SCRATCH = "reference"


def main(argv: Sequence[str]) -> None:
    """Ask the server, compute the source, compare, write, and fail where parity fails."""
    arguments = ParityArguments.from_argv(argv, description=__doc__)
    check_arguments(arguments)
    prompts = read_prompts(arguments)
    target = _open(arguments)
    encoded = _encode(arguments, prompts, target.served)
    answers = ask(arguments, target, encoded)
    arguments.output.mkdir(parents=True, exist_ok=True)
    given, scratch = GivenFiles(arguments.adapter, arguments.checkpoint_tokenizer), arguments.output / _SCRATCH
    reference, notes = open_reference(arguments.checkpoint, arguments.reference, scratch, given, arguments.lora_path)
    formats = served_formats(target, reference.source)
    said = served_precision(formats.weight_data_type, formats.data_type, formats.weights, *formats.others)
    precision = arguments.precision or said
    limits = arguments.limits_by_precision[precision]
    positions, numbers = _compare(answers, reference, limits["tie"]), _compare_numbers(target, reference)
    twin = make_twin(target, reference, formats)
    findings = joined(numbers, survey(arguments, target, reference, twin, answers, precision))
    rounded = _compare(answers, reference, limits["tie"]) if twin and twin.is_quantized else ()
    check_unchanged(arguments.endpoint, target.served.endpoint, arguments.model)
    outcome, notes = conclude(decide(positions, limits, rounded), findings), (*notes, *findings.notes)
    source = {
        "computed_by": reference.name,
        "notes": list(notes),
        "checkpoint": str(arguments.checkpoint),
        "precision": precision,
        "limits": limits,
    }
    write_results(arguments, target, positions, rounded, outcome, source, findings)
    sys.stdout.write("\n".join(_lines(outcome, reference, notes)) + "\n")
    if outcome.verdict == FAILS:
        raise ServerError(
            f"the served model is not its source {arguments.checkpoint}: {'; '.join(outcome.reasons)}",
            f"look at {arguments.output / 'prompts.csv'}; export again with force=[convert,export]",
        )


def ask(arguments: ParityArguments, target: Target, prompts: Sequence[Ids]) -> list[Served]:
    """Have the server continue every prompt and score its tokens.

    Raises:
        ServerError: a request failed, so that nothing is compared.
    """
    is_t5, rows = target.interface.is_encoder_decoder, target.batch_size
    answers: list[Served] = []
    with (
        closing(connect(target, arguments.timeout_s, ModelFiles())) as connection,
        Scorer(target, arguments.timeout_s) as its_scorer,
        Progress("parity", len(prompts), "prompts") as progress,
    ):
        scorer = None if is_t5 else its_scorer
        for start in range(0, len(prompts), rows):
            batch = [tuple(prompt) for prompt in prompts[start : start + rows]]
            queries = [Query(arguments.output_length, prompt, wants_log_probs=True) for prompt in batch]
            generations = connection.ask(queries)
            # A prompt of one token has nothing before it to be scored by.
            scored = [row for row, prompt in enumerate(batch) if scorer and len(prompt) > 1]
            found = scorer.score([(batch[row][:1], batch[row][1:]) for row in scored]) if scorer else []
            scores = dict(zip(scored, found, strict=True))
            for row, (prompt, made) in enumerate(zip(batch, generations, strict=True)):
                if made is None or made.log_probs is None or len(made.tokens) != arguments.output_length:
                    raise ServerError(f"prompt {start + row + 1}: the answer lacks tokens or log probabilities")
                own = scores.get(row)
                log_probs, argmax = (own.log_probs, own.argmax) if own else ((), ())
                answers.append(Served(prompt, made.tokens, log_probs + made.log_probs, argmax + made.tokens))
            progress.advance(len(batch))
    return answers


def conclude(outcome: ParityOutcome, findings: PassageFindings) -> ParityOutcome:
    """Join the verdicts of prompts and passages: any broken limit fails, any doubt is inconclusive."""
    broken = (*(outcome.reasons if outcome.verdict == FAILS else ()), *findings.broken)
    if broken:
        return replace(outcome, verdict=FAILS, reasons=broken)
    if findings.doubts:
        return replace(outcome, verdict=INCONCLUSIVE, reasons=findings.doubts)
    return replace(outcome, reasons=(*outcome.reasons, *findings.shown))


def _compare_numbers(target: Target, reference: Reference) -> PassageFindings:
    if reference.source is None:
        return PassageFindings()
    model = reference.model if isinstance(reference, HuggingFaceReference) else None
    return compare_numbers(reference.source, target.served.directory, model)


def _open(arguments: ParityArguments) -> Target:
    target = with_adapter(open_named(arguments), arguments.lora_name)
    if target.capabilities:
        _check_api(target, target.capabilities)
    if not target.interface.takes_ids:
        raise ConfigError(f"model '{arguments.model}' takes no token ids", "take model=fastertransformer")
    return target


def _check_api(target: Target, can: Capabilities) -> None:
    """Print what the endpoint is, and refuse one that does not tell what parity compares.

    Raises:
        ConfigError: it does not tell the log probabilities or the ids of tokens.
    """
    sys.stdout.write(f"{can.line()}\n")
    needed = {
        "token ids as prompts": can.takes_ids,
        "echo with logprobs": can.scores_prompts,
        "return_token_ids": can.names_ids or can.returns_ids,
        "ignore_eos": can.ignores_end,
    }
    lacking = [f"{name} ({can.why_not(name)})" for name, is_there in needed.items() if not is_there]
    if lacking:
        raise ConfigError(
            f"parity compares tokens by id, and {target.url} does not tell them: it has no {', no '.join(lacking)}",
            "give an endpoint that has these, such as vLLM's or Slipway's own",
        )


def _encode(arguments: ParityArguments, prompts: list[str | Ids], served: DeployedModel) -> list[Ids]:
    directory = arguments.tokenizer or served.directory
    needs_tokenizer = any(isinstance(prompt, str) for prompt in prompts)
    tokenizer = load_tokenizer(directory) if needs_tokenizer and directory else None
    room = None if served.max_positions is None else served.max_positions - arguments.output_length
    return encode_prompts(prompts, tokenizer, served.vocab_size, room)


def _compare(answers: Sequence[Served], reference: Reference, tie: float) -> list[Position]:
    positions: list[Position] = []
    with Progress("reference", len(answers), "prompts") as progress:
        for number, served in enumerate(answers):
            positions += compare(number, served, reference.log_probs(served.prompt, served.tokens), tie)
            progress.advance()
    return positions


def _lines(outcome: ParityOutcome, reference: Reference, notes: Sequence[str]) -> Iterable[str]:
    yield f"parity {'is ' * (outcome.verdict == INCONCLUSIVE)}{outcome.verdict} against {reference.name}"
    for note in notes:
        yield f"  note: {note}"
    yield from (f"  {reason}" for reason in outcome.reasons)
    if outcome.first_difference:
        yield "  first differing token: prompt {}, token {}".format(*outcome.first_difference)


TASK = "parity"


def write_results(
    arguments: ParityArguments,
    target: Target,
    positions: Sequence[Position],
    rounded: Sequence[Position],
    outcome: ParityOutcome,
    source: Mapping[str, Any],
    findings: PassageFindings,
) -> None:
    """Write everything into the output directory, the manifest last; ``source`` describes the reference."""
    metrics = (*summarise(positions, rounded), *findings.metrics)
    tables: dict[str, Sequence[Any]] = {"positions.csv": positions, "prompts.csv": list(_by_prompt(positions))}
    if findings.scales:
        tables["scales.csv"] = findings.scales
    first = outcome.first_difference
    verdict = {
        "verdict": outcome.verdict,
        "reasons": list(outcome.reasons),
        "first_difference": None if first is None else {"prompt": first[0], "token": first[1]},
    }
    data, model = _describe_data(arguments.data_path), target.identity
    served_model = {key: model[key] for key in ("model", "engine", "model_digest", ADAPTER) if key in model}
    prompts = len({position.prompt for position in positions})
    files.write_results(
        arguments.output,
        tables,
        {**verdict, **{metric.name: metric.value for metric in metrics}, "source": source, **served_model},
        files.describe_results(TASK, metrics, prompts, 0, {"data": data, "model": model, "source": source, **verdict}),
        {"data": data, "model": model, "source": source},
    )


def _describe_data(file: Path | None) -> dict[str, str]:
    if file is None:
        return {"file": "prompts of the configuration", "sha256": ""}
    return {"file": file.name, "sha256": file_digest(file).removeprefix("sha256:")}


def _by_prompt(positions: Sequence[Position]) -> Iterable[dict[str, Any]]:
    """Yield a row for each prompt; the first differing token is empty without one."""
    for number, group in groupby(positions, key=lambda position: position.prompt):
        rows = list(group)
        figures = {metric.name: metric.value for metric in summarise(rows)}
        generated = [row for row in rows if row.part == GENERATED]
        yield {
            "prompt": number,
            "scored_tokens": len(rows),
            "generated_tokens": len(generated),
            "first_differing_token": next((row.place for row in generated if not row.agrees), None),
            **{name: figures[name] for name in figures if name != "identical_continuations"},
        }
