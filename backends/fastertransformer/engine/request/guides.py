"""What a row's output must follow, by the names of TensorRT-LLM's backend: a type and a text, one of each a row."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import RequestError
from .schema import GUIDES, Inputs, texts

TYPE, GUIDE = GUIDES
KINDS = ("json", "json_schema", "regex", "ebnf_grammar", "choice")
_MOST_BYTES = 1 << 18  # of a guide; 200 kB of choices compile in 80 ms


@dataclass(frozen=True)
class Guide:
    """What an output must follow.

    Attributes:
        kind: one of KINDS.
        text: a JSON schema, a regular expression, a grammar, or a JSON list of texts; of ``json`` it is empty.
    """

    kind: str
    text: str


def parse_guides(sent: Inputs, vocab_size: int) -> list[Guide | None]:
    """Read the guide of each row; None: it has none, which an empty type says too.

    Raises:
        RequestError: a type is unknown, a guide is missing, too long or no UTF-8, the request searches beams, or no
            token of the vocabulary may end a row.
    """
    if TYPE not in sent.tensors:
        if GUIDE in sent.tensors:
            raise RequestError(f"{GUIDE} comes without {TYPE}; send both, or only the type for 'json'")
        return [None] * sent.batch
    kinds = texts(TYPE, sent)
    given_texts = texts(GUIDE, sent) if GUIDE in sent.tensors else [""] * sent.batch
    guides = [_guide(row, kind, text) for row, (kind, text) in enumerate(zip(kinds, given_texts, strict=True))]
    given = [row for row, guide in enumerate(guides) if guide]
    if given and (sent.scalars["beam_width"] > 1).any():
        raise RequestError(f"{TYPE}: a beam search does not apply it; leave it out, or send beam_width 1")
    for row in given:
        if sent.scalars["ignore_eos"][row] or sent.scalars["end_id"][row] >= vocab_size:
            raise RequestError(
                f"{TYPE} in row {row} needs an end_id that may come when the output is complete",
                f"send one below {vocab_size}, and no ignore_eos",
            )
    return guides


def _guide(row: int, kind: str, text: str) -> Guide | None:
    if not kind:
        return None
    if kind not in KINDS:
        raise RequestError(f"{TYPE} is '{kind[:80]}' in row {row}; it must be one of {', '.join(KINDS)}, or empty")
    if kind != "json" and not text:
        raise RequestError(f"{GUIDE} is empty in row {row}; of type {kind} it must be given")
    if len(text) > _MOST_BYTES:
        raise RequestError(f"{GUIDE} has {len(text)} characters in row {row}; at most {_MOST_BYTES} are compiled")
    return Guide(kind, "" if kind == "json" else text)
