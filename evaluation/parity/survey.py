"""The comparison of passages: made, scored by the server, and compared with the source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from evaluation.client.served_model import Target
from evaluation.parity.arguments import FP8_ACTIVATIONS, FP8_CACHE, PRECISIONS, ParityArguments
from evaluation.parity.comparison import Served
from evaluation.parity.distances import PassageFindings, compare_plainly
from evaluation.parity.formats import Formats
from evaluation.parity.passages import Passages, Room, Scores, ask_scores, make_more_passages, make_passages, unvisited
from evaluation.parity.references import HuggingFaceReference, Reference
from evaluation.parity.twin import Twin
from evaluation.tasks.scoring import Scorer
from export_scripts.checkpoints.source import Source
from ft_format.weight_format import KEY, find_format
from handover.endpoint import FLAGS
from handover.errors import ConfigError
from models.described import fp8_blocks, input_scales
from models.directory import CONFIG_FILE
from models.fp8 import FORMS

_SLIPWAY = "slipway"
_COARSE = PRECISIONS[PRECISIONS.index("bf16") :]
_LOOSER = 2.0  # random tokens differ more than those of a text


_Asked = tuple[Room, tuple[Passages, Passages], tuple[Scores, Scores]]
"""The model's room, less what scoring needs beside the tokens; passages to average over, and passages that visit every
position; the server's log probabilities of both."""


def survey(
    arguments: ParityArguments,
    target: Target,
    reference: Reference,
    twin: Twin | None,
    answers: Sequence[Served],
    precision: str,
) -> PassageFindings:
    """Compare passages.

    Args:
        arguments: of the command line.
        target: the deployment.
        reference: the source.
        twin: the source in the served number formats, into which the reference has been made; None: it cannot be.
        answers: to the prompts.
        precision: whose limits count.

    Raises:
        ServerError: a request failed.
    """
    room, visited = _room(target, reference), [len(each.prompt) + len(each.tokens) for each in answers]
    asked = _ask(arguments, target, room) if arguments.passages else None
    if isinstance(asked, tuple):
        visited += [each.tokens.shape[1] for each in asked[1]]
    line = unvisited(room, visited)
    notes = (f"{line}: evaluation.parity.longest_passage is {arguments.longest_passage}",) if line else ()
    if not isinstance(asked, tuple):
        doubts = (asked,) if asked and precision in _COARSE else ()
        return PassageFindings(
            doubts=doubts, notes=(*notes, asked or "evaluation.parity.passages is 0: none was scored")
        )
    found = _compare(arguments, target, reference, twin, asked, precision)
    return replace(found, notes=(*found.notes, *notes))


def served_formats(target: Target, source: Source | None = None) -> Formats:
    """Read the number formats of a deployment, as far as it says them.

    Args:
        target: the deployment.
        source: of a directory whose matrices became FP8 before it was served; None: they did not.
    """
    endpoint = target.served.endpoint
    settings = {**target.interface.parameters, **endpoint.settings}
    if endpoint.engine == _SLIPWAY:  # its flags are parameters of config.pbtxt
        settings = {**dict(re.findall(r"(\w+)=(\S+)", settings.get(FLAGS, ""))), **settings}
    on_disk = settings.get("weight_data_type") or target.served.weight_data_type
    written = _written_as_fp8(target.served.directory, source)
    others = {FP8_CACHE: settings.get("kv_cache_dtype", "").startswith("fp8")}
    scales = _input_scales(target.served.directory)
    others[FP8_ACTIVATIONS] = bool(scales) or settings.get("fp8_activations") == "1"
    return Formats(
        on_disk,
        settings.get("data_type", ""),
        find_format(settings.get(KEY), settings.get("quantization") or written),
        on_disk if written else "",
        tuple(name for name, is_so in others.items() if is_so),
        scales,
    )


def _input_scales(directory: Path | None) -> Mapping[str, float]:
    return input_scales(directory, ConfigError) if directory and (directory / CONFIG_FILE).is_file() else {}


def make_twin(target: Target, reference: Reference, formats: Formats) -> Twin | None:
    """Make the source one in the served number formats, in place; None where that cannot be done."""
    if not isinstance(reference, HuggingFaceReference) or formats.lacking(reference.model):
        return None
    return reference.twin(formats, target.served.endpoint.engine == _SLIPWAY)


def _written_as_fp8(directory: Path | None, source: Source | None) -> str:
    """Return as what a conversion has written a directory's matrices; empty: they are the source's own."""
    if not (directory and source and (directory / CONFIG_FILE).is_file()) or (source.own and source.own.quantization):
        return ""
    blocks = fp8_blocks(directory, ConfigError)
    return next((name for name, block in FORMS.items() if block in blocks), "")


def _room(target: Target, reference: Reference) -> Room:
    # Ids from the first one of a tuned prompt on stand for learnt vectors, not for tokens.
    served = target.served
    limits = (reference.vocab_size, served.vocab_size, served.first_prompt_id)
    return Room(min(each for each in limits if each), served.max_positions, target.interface.is_encoder_decoder)


def _ask(arguments: ParityArguments, target: Target, room: Room) -> _Asked | str:
    """Have the server score passages; a str says why it cannot."""
    rows = target.batch_size
    with Scorer(target, arguments.timeout_s) as scorer:
        try:
            spare = 0 if room.has_encoder else scorer.spare_positions(1)  # SGLang takes zeros alone for no prompt
            free = replace(room, positions=None if room.positions is None else room.positions - spare)
            passages = make_passages(free, arguments.passages, arguments.longest_passage)
            scores = ask_scores(scorer, passages[0], rows), ask_scores(scorer, passages[1], rows)
            return free, passages, scores
        except ConfigError as error:
            return f"passages could not be scored: {error.problem}"


def _compare(
    arguments: ParityArguments,
    target: Target,
    reference: Reference,
    twin: Twin | None,
    asked: _Asked,
    precision: str,
) -> PassageFindings:
    formats, (room, passages, scores) = served_formats(target, reference.source), asked
    if twin is not None:

        def more(first: int, wanted: int) -> tuple[Passages, Scores]:
            rows = target.batch_size
            extra = make_more_passages(room, first, wanted, arguments.longest_passage)
            with Scorer(target, arguments.timeout_s) as scorer:
                return extra, ask_scores(scorer, extra, rows)

        return twin.compare(passages, scores, arguments.scale_error, arguments.max_passages, more)
    lacking = "the reference is the engine"
    if isinstance(reference, HuggingFaceReference):
        lacking = formats.lacking(reference.model)
    doubt = f"norms' scales were not compared, {lacking}, and {precision} is too coarse without that"
    most = _LOOSER * arguments.limits_by_precision[precision]["max_log_prob_difference"]
    doubts = (doubt,) if precision in _COARSE else ()
    return compare_plainly(lambda each: _plain_scores(reference, each), passages, scores, most, doubts)


def _plain_scores(reference: Reference, passages: Passages) -> Scores:
    """Score passages with the reference, one after another."""
    found = []
    for row, tokens in enumerate(passages.tokens.tolist()):
        given, behind = (tokens[:1], tokens[1:]) if passages.source is None else (passages.source[row].tolist(), tokens)
        log_probs = reference.log_probs(given, behind)
        found.append(log_probs[np.arange(len(behind)), behind])
    return np.array(found, np.float64)
