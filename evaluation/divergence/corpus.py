"""The passages that are compared: texts as token ids, cut into pieces of four lengths.

The package's own texts are in the public domain (Lewis Carroll, Alice's Adventures in Wonderland, 1865; Hamilton and
Madison, The Federalist, numbers 10 to 15, 1787) and some Python of this project.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

from evaluation.client.tokenizer import Tokenizer
from evaluation.parity.prompts import read_lines
from handover.errors import ConfigError
from handover.regular_file import read_text

Ids = tuple[int, ...]
_TEXTS = Path(__file__).parent / "texts"
_PARTS = (8, 4, 2, 1)  # of the longest passage
_LEAST = 2  # tokens of a passage: the first is not scored
_SAMPLE = "a text"


def read_documents(path: Path | None) -> list[str | Ids]:
    """Read texts, or token ids: the package's own, those of JSON lines, or a whole file as one text.

    Raises:
        ConfigError: the file is missing or damaged, or holds nothing.
    """
    if path is None:
        return [file.read_text() for file in sorted(_TEXTS.glob("*.txt"))]
    if path.suffix == ".jsonl":
        found = list(read_lines(path))
    else:
        try:
            found = [read_text(path)]
        except OSError as error:
            raise ConfigError(f"the texts {path} cannot be read: {error.strerror}") from error
    if not any(found):
        raise ConfigError(f"{path} holds no text")
    return found


def make_passages(
    documents: Sequence[str | Ids], tokenizer: Tokenizer | None, longest: int, count: int | None, vocab_size: int
) -> list[Ids]:
    """Cut documents into passages of an eighth, a quarter, a half and the whole of a length, of all documents in turn.

    Each begins with the tokens that the tokenizer puts before a text.

    Raises:
        ConfigError: a text has no tokenizer, an id is not in the vocabulary, or nothing is long enough.
    """
    before: Ids = ()
    if tokenizer is not None:
        ids, part = tokenizer.encode(_SAMPLE), tokenizer.encode_part(_SAMPLE)
        before = tuple(ids[: max(0, len(ids) - len(part))]) if ids[len(ids) - len(part) :] == part else ()
    queues = [_cut(_encoded(each, tokenizer), before if isinstance(each, str) else (), longest) for each in documents]
    passages: list[Ids] = []
    while queues and (count is None or len(passages) < count):
        queue = queues.pop(0)
        if (passage := next(queue, None)) is not None:
            passages.append(passage)
            queues.append(queue)
    highest = max((max(passage) for passage in passages), default=0)
    if not passages or highest >= vocab_size or min(map(min, passages)) < 0:
        raise ConfigError(
            f"divergence: {len(passages)} passages, the highest token {highest} of {vocab_size}",
            "give texts of this model's own tokenizer, longer than a few tokens",
        )
    return passages


def _encoded(document: str | Ids, tokenizer: Tokenizer | None) -> Ids:
    if not isinstance(document, str):
        return document
    if tokenizer is None:
        raise ConfigError(
            "divergence: the served model's tokenizer is not on this machine",
            "give main.py's deployment.endpoint_tokenizer (--tokenizer of this program), or texts as input_ids",
        )
    return tuple(tokenizer.encode_part(document))


def _cut(ids: Ids, before: Ids, longest: int) -> Iterator[Ids]:
    begin = 0
    for part in cycle(_PARTS):
        width = max(_LEAST, longest // part) - len(before)
        if width < 1 or len(ids) - begin + len(before) < _LEAST:
            return
        yield before + ids[begin : begin + width]
        begin += width


def digest_of(passages: Sequence[Ids]) -> str:
    """Return the SHA-256 of passages."""
    return hashlib.sha256(json.dumps(passages).encode()).hexdigest()
