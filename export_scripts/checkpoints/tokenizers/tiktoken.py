"""NeMo's tiktoken vocabularies (Nemotron): a JSON list of {rank, token_bytes, token_str}, made a ``tokenizer.json``.

NeMo, ``tiktoken_tokenizer.py``: the first ids are special tokens, 1000 of them where nothing else is said, and a
token's id is its rank behind them. tiktoken joins the two neighbours whose sum has the lowest rank; every way to cut a
token in two is therefore a merge, in the order of ranks, as in transformers' ``TikTokenConverter``.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any

from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.weights.values import Fields, entries
from ft_format.byte_pieces import LETTERS
from handover.errors import CheckpointError

LIBRARY = "tiktoken"
_LETTERS = {byte: letter for letter, byte in LETTERS.items()}
_LETTER = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATTERN = (
    rf"{_LETTER}{_UPPER}*{_LOWER}+|{_LETTER}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = ("<unk>", "<s>", "</s>")
BEGIN_ID, END_ID = _SPECIAL.index("<s>"), _SPECIAL.index("</s>")


@dataclass(frozen=True)
class Vocabulary:
    """How ids are made of ranks; NeMo's defaults.

    Attributes:
        special_count: ids before that of rank 0.
        special: the first of them; the others are called ``<SPECIAL_n>``.
        pattern: a regular expression of the words that a text is cut into.
    """

    size: int = 1 << 17
    special_count: int = 1000
    special: tuple[str, ...] = _SPECIAL
    pattern: str = _PATTERN

    def special_tokens(self) -> list[str]:
        """List the special tokens in the order of their ids."""
        return [*self.special, *(f"<SPECIAL_{number}>" for number in range(len(self.special), self.special_count))]

    def describe(self, content: bytes) -> bytes:
        """Write the tokenizer in Hugging Face's format.

        Raises:
            CheckpointError: it is no such list, or not of single bytes first.
        """
        tokens = read_tokens(content, "the tiktoken vocabulary")[: self.size - self.special_count]
        special = self.special_tokens()
        ids = {token: number for number, token in enumerate(special)}
        words = [_word(token) for token in tokens]
        ids |= {word: rank + self.special_count for rank, word in enumerate(words)}
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        cut = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}
        description = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": number, "content": token, **plain} for number, token in enumerate(special)],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, {"type": "ByteLevel", **level}]},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", **level},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": True,  # a word that is a token is that token
                "vocab": ids,
                "merges": _merges(tokens),
            },
        }
        return json.dumps(description, ensure_ascii=False).encode() + b"\n"


def is_vocabulary(content: bytes) -> bool:
    """Whether a file's content looks like such a list."""
    return content.lstrip()[:1] == b"[" and b'"token_bytes"' in content[:4096]


def read_tokens(content: bytes, where: str) -> list[bytes]:
    """Read the tokens in the order of their ranks.

    Raises:
        CheckpointError: it is no such list: ranks are not 0, 1, ..., a token is there twice, or a single byte is not.
    """
    tokens = []
    for number, entry in enumerate(entries(parse_json(content, where), where)):
        fields = Fields(entry, f"{where}: entry {number}")
        if fields.whole("rank") != number:
            raise CheckpointError(f"{where}: entry {number} has the rank {fields['rank']}", "copy the checkpoint again")
        tokens.append(_bytes_of(fields.text("token_bytes"), f"{where}: entry {number}"))
    if len(set(tokens)) != len(tokens) or tokens[:256] != [bytes([byte]) for byte in range(256)]:
        raise CheckpointError(f"{where} does not begin with the 256 bytes, or holds a token twice", "copy it again")
    return tokens


def _bytes_of(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CheckpointError(f"{where}: token_bytes is not base64", "copy the checkpoint again") from error


def _word(token: bytes) -> str:
    return "".join(map(_LETTERS.__getitem__, token))


def _merges(tokens: list[bytes]) -> list[str]:
    """List every way to join two tokens to a third, in the order of the third's rank."""
    ranks: dict[bytes, int] = {token: rank for rank, token in enumerate(tokens)}
    merges: list[str] = []
    for token in tokens[256:]:
        cuts: list[Any] = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(ranks[left], ranks[right], left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += [f"{_word(left)} {_word(right)}" for _, _, left, right in sorted(known)]
    return merges
