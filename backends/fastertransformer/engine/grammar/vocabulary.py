"""What each token adds to a text, as bytes, by the tokenizer's files beside the shards.

No tokenizer is run: only the vocabulary is read, and which of two ways its pieces stand for bytes in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ft_format.byte_pieces import SPACE, byte_of, of_letters

from ..errors import RequestError

_NAMES = ("tokenizer.json", "vocab.json", "tokenizer.model")


def find_vocabulary(directory: Path) -> Path:
    """Return the file that has the vocabulary.

    The files are looked for in the order in which the exported repository's own tokenizer looks for them.

    Raises:
        RequestError: there is none.
    """
    for name in _NAMES:
        if (file := directory / name).is_file():
            return file
    raise RequestError(
        f"a grammar needs the model's tokenizer, and beside its shards is neither {', nor '.join(_NAMES)}",
        "copy one of them there, or convert the checkpoint with its tokenizer and export it again",
    )


def read_token_bytes(directory: Path, vocab_size: int) -> list[bytes]:
    """Read the bytes of each token, ``vocab_size`` of them; empty: the token stands for no text.

    Raises:
        RequestError: the directory has no tokenizer, or its pieces do not stand for bytes.
    """
    readers = dict(zip(_NAMES, (_read_tokenizer_file, _read_byte_pairs, _read_sentencepiece), strict=True))
    file = find_vocabulary(directory)
    found = dict(readers[file.name](file))
    return [found.get(token, b"") for token in range(vocab_size)]


def _read_byte_pairs(file: Path) -> Iterable[tuple[int, bytes]]:
    return ((token, of_letters(piece)) for piece, token in json.loads(file.read_text("utf-8")).items())


def _read_sentencepiece(file: Path) -> Iterable[tuple[int, bytes]]:
    try:
        import sentencepiece
    except ImportError:
        raise RequestError(
            f"a grammar needs the vocabulary of the model's {file.name}",
            "install the package sentencepiece, which reads it",
        ) from None
    model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    for token in range(model.get_piece_size()):
        if not (model.is_control(token) or model.is_unknown(token) or model.is_unused(token)):
            yield token, _of_piece(model.id_to_piece(token))


def _read_tokenizer_file(file: Path) -> Iterable[tuple[int, bytes]]:
    content = json.loads(file.read_text("utf-8"))
    parts = list(_parts(content.get("decoder")))
    if any(part.get("type") == "ByteLevel" for part in parts):
        read = of_letters
    elif any(part.get("type") == "Metaspace" or part.get("pattern") == {"String": SPACE} for part in parts):
        read = _of_piece
    else:
        kinds = ", ".join(str(part.get("type")) for part in parts) or "none"
        raise RequestError(
            f"the model's {file.name} has the decoder {kinds}, whose tokens do not stand for bytes one by one",
            "grammars are honoured with a byte-level BPE or a SentencePiece vocabulary; leave the grammar out",
        )
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pieces and scores
        vocabulary = {piece: token for token, (piece, _) in enumerate(vocabulary)}
    added = {entry["id"]: entry for entry in content.get("added_tokens") or ()}
    yield from ((token, read(piece)) for piece, token in vocabulary.items() if token not in added)
    yield from ((token, entry["content"].encode()) for token, entry in added.items() if not entry["special"])


def _parts(decoder: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    """Return a decoder, or those that it is a sequence of."""
    if decoder:
        yield decoder
        for part in decoder.get("decoders") or ():
            yield from _parts(part)


def _of_piece(piece: str) -> bytes:
    byte = byte_of(piece)
    return piece.replace(SPACE, " ").encode() if byte is None else byte
