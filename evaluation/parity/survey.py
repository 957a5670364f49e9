"""The comparison of passages: made, scored by the server, and compared with the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from evaluation.client.served_model import Target
from evaluation.parity.arguments import ParityArguments
from evaluation.parity.comparison import Served
from evaluation.parity.distances import PassageFindings, compare_plainly
from evaluation.parity.formats import Formats
from evaluation.parity.passages import Passages, Room, Scores, ask_scores, make_more_passages, make_passages, unvisited
from evaluation.parity.references import HuggingFaceReference, Reference
from evaluation.tasks.scoring import Scorer
from ft_format.weight_format import INT8, KEY, find_format
from handover.errors import ConfigError

_SLIPWAY = "slipway"
_COARSE = ("bf16", INT8.name)
_LOOSER = 2.0  # random tokens differ more than those of a text


_Asked = tuple[Room, tuple[Passages, Passages], tuple[Scores, Scores]]
"""The model's room, less what scoring needs beside the tokens; passages to average over, and passages that visit every
position; the server's log probabilities of both."""


def survey(
    arguments: ParityArguments, target: Target, reference: Reference, answers: Sequence[Served], precision: str
) -> PassageFindings:
    """Compare passages; the reference cannot be used afterwards; ServerError: a request failed."""
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
    found = _compare(arguments, target, reference, asked, precision)
    return replace(found, notes=(*found.notes, *notes))


def served_formats(target: Target) -> Formats:
    """Read the number formats of a deployment, as far as it says them."""
    settings = {**target.interface.parameters, **target.served.endpoint.settings}
    on_disk = settings.get("weight_data_type") or target.served.weight_data_type
    return Formats(on_disk, settings.get("data_type", ""), find_format(settings.get(KEY)))


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
            spare = 0 if room.has_encoder else scorer.spare_positions(0)
            free = replace(room, positions=None if room.positions is None else room.positions - spare)
            passages = make_passages(free, arguments.passages, arguments.longest_passage)
            scores = ask_scores(scorer, passages[0], rows), ask_scores(scorer, passages[1], rows)
            return free, passages, scores
        except ConfigError as error:
            return f"passages could not be scored: {error.problem}"


def _compare(
    arguments: ParityArguments, target: Target, reference: Reference, asked: _Asked, precision: str
) -> PassageFindings:
    formats, (room, passages, scores) = served_formats(target), asked
    if isinstance(reference, HuggingFaceReference) and formats.are_known:
        twin = reference.twin(formats, target.served.endpoint.engine == _SLIPWAY)

        def more(first: int, wanted: int) -> tuple[Passages, Scores]:
            rows = target.batch_size
            extra = make_more_passages(room, first, wanted, arguments.longest_passage)
            with Scorer(target, arguments.timeout_s) as scorer:
                return extra, ask_scores(scorer, extra, rows)

        return twin.compare(passages, scores, arguments.scale_error, arguments.max_passages, more)
    lacking = "the reference is the engine" if formats.are_known else f"the number formats are not known: {formats}"
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
