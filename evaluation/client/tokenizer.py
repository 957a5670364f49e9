"""The served model's tokenizer, read from the files that lie beside its shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from export_scripts.repository.tokenizer_models.slipway_tokenizer import (
    BytePairTokenizer,
    FileTokenizer,
    SentencePieceTokenizer,
)
from export_scripts.repository.tokenizer_models.slipway_tokenizer import Tokenizer as Plain
from handover.errors import ArtefactError
from handover.text_ids import TextIds, read_text_ids

VOCABULARY_NAMES = ("vocab.json", "gpt2-vocab.json")
MERGES_NAMES = ("merges.txt", "gpt2-merges.txt")
SENTENCEPIECE_NAME = "tokenizer.model"
PIPELINE_NAME = "tokenizer.json"
_UNKNOWN = "\u2047"
"""What SentencePiece writes for what no piece stands for: a character that hardly any vocabulary has."""


class Tokenizer(Protocol):
    """A tokenizer with post-processing, as an ensemble applies it."""

    unknown: str
    """How what no piece stands for is decoded; empty where it is decoded to a text that is encoded to it again."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the start and end tokens that the tokenizer adds, if any."""

    def encode_part(self, text: str) -> list[int]:
        """Return the token ids of a part of a text, such as a word or an answer, without added tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without the start token that the tokenizer adds."""


class TextTokenizer:
    """The exported repository's tokenizer with the start and end tokens that are added to a text."""

    def __init__(self, plain: Plain, text_ids: TextIds, unknown: str = "") -> None:
        self._plain, self.text_ids, self.unknown = plain, text_ids, unknown

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the added start and end tokens."""
        return [*self.text_ids.before, *self._plain.encode(text), *self.text_ids.after]

    def encode_part(self, text: str) -> list[int]:
        """Return the token ids of a part of a text, without added tokens."""
        return self._plain.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without the start token that the tokenizer adds."""
        before = self.text_ids.before
        return self._plain.decode(ids[len(before) :] if before and tuple(ids[: len(before)]) == before else ids)


def text_for(tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
    """Return a text that is encoded to some token ids; None if there is none."""
    text = tokenizer.decode(ids)
    for given in (text, text.replace(tokenizer.unknown, _UNKNOWN) if tokenizer.unknown else text):
        if list(tokenizer.encode(given)) == list(ids):
            return given
    return None


def load_tokenizer(source: Path) -> TextTokenizer:
    """Load a tokenizer with the start and end tokens that it adds.

    Args:
        source: a directory with ``tokenizer.json``, or ``vocab.json`` and ``merges.txt`` (or ``gpt2-vocab.json`` and
            ``gpt2-merges.txt``, as FasterTransformer's scripts call them), or ``tokenizer.model``; or the first or last
            of these files.

    Raises:
        ArtefactError: none of these files exists, or they cannot be read.
    """
    directory = source if source.is_dir() else source.parent
    try:
        plain, unknown = _load_plain(source)
    except ArtefactError:
        raise
    except Exception as error:  # both libraries raise bare Exception, RuntimeError or OSError
        raise ArtefactError(f"the tokenizer in {directory} cannot be read: {error}") from error
    return TextTokenizer(plain, read_text_ids(directory), unknown)


def _load_plain(source: Path) -> tuple[Plain, str]:
    """Load the tokenizer, and how what no piece stands for is decoded."""
    if source.is_file():
        return _load_pipeline(source) if source.suffix == ".json" else (SentencePieceTokenizer(source), "")
    if (source / PIPELINE_NAME).is_file():
        return _load_pipeline(source / PIPELINE_NAME)
    vocabulary = _first_file(source, VOCABULARY_NAMES)
    merges = _first_file(source, MERGES_NAMES)
    if vocabulary is not None and merges is not None:
        return BytePairTokenizer(vocabulary, merges), ""
    if (source / SENTENCEPIECE_NAME).is_file():
        return SentencePieceTokenizer(source / SENTENCEPIECE_NAME), ""
    raise ArtefactError(
        f"{source} holds no tokenizer",
        f"it should hold {PIPELINE_NAME}, {VOCABULARY_NAMES[0]} and {MERGES_NAMES[0]}, or {SENTENCEPIECE_NAME}; "
        "name another directory with --tokenizer",
    )


def _load_pipeline(file: Path) -> tuple[Plain, str]:
    content = file.read_text("utf-8")
    model = json.loads(content)["model"]
    place, vocabulary = model.get("unk_id"), model["vocab"]  # of a Unigram model; others have its name
    unknown = model.get("unk_token") if place is None else vocabulary[place][0]
    return FileTokenizer(file, content), unknown or ""


def _first_file(directory: Path, names: Sequence[str]) -> Path | None:
    return next((directory / name for name in names if (directory / name).is_file()), None)
