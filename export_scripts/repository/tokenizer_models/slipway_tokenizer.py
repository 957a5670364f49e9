"""Text to token ids and back, in the layouts that FasterTransformer's GPT takes and gives."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product, repeat, takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

try:  # in the model repository
    from byte_pieces import byte_of, of_letters  # type: ignore[import-not-found]
except ModuleNotFoundError:  # in the project
    from ft_format.byte_pieces import byte_of, of_letters

_SENTINEL = re.compile("<extra_id_[0-9]+>")
"""T5's marks for gaps: the one kind of special token that belongs into a text."""


GUARD, BREAK = "\ufdd0", "\ufdd1"
"""Code points that are no character of any text: one stands around a special token, the other within its mere name."""


class TextIds(NamedTuple):
    """Tokens that stand around a text's own ones, and those that end a text beside end_id."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    more_end_ids: tuple[int, ...] = ()


NO_TEXT_IDS = TextIds()


def load_text_ids(directory: Path) -> TextIds:
    """Read ``text_ids.json``, which the conversion wrote where the tokenizer's files ask for such tokens."""
    file = directory / "text_ids.json"
    values = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return TextIds(*(tuple(values.get(name, ())) for name in TextIds._fields))


class Tokenizer(Protocol):
    """What both kinds of tokenizer offer."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without any added token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; ids beyond the vocabulary (its padding) stand for nothing.

        A character whose last bytes have not come yet is left out, so that the text of the first tokens is always the
        beginning of the text of more tokens. Other bytes that are no UTF-8 become U+FFFD.
        """

    def bytes_of(self, id_: int) -> bytes | None:
        """Return the bytes that a token stands for wherever it is; None: those of its text, which the library knows."""


class BytePairTokenizer:
    """GPT-2's byte-level BPE from ``vocab.json`` and ``merges.txt``.

    As in FasterTransformer's repository a special token's name inside a prompt is plain text: no client
    can smuggle an end-of-text token into a prompt.
    """

    def __init__(self, vocab_file: Path, merges_file: Path) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab_file), str(merges_file)))
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        pieces = json.loads(vocab_file.read_text("utf-8")).items()
        self._bytes: dict[int, bytes] = {id_: of_letters(piece) for piece, id_ in pieces}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return _decode_utf8(b"".join(map(self._bytes.get, ids, repeat(b""))))[0]

    def bytes_of(self, id_: int) -> bytes | None:
        """Return the bytes that a token stands for."""
        return self._bytes.get(id_, b"")


class SentencePieceTokenizer:
    """SentencePiece from ``tokenizer.model``."""

    def __init__(self, model_file: Path) -> None:
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
        self._size = int(self._processor.get_piece_size())

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = self._processor.encode(text, out_type=int)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        known = [i for i in ids if 0 <= i < self._size]
        return str(self._processor.decode(known[: len(known) - _incomplete(map(self.bytes_of, reversed(known)))]))

    def bytes_of(self, id_: int) -> bytes | None:
        """Return the byte of a piece that is one."""
        is_byte = 0 <= id_ < self._size and self._processor.is_byte(id_)
        byte: bytes | None = byte_of(self._processor.id_to_piece(id_)) if is_byte else None
        return byte


class TextError(ValueError):
    """A text on which the library fails, such as by a regular expression that it cannot match in time."""


class FileTokenizer:
    """Any tokenizer of Hugging Face's library, from ``tokenizer.json``.

    As with the other two nothing is added to a text, and a special token's name in it is plain text; T5's marks for
    gaps are themselves.

    Args:
        file: to be read.
        content: of the file, if it was read already or has yet to be written.

    Attributes:
        special: ids of the special tokens by name.
    """

    def __init__(self, file: Path, content: str = "") -> None:
        import tokenizers

        description = json.loads(content or file.read_text("utf-8"))
        for entry in description.get("added_tokens") or ():
            entry["special"] = entry["special"] and not _SENTINEL.fullmatch(entry["content"])
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
        self._added = {entry["id"]: str(entry["content"]) for entry in description.get("added_tokens") or ()}
        self._is_byte_level = _has_part(description.get("decoder"), "ByteLevel")
        self._bytes, self._pieces = _Known(self._bytes_of), _Known(lambda id_: self._tokenizer.id_to_token(int(id_)))
        own = (entry for entry in description.get("added_tokens") or () if entry["special"])
        self.special: dict[str, int] = {str(entry["content"]): int(entry["id"]) for entry in own}
        self._encoder = tokenizers.Tokenizer.from_str(json.dumps(_with_guarded_names(description)))
        for each in (self._tokenizer, self._encoder):
            each.no_truncation()
            each.no_padding()
        names = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True))) or "(?!)"
        self._names, self._forged = re.compile(names), re.compile(f"{GUARD}({names}){GUARD}")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Raises:
            TextError: the library fails on it.
        """
        return self._encode(self._forged.sub(lambda found: found[1], text) if GUARD in text else text)

    def encode_written(self, text: str) -> list[int]:
        """Return the token ids of a text in which the name of a special token is that token, unless it is broken.

        Args:
            text: BREAK within a name makes plain text of it, and stands for nothing.
        """
        guarded = self._names.sub(lambda found: f"{GUARD}{found[0]}{GUARD}", text.replace(GUARD, ""))
        return self._encode(guarded.replace(BREAK, ""))

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        except BaseException as error:  # a panic of the library is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise TextError(f"the tokenizer fails on this text: {str(error)[:200]}") from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        if self._is_byte_level:
            return _decode_utf8(b"".join(map(self._bytes.__getitem__, ids)))[0]
        known = [int(id_) for id_ in ids if self._pieces[id_] is not None]
        complete = known[: len(known) - _incomplete(byte_of(self._pieces[id_]) for id_ in reversed(known))]
        return str(self._tokenizer.decode(complete, skip_special_tokens=False))

    def bytes_of(self, id_: int) -> bytes | None:
        """Return the bytes of a byte-level token, or the byte of a piece that is one."""
        if self._is_byte_level:
            return bytes(self._bytes[id_])
        byte: bytes | None = byte_of("" if id_ in self._added else self._pieces[id_] or "")
        return byte

    def _bytes_of(self, id_: int) -> bytes:
        if id_ in self._added:
            return self._added[id_].encode("utf-8")
        return bytes(of_letters(self._tokenizer.id_to_token(int(id_)) or ""))


class _Known(dict[int, Any]):
    """What tokens stand for, found out once: a decoupled model has its whole output decoded after every token."""

    def __init__(self, find: Callable[[int], Any]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, id_: int) -> Any:
        found = self[id_] = self._find(id_)
        return found


def _with_guarded_names(description: dict[str, Any]) -> dict[str, Any]:
    """Rename special tokens to what no text is called, so that a vocabulary cannot make them of a text's own letters.

    A special token of one character keeps its name where the vocabulary spells texts with it.
    """
    model = description["model"]
    vocabulary, pairs = model["vocab"], model.get("merges") or ()
    pieces = {entry[0] for entry in vocabulary} if isinstance(vocabulary, list) else vocabulary
    added = description.get("added_tokens") or ()
    guarded = {
        entry["content"]: f"{GUARD}{entry['content']}{GUARD}"
        for entry in added
        if entry["special"] and not (len(entry["content"]) == 1 and entry["content"] in pieces)
    }
    if isinstance(vocabulary, list):
        named: Any = [[guarded.get(piece, piece), score] for piece, score in vocabulary]
    else:
        named = {guarded.get(piece, piece): id_ for piece, id_ in vocabulary.items()}
    changed = {**model, "vocab": named}
    if "merges" in model:
        parts = [(pair, pair.split(" ") if isinstance(pair, str) else pair) for pair in pairs]
        changed["merges"] = [pair for pair, part in parts if not guarded.keys() & {"".join(part), *part}]
    if isinstance(model.get("unk_token"), str):
        changed["unk_token"] = guarded.get(model["unk_token"], model["unk_token"])
    tokens = [{**entry, "content": guarded.get(entry["content"], entry["content"])} for entry in added]
    return {**description, "model": changed, "added_tokens": tokens, "post_processor": None}


def _has_part(description: Any, kind: str) -> bool:
    """Whether a part of a tokenizer, or one of those it is a sequence of, is of a kind."""
    if not isinstance(description, dict):
        return False
    parts = description.get("decoders") or ()
    return description.get("type") == kind or any(_has_part(part, kind) for part in parts)


def _decode_utf8(data: bytes) -> tuple[str, int]:
    """Return the text and the number of bytes at its end that begin a character which is not complete."""
    try:
        return data.decode(), 0
    except UnicodeDecodeError:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        return text, len(decoder.getstate()[0])


def _incomplete(pieces_from_last: Iterable[bytes | None]) -> int:
    """Count the last pieces that begin a character which is not complete, of a sequence given from its end."""
    tail = [*takewhile(lambda byte: byte is not None, pieces_from_last)]
    return _decode_utf8(b"".join(filter(None, reversed(tail))))[1]


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer whose files lie in a directory.

    ``tokenizer.json`` goes first: it alone knows of tokens that were added to a vocabulary.

    Raises:
        FileNotFoundError: there is neither ``tokenizer.json`` nor ``vocab.json`` with ``merges.txt`` nor
            ``tokenizer.model``.
    """
    names = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
    file, vocab, merges, model = (directory / name for name in names)
    if file.is_file():
        return FileTokenizer(file)
    if vocab.is_file() and merges.is_file():
        return BytePairTokenizer(vocab, merges)
    if model.is_file():
        return SentencePieceTokenizer(model)
    raise FileNotFoundError(
        f"no tokenizer in {directory}: neither {file.name} nor {vocab.name} and {merges.name} nor {model.name}"
    )


def read_texts(array: NDArray[Any], name: str, most_bytes: int = 0) -> list[str]:
    """Return the texts of a string tensor as Triton hands it over.

    Args:
        array: [batch, 1] of bytes (gRPC and HTTP's binary form) or str.
        name: of the tensor, for the message.
        most_bytes: that a text may have in UTF-8; 0: any number. To tokenize a megabyte takes a second, in which others
            wait.

    Raises:
        ValueError: another shape (FasterTransformer would ignore what is beyond the first column), a text that is not
            UTF-8, or one that is too long.
    """
    if array.ndim != 2 or array.shape[1] != 1:
        raise ValueError(f"{name} must have the shape [batch, 1], not {list(array.shape)}")
    return [_read_text(text, f"{name} of row {row}", most_bytes) for row, text in enumerate(array[:, 0])]


def _read_text(text: Any, what: str, most_bytes: int) -> str:
    data = text if isinstance(text, bytes) else str(text).encode("utf-8", "surrogatepass")
    if 0 < most_bytes < len(data):
        raise ValueError(f"{what} has {len(data)} bytes; at most {most_bytes} are read (parameter max_text_bytes)")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8: byte 0x{data[error.start]:02x} at {error.start}") from None


def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    start_id: int,
    end_id: int,
    ends_inputs: bool = False,
    text_ids: TextIds = NO_TEXT_IDS,
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Encode prompts as FasterTransformer's ``input_ids`` and ``input_lengths``.

    An empty prompt becomes the start token: the engine needs something to continue.

    Args:
        tokenizer: of the model.
        prompts: texts.
        start_id: of the vocabulary.
        end_id: of the vocabulary.
        ends_inputs: each prompt is followed by end_id, as an encoder expects it.
        text_ids: what stands around each prompt.

    Returns:
        ids [batch, longest], padded on the right with start_id: no model reads the padding, but FasterTransformer looks
        its embedding up, and end_id may lie beyond the vocabulary; lengths [batch, 1].
    """
    ending = [*text_ids.after, *([end_id] if ends_inputs else [])]
    rows = [[*text_ids.before, *tokenizer.encode(prompt), *ending] or [start_id] for prompt in prompts]
    ids = np.full((len(rows), max(map(len, rows))), start_id, dtype=np.uint32)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return ids, np.array([[len(row)] for row in rows], dtype=np.uint32)


def decode_rows(
    tokenizer: Tokenizer,
    tokens: NDArray[Any],
    input_lengths: NDArray[Any] | None,
    sequence_lengths: NDArray[Any] | None,
    end_id: int,
    text_ids: TextIds = NO_TEXT_IDS,
    starts: NDArray[Any] | None = None,
) -> list[str]:
    """Decode the engine's output to prompt and completion, as one text for each sequence.

    FasterTransformer's repository decodes the whole row, padding included. Here a row ends at its
    sequence length, and an end token there is not part of the text.

    Args:
        tokenizer: of the model.
        tokens: [batch, beam, length], each row its prompt, directly followed by what was generated.
        input_lengths: [batch, beam], tokens of each prompt; None: the rows hold no prompt, or its length is unknown.
        sequence_lengths: [batch, beam], tokens of prompt and completion; None: decode the whole row.
        end_id: end-of-text token.
        text_ids: what stands around each prompt, which is no part of a text, and what else ends one.
        starts: [batch, beam], tokens whose text is left out at the beginning; None: none.

    Returns:
        batch * beam texts, all beams of the first request row first.
    """
    texts, ends = [], (end_id, *text_ids.more_end_ids)
    for batch, beam in product(*map(range, tokens.shape[:2])):
        row = tokens[batch, beam].tolist()
        prompt = 0 if input_lengths is None else int(input_lengths[batch, beam])
        if sequence_lengths is not None:
            row = row[: int(sequence_lengths[batch, beam])]
            if len(row) > prompt and row[-1] in ends:
                row.pop()
        # The text of the first tokens is the beginning of the text of more, see Tokenizer.decode.
        known = 0 if starts is None else int(starts[batch, beam])
        before = tokenizer.decode(_own_tokens(row[:known], min(prompt, known), text_ids)) if known else ""
        texts.append(tokenizer.decode(_own_tokens(row, prompt, text_ids))[len(before) :])
    return texts


def _own_tokens(row: list[int], prompt: int, text_ids: TextIds) -> list[int]:
    """Leave out what stands around a prompt; ``prompt``: its length, 0 where it is unknown."""
    before, after = list(text_ids.before), list(text_ids.after)
    if after and prompt and row[prompt - len(after) : prompt] == after:
        row = row[: prompt - len(after)] + row[prompt:]
    return row[len(before) :] if before and row[: len(before)] == before else row
