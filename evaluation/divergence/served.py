"""What is served: its number formats, and its scores of the given tokens and the most probable ones of each place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evaluation.client.client import ModelInterface
from evaluation.client.errors import RequestError
from evaluation.client.request_tensors import PROMPT_TOP_INPUT
from evaluation.client.served_model import Target
from evaluation.divergence.stage import Numbers
from evaluation.divergence.streamed import Scores
from evaluation.parity.arguments import served_precision
from evaluation.parity.formats import TYPES
from evaluation.parity.survey import served_formats
from evaluation.tasks.scoring import Scorer, TokenScores
from ft_format.weight_format import FP8_FORMATS, INT8, NONE
from handover.errors import ConfigError
from handover.progress import Progress

Ids = tuple[int, ...]
_USUAL = (20, 5, 1)  # log probabilities that servers tell: vLLM and SGLang, OpenAI, any
_PROBE = (1, 2, 3)


def served_numbers(target: Target, precision: str | None, quantization: str | None) -> tuple[Numbers, bool]:
    """Return the served number formats, and whether they are known or named.

    Args:
        target: the served model.
        precision: that the user names; None: what the server says.
        quantization: that the checkpoint went through before it was served; None: none.
    """
    formats = served_formats(target)
    is_known = formats.are_known or precision is not None
    precision = precision or served_precision(formats.weight_data_type, formats.data_type, formats.weights)
    weights = INT8 if precision == INT8.name else NONE
    if precision in {each.name for each in FP8_FORMATS}:
        quantization = precision
    data_type = precision if precision in TYPES else formats.data_type or "fp16"
    return Numbers(data_type, weights, quantization=quantization or ""), is_known


def find_top(scorer: Scorer, target: Target, wanted: int) -> int:
    """Find how many log probabilities of a place the served model tells, at most as many as are wanted.

    0: it tells its most probable token, without a log probability.

    Raises:
        ConfigError: it scores no given tokens, or names them by their texts.
    """
    if isinstance(target.interface, ModelInterface):
        return min(wanted, _USUAL[0]) if PROMPT_TOP_INPUT in target.interface.inputs else 0
    can = target.capabilities
    if can and not (can.takes_ids and can.names_ids and can.scores_prompts):
        lacking = [name for name in ("token ids as prompts", "echo with logprobs", "return_tokens_as_token_ids")]
        said = "; ".join(f"{name}: {why}" for name in lacking if (why := can.why_not(name)))
        raise ConfigError(
            f"divergence compares tokens by id, and {target.url} does not tell them: {said}",
            "give an endpoint that has token ids as prompts, echo with logprobs and return_tokens_as_token_ids",
        )
    for count in sorted({wanted, *(each for each in _USUAL if each < wanted)}, reverse=True):
        try:
            scorer.score([(_PROBE[:1], _PROBE[1:])], count)
        except RequestError:
            continue
        return count
    return 0


def ask_scores(scorer: Scorer, passages: Sequence[Ids], top: int, rows: int) -> Scores:
    """Score every token of passages but the first.

    Raises:
        ServerError: a request failed.
    """
    found: list[TokenScores] = []
    with Progress("divergence", len(passages), "passages") as progress:
        for begin in range(0, len(passages), rows):
            part = passages[begin : begin + rows]
            found += scorer.score([(row[:1], row[1:]) for row in part], top)
            progress.advance(len(part))
    return as_scores(found)


def as_scores(found: Sequence[TokenScores]) -> Scores:
    """Lay out the scores of passages; where none but the best token is told, its log probability is not."""
    log_probs = np.concatenate([np.array(each.log_probs, np.float32) for each in found])
    best = np.concatenate([np.array(each.argmax, np.int32) for each in found])
    tops = [place for each in found for place in each.top]
    if not tops:
        # The best token's probability is not known: it is named, and counts to the rest.
        return Scores(log_probs, best[:, None], np.full((len(best), 1), -np.inf, np.float32))
    width = max(1, *map(len, tops))
    ids, values = np.full((len(tops), width), -1, np.int32), np.full((len(tops), width), -np.inf, np.float32)
    for row, place in enumerate(tops):
        for column, (token, value) in enumerate(sorted(place.items(), key=lambda item: -item[1])):
            ids[row, column], values[row, column] = token, value
    return Scores(log_probs, ids, values)
