"""The served model's tokenizer, read from the files that lie beside its shards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from export_scripts.repository.tokenizer_models.slipway_tokenizer import FileTokenizer
from handover.errors import ArtefactError
from handover.text_ids import TextIds, read_text_ids

VOCABULARY_NAMES = ("vocab.json", "gpt2-vocab.json")
MERGES_NAMES = ("merges.txt", "gpt2-merges.txt")
SENTENCEPIECE_NAME = "tokenizer.model"
PIPELINE_NAME = "tokenizer.json"
_SENTINEL = re.compile("<extra_id_[0-9]+>")
"""T5's sentinel tokens: the only special tokens that may occur in a text."""


_UNKNOWN = "\u2047"
"""What SentencePiece writes for what no piece stands for: a character that hardly any vocabulary has."""


class Plain(Protocol):
    """A tokenizer without post-processing: neither direction adds or removes special tokens."""

    unknown: str
    """How what no piece stands for is decoded; empty where it is decoded to a text that is encoded to it again."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""


class Tokenizer(Plain, Protocol):
    """A tokenizer with post-processing, as an ensemble applies it."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the start and end tokens that the tokenizer adds, if any."""

    def encode_part(self, text: str) -> list[int]:
        """Return the token ids of a part of a text, such as a word or an answer, without added tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without the start token that the tokenizer adds."""


class TextTokenizer:
    """A tokenizer that adds start and end tokens to a text."""

    def __init__(self, plain: Plain, text_ids: TextIds) -> None:
        self._plain, self.text_ids, self.unknown = plain, text_ids, plain.unknown

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


class PipelineTokenizer:
    """A tokenizer of Hugging Face's library ``tokenizers``."""

    def __init__(self, pipeline: Any, encode: Callable[[str], list[int]] | None = None, unknown: str = "") -> None:
        self._pipeline, self.unknown = pipeline, unknown
        self._encode = encode or (lambda text: list(pipeline.encode(text, add_special_tokens=False).ids))

    @classmethod
    def of_byte_pairs(cls, vocabulary: Path, merges: Path) -> PipelineTokenizer:
        """Build GPT-2's byte-level BPE from ``vocab.json`` and ``merges.txt``."""
        from tokenizers import Tokenizer as Pipeline
        from tokenizers import decoders, models, pre_tokenizers

        pipeline = Pipeline(models.BPE.from_file(str(vocabulary), str(merges)))
        pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        pipeline.decoder = decoders.ByteLevel()
        return cls(pipeline)

    @classmethod
    def of_file(cls, file: Path) -> PipelineTokenizer:
        """Read any tokenizer of the library from ``tokenizer.json``.

        A special token's name in a text is plain text, whatever the vocabulary: texts are encoded by what the server
        encodes them with.
        """
        from tokenizers import Tokenizer as Pipeline

        description = json.loads(file.read_text("utf-8"))
        for entry in description.get("added_tokens") or ():
            entry["special"] = entry["special"] and not _SENTINEL.fullmatch(entry["content"])
        pipeline = Pipeline.from_str(json.dumps(description))
        model = description["model"]
        place, vocabulary = model.get("unk_id"), model["vocab"]  # of a Unigram model; others have its name
        unknown = model.get("unk_token") if place is None else vocabulary[place][0]
        return cls(pipeline, FileTokenizer(file).encode, unknown or "")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self._encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return str(self._pipeline.decode(list(ids), skip_special_tokens=False))


class SentencePieceTokenizer:
    """A SentencePiece model, from ``tokenizer.model``."""

    unknown = ""

    def __init__(self, model: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self._processor = SentencePieceProcessor(model_file=str(model))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(self._processor.encode(text, out_type=int))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self._processor.decode(list(ids)))


def text_for(tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
    """Return a text that is encoded to some token ids; None if there is none."""
    text = tokenizer.decode(ids)
    for given in (text, text.replace(tokenizer.unknown, _UNKNOWN) if tokenizer.unknown else text):
        if list(tokenizer.encode(given)) == list(ids):
            return given
    return None


def load_tokenizer(source: Path) -> TextTokenizer:
    """Load a tokenizer with the start and end tokens that it adds; see ``_load_plain`` for the source."""
    return TextTokenizer(_load_plain(source), read_text_ids(source if source.is_dir() else source.parent))


def _load_plain(source: Path) -> Plain:
    """Load the tokenizer from a directory of its files, from ``tokenizer.json`` or from a SentencePiece model file.

    Args:
        source: a directory with ``tokenizer.json``, or ``vocab.json`` and ``merges.txt`` (or ``gpt2-vocab.json`` and
            ``gpt2-merges.txt``, as FasterTransformer's scripts call them), or ``tokenizer.model``.

    Raises:
        ArtefactError: none of these files exists, or they cannot be read.
    """
    if source.is_file():
        return _open(PipelineTokenizer.of_file if source.suffix == ".json" else SentencePieceTokenizer, source)
    if (source / PIPELINE_NAME).is_file():
        return _open(PipelineTokenizer.of_file, source / PIPELINE_NAME)
    vocabulary = _first_file(source, VOCABULARY_NAMES)
    merges = _first_file(source, MERGES_NAMES)
    if vocabulary is not None and merges is not None:
        return _open(PipelineTokenizer.of_byte_pairs, vocabulary, merges)
    if (source / SENTENCEPIECE_NAME).is_file():
        return _open(SentencePieceTokenizer, source / SENTENCEPIECE_NAME)
    raise ArtefactError(
        f"{source} holds no tokenizer",
        f"it should hold {PIPELINE_NAME}, {VOCABULARY_NAMES[0]} and {MERGES_NAMES[0]}, or {SENTENCEPIECE_NAME}; "
        "name another directory with --tokenizer",
    )


def _first_file(directory: Path, names: Sequence[str]) -> Path | None:
    return next((directory / name for name in names if (directory / name).is_file()), None)


def _open(kind: Callable[..., Plain], *files: Path) -> Plain:
    try:
        return kind(*files)
    except Exception as error:  # both libraries raise bare Exception, RuntimeError or OSError
        raise ArtefactError(f"the tokenizer in {files[0].parent} cannot be read: {error}") from error
