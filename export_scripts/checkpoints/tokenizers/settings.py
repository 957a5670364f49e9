"""What lies beside a tokenizer's vocabulary in a directory of transformers: its settings and its added tokens.

Rules: transformers 5, ``tokenization_utils_base.py`` (``_from_pretrained``): ``added_tokens_decoder`` is the newest
form, and where it is there the files of older versions do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.huggingface.files import read_json
from export_scripts.checkpoints.tokenizers import classes
from handover.chat import TOKENS
from models.checks import quoted

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ADDED, _EXTRA, _MORE = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
AROUND = {"add_bos_token": "bos_token", "add_eos_token": "eos_token"}
"""What says whether a special token stands before, and behind, a text."""


@dataclass(frozen=True)
class Token:
    """A token that is found in a text before the text is cut.

    Attributes:
        flags: how it is found, as the library ``tokenizers`` names them.
    """

    content: str
    flags: tuple[tuple[str, bool], ...] = ()

    def with_flags(self, **flags: bool) -> Token:
        """Return it with other flags."""
        return replace(self, flags=tuple({**dict(self.flags), **flags}.items()))


def token_of(value: Any, **flags: bool) -> Token:
    """Read a token as a file writes it: its text, or an object with flags; ``flags`` go before its own.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str):
        return Token(value, tuple(flags.items()))
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise ValueError(f"{quoted(value)} is no token")
    own = {name: bool(value[name]) for name in _FLAGS if value.get(name) is not None}
    return Token(value["content"], tuple({**own, **flags}.items()))


class Settings:
    """What the files beside a vocabulary say of a tokenizer.

    Args:
        archive: the checkpoint.
        folder: of the files, with a slash at its end; empty: the root.
        description: content of a ``tokenizer.json``; empty: there is none.

    Attributes:
        values: ``tokenizer_config.json``, with what older versions wrote elsewhere.
        added: tokens beyond the vocabulary, by id.
    """

    def __init__(self, archive: Archive, folder: str, description: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = dict(read_json(archive, f"{folder}tokenizer_config.json"))
        self.added: dict[int, Token] = {}
        if description:
            for name in AROUND:  # its post-processor says it
                self.values.pop(name, None)
            if (padding := description.get("padding")) and "pad_token" not in self.values:
                self.values["pad_token"] = padding.get("pad_token")
        if not self.values.get(_EXTRA):
            self.values[_EXTRA] = self.values.pop(_MORE, None) or []
        if _ADDED in self.values:
            listed = self.values.pop(_ADDED)
            self.added = {int(number): token_of(entry) for number, entry in dict(listed or {}).items()}
            return
        self._read_map(read_json(archive, f"{folder}special_tokens_map.json"))
        special = {token.content for token in (*self.special("").values(), *self.extra(""))}
        for content, number in read_json(archive, f"{folder}added_tokens.json").items():
            is_special = content in special
            flags = {"lstrip": False, "rstrip": False, "normalized": not is_special, "special": is_special}
            self.added[int(number)] = Token(content, tuple(flags.items()))
        self.added |= {int(entry["id"]): token_of(entry) for entry in description.get("added_tokens") or ()}

    def _read_map(self, named: Mapping[str, Any]) -> None:
        for key, value in named.items():
            if key == _EXTRA and isinstance(value, list):
                self.values[_EXTRA] = [*self.values[_EXTRA], *value]
            elif isinstance(value, dict) and key != _EXTRA:
                self.values[key] = {**value, "special": True}
            else:
                self.values[key] = value

    def special(self, name: str) -> dict[str, Token]:
        """Read the special tokens by name, those that a class has by default among them; null: there is none."""
        defaults = {key: value for key, value in classes.DEFAULTS.get(name, {}).items() if isinstance(value, str)}
        values = {**defaults, **self.values}
        extra = values.get(_EXTRA)
        own = [key for key in values if key.endswith("_token") and key not in TOKENS]
        named = {key: values[key] for key in (*TOKENS, *own) if isinstance(values.get(key), str | dict)}
        named |= dict(extra) if isinstance(extra, dict) else {}
        known = {token.content: token for token in self.added.values()}
        found = {key: token_of(value) for key, value in named.items()}
        return {key: known.get(token.content, token) if key in TOKENS else token for key, token in found.items()}

    def extra(self, name: str, pieces: Iterable[Token] = ()) -> list[Token]:
        """Read the special tokens without a name; those of a SentencePiece model, and of a class, where none are."""
        listed = self.values.get(_EXTRA)
        if isinstance(listed, list) and listed:
            return [token_of(each) for each in listed]
        more = list(pieces) or [token_of(each) for each in self.values.get(_MORE) or ()]
        return [*more, *map(token_of, (*classes.EXTRA.get(name, ()), *classes.sentinels(name, self.values)))]

    def adds(self, name: str, key: str) -> bool:
        """Whether ``add_bos_token`` or ``add_eos_token`` holds."""
        return bool(self.values.get(key, classes.DEFAULTS.get(name, {}).get(key, False)))
