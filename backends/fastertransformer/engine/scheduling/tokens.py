"""The tokens of a step, once the host has them, become those of their rows; some rows fail by them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as Several

from ..ops.logits import NOT_FINITE
from ..rows.answer import INVALID, Failure
from ..rows.sequence import Job, Sequence
from ..sampling.pending import OwnedToken


def append_tokens(tokens: Several[OwnedToken], present: Container[Sequence]) -> tuple[list[Sequence], dict[Job, int]]:
    """Append the tokens of rows that are present.

    Returns:
        These rows; and requests with a row of each whose logits are infinite or NaN.
    """
    overflowed = dict[Job, int]()
    for (sequence, _), token, scores in tokens:
        if sequence not in present:
            continue
        if token == NOT_FINITE:
            overflowed[sequence.job] = sequence.row
        elif sequence.width == 1 and sequence.max_tokens:
            sequence.append(sequence.beams[0], token, *scores)
    found = [sequence for (sequence, beam), _, _ in tokens if not beam and sequence in present]
    for sequence in found:
        sequence.end_step()
    return found, overflowed


def overflow_in(row: int) -> str:
    """Describe why a request fails one row of which has numbers that are not finite."""
    hint = "fp16 reaches 65504, bf16 as far as fp32, and so may prompt embeddings"
    return f"generation failed: the network's numbers overflow in row {row}; {hint}"


def grammar_failures(rows: Iterable[Sequence]) -> dict[Job, Failure]:
    """Return the failures of requests a row of which its grammar leaves no token."""
    return {
        each.job: Failure(f"the grammar allows no further token: {each.guided.problem}", INVALID)
        for each in rows
        if each.guided and each.guided.problem
    }
