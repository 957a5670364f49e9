"""Text to tokens and tokens to text, as the exported repository's own models do it, token by token too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deployment.openai.errors import ApiError
from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.checkpoints.huggingface.files import model_type
from export_scripts.checkpoints.tokenizers.huggingface import find_tokenizer
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles
from export_scripts.checkpoints.tokenizers.user_tokenizer import OF_TRANSFORMERS
from export_scripts.repository.tokenizer_models.slipway_tokenizer import (
    FileTokenizer,
    TextError,
    TextIds,
    Tokenizer,
    encode_prompts,
    load_text_ids,
    load_tokenizer,
)
from ft_format.config_ini import FILE_NAME as CONFIG_INI
from handover.chat import CHAT_FILE
from handover.errors import ArtefactError
from handover.text_ids import TEXT_IDS_FILE

_PIPELINE = "tokenizer.json"
_WINDOW = 5
"""Tokens of a prompt that are decoded before its continuation: the bytes of any character, and the space before a
word, are in them."""
_MOST_REST = 3
"""Bytes of a character behind its first."""
_ANY_LETTER = "a"
_MOST_KNOWN = 16384
"""Texts of tokens that are kept, some 2 MB."""


@dataclass(frozen=True)
class Texts:
    """The tokenizer of a model, and what stands around a text's own tokens.

    Attributes:
        tokenizer: of the model.
        ids: tokens before and behind a text, and those that end one beside the end token.
        start_id: stands for an empty prompt.
        end_id: ends a text; behind each input of an encoder.
        ends_inputs: whether an encoder's input ends with end_id.
        directory: of the tokenizer's files.
        special: special tokens that a chat template may name, where the files are not those of a conversion.
    """

    tokenizer: Tokenizer
    ids: TextIds
    start_id: int
    end_id: int
    ends_inputs: bool
    directory: Path
    special: Mapping[str, str] = field(default_factory=dict)
    _texts_of_tokens: dict[int, str] = field(default_factory=dict, repr=False)
    _texts_alone: dict[int, str] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        """Be loaded again in another process."""
        return load_texts, (self.directory, self.start_id, self.end_id, self.ends_inputs)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset((self.end_id, *self.ids.more_end_ids))

    def encode(self, text: str, has_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, as ``preprocessing`` makes them.

        Args:
            text: of a prompt.
            has_special_tokens: whether the tokens around a text are added.

        Raises:
            ApiError: the tokenizer fails on it.
        """
        try:
            if not has_special_tokens:
                return tuple(self.tokenizer.encode(text))
            ids, _ = encode_prompts(self.tokenizer, [text], self.start_id, self.end_id, self.ends_inputs, self.ids)
            return tuple(ids[0].tolist())
        except TextError as error:
            raise ApiError(str(error), "write another text", param="prompt") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self.tokenizer.decode(ids)

    def decode_known(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; of one alone from memory, for it stands before the next token of an answer."""
        if len(ids) != 1:
            return self.tokenizer.decode(ids)
        known = self._texts_alone.get(ids[0])
        if known is None:
            if len(self._texts_alone) >= _MOST_KNOWN:
                self._texts_alone.clear()
            known = self._texts_alone[ids[0]] = self.tokenizer.decode(ids)
        return known

    def text_of(self, token: int) -> str:
        """Return what a token adds to a text; empty for a part of a character."""
        known = self._texts_of_tokens.get(token)
        if known is None:
            before = self.tokenizer.encode(_ANY_LETTER)[-1:]  # or the space before a word would be lost
            text = self.tokenizer.decode([*before, token])[len(self.tokenizer.decode(before)) :]
            known = self._texts_of_tokens[token] = text.replace("\ufffd", "")
        return known

    def bytes_of(self, token: int) -> bytes:
        """Return what a token adds to a text in UTF-8, parts of a character too; empty: it stands for no text."""
        own = self.tokenizer.bytes_of(token)
        return self.text_of(token).encode() if own is None else own

    def name(self, token: int) -> str:
        """Return a token's text; its number, as vLLM writes it, where its text is only a part of a character."""
        return self.text_of(token) or name_by_id(token)

    def own(self, ids: Sequence[int]) -> range:
        """Return the places of a prompt's tokens that do not stand around it."""
        before, after = self.ids.before, self.ids.after
        first = len(before) if tuple(ids[: len(before)]) == before else 0
        has_after = bool(after) and tuple(ids[first:][-len(after) :]) == after
        return range(first, len(ids) - (len(after) if has_after else 0))

    def prompt_text(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt without the tokens that stand around it."""
        own = self.own(ids)
        return self.tokenizer.decode(list(ids[own.start : own.stop]))


def name_by_id(token: int) -> str:
    """Return the name that a token has by its number, as vLLM writes it."""
    return f"token_id:{token}"


def load_texts(directory: Path, start_id: int, end_id: int, ends_inputs: bool) -> Texts:
    """Load a tokenizer.

    Raises:
        ArtefactError: there is none in the directory, or it cannot be read.
    """
    try:
        whole = None if ends_inputs else _of_transformers(directory)
        if whole is not None:
            pipeline, found = whole
            around = TextIds(found.text_ids.before, found.text_ids.after)
            return Texts(pipeline, around, start_id, end_id, ends_inputs, directory, found.special)
        tokenizer, ids = load_tokenizer(directory), load_text_ids(directory)
    except Exception as error:  # the libraries raise bare Exception, RuntimeError or OSError
        raise ArtefactError(
            f"the tokenizer in {directory} cannot be read: {error}",
            "give --tokenizer, a directory with tokenizer.json, vocab.json and merges.txt, or tokenizer.model",
        ) from error
    return Texts(tokenizer, ids, start_id, end_id, ends_inputs, directory)


def _of_transformers(directory: Path) -> tuple[FileTokenizer, TokenizerFiles] | None:
    """Put a directory of transformers together, as a conversion does it; None: the files are a conversion's, or bare.

    Raises:
        CheckpointError: a file is damaged.
    """
    is_converted = any((directory / name).is_file() for name in (CHAT_FILE, TEXT_IDS_FILE, CONFIG_INI))
    if is_converted or not any((directory / name).is_file() for name in OF_TRANSFORMERS):
        return None
    archive = open_archive(directory)
    found = find_tokenizer(archive, model_type(archive))
    contents = found.contents(archive)
    if not contents:
        return None
    return FileTokenizer(directory / _PIPELINE, contents[_PIPELINE].decode()), found


def _begins_within(texts: Texts, token: int) -> bool:
    """Whether a token begins within a character."""
    piece = texts.tokenizer.bytes_of(token)
    return piece is not None and b"\x80" <= piece[:1] < b"\xc0"


class Detokenizer:
    """The text of an answer, token by token; no piece ends within a character.

    Only the last tokens are decoded: from those of the piece before, whose text is known, on. They begin with a whole
    character, for of bytes in a row (Llama 2's ``<0xE4>``) some libraries make no text where one of them is none.

    Args:
        texts: of the model.
        prompt: that the answer continues; empty where it stands by itself.
    """

    def __init__(self, texts: Texts, prompt: Sequence[int] = ()) -> None:
        first = max(0, len(prompt) - _WINDOW)
        while first > max(0, len(prompt) - _WINDOW - _MOST_REST) and _begins_within(texts, prompt[first]):
            first -= 1
        self._texts, self._ids = texts, list(prompt[first:])
        self._known, self._before = len(self._ids), texts.decode(self._ids)
        # What has begun a character stays, too: its text is yet to come.
        least = max(0, self._known - _MOST_REST)
        while self._known > least and texts.decode(self._ids[: self._known - 1]) == self._before:
            self._known -= 1

    def add(self, token: int) -> str:
        """Return what a token adds to the text; empty while a character is not complete."""
        self._ids.append(token)
        text, start = self._texts.decode(self._ids), len(self._before)
        if len(text) <= start:
            return ""
        del self._ids[: self._known]
        self._known, self._before = len(self._ids), self._texts.decode_known(self._ids)
        return text[start:]
