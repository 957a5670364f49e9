"""Sources with references for translation and summarization. The login node imports this module: no client."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from evaluation.arguments import TextPairArguments
from evaluation.tasks.prompt_template import Template, read_template
from handover.errors import ConfigError
from handover.regular_file import read_text

FIELDS = ("source", "answer")
"""Fields of a pair that a prompt may contain; the model generates the answer."""
_PIECE_SPACE = "\u2581"
"""SentencePiece's symbol for the space before a word."""


@dataclass(frozen=True)
class Pair:
    """A source text and its reference."""

    source: str
    reference: str


def check_files(arguments: TextPairArguments, converted: Path | None) -> None:
    """Read the files, of which none is made by a conversion."""
    check_pairs(arguments)


def check_pairs(arguments: TextPairArguments) -> tuple[list[Pair], Template]:
    """Read the pairs and the prompt.

    Raises:
        ConfigError: a file is missing or malformed.
    """
    pairs = read_pairs(arguments.data_path, arguments.reference_path, arguments.samples, arguments.recover_bpe)
    return pairs, read_template(arguments.prompt, FIELDS)


def read_pairs(path: Path, reference: Path | None, samples: int | None, recover_bpe: bool = False) -> list[Pair]:
    """Read two files with a text a line each, or JSON lines with ``source`` and ``reference``.

    Args:
        path: file of sources, or of JSON lines.
        reference: file of references; None if ``path`` has JSON lines.
        samples: number of pairs to read; None for all.
        recover_bpe: whether lines hold SentencePiece's pieces, as in FasterTransformer's ``test.en`` and ``test.de``.

    Raises:
        ConfigError: a file is missing or malformed, they have different lengths, or fewer than the samples asked for.
    """
    if reference is None:
        pairs = [_pair(path, number, line) for number, line in enumerate(_lines(path), 1)]
    else:
        sources, references = _lines(path), _lines(reference)
        if len(sources) != len(references):
            raise ConfigError(
                f"{path} has {len(sources)} lines and {reference} {len(references)}", "line n of both is pair n"
            )
        pairs = [Pair(*pair) for pair in zip(sources, references, strict=True)]
    if not pairs or (samples is not None and len(pairs) < samples):
        raise ConfigError(f"{path} has {len(pairs)} texts, but {samples or 'at least 1'} are asked for")
    if recover_bpe:
        pairs = [Pair(join_pieces(pair.source.split()), join_pieces(pair.reference.split())) for pair in pairs]
    return pairs[:samples]


def join_pieces(pieces: Iterable[str]) -> str:
    """Join SentencePiece's pieces to a text, without the end token."""
    return "".join(piece for piece in pieces if piece != "</s>").replace(_PIECE_SPACE, " ").strip()


def _lines(path: Path) -> list[str]:
    """Read the lines of a file; only a line feed ends a line, and the last line may lack it."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _pair(path: Path, number: int, line: str) -> Pair:
    try:
        content = json.loads(line)
        return Pair(str(content["source"]), str(content["reference"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: line {number} is no object with 'source' and 'reference'",
            "give such JSON lines, or reference_path: a second file with a text a line",
        ) from error
