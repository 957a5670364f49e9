"""The vocabularies of ``vocab.json`` and ``tokenizer.json``: ids by token, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.weights.values import Fields, entries, text, whole, wholes
from handover.errors import CheckpointError
from models.checks import Range, quoted

_END_OF_TEXT = "<|endoftext|>"
_IDS = Range(0, (1 << 24) - 1)
"""Sixty times the largest vocabulary there is; the library counts up to an id, whatever else there is."""


def end_of_text(vocabulary: Mapping[str, int]) -> tuple[str, int]:
    """Name GPT-2's one special token with its id; a vocabulary without it gets it as its next entry."""
    return _END_OF_TEXT, vocabulary.get(_END_OF_TEXT, len(vocabulary))


def read_vocabulary(archive: Archive, member: str) -> dict[str, int]:
    """Read a ``vocab.json``; CheckpointError where it is not ids by token."""
    return dict(_parsed(_vocabulary, archive.read_bytes(member), f"{archive.path}: {member}"))


def described_tokens(archive: Archive, member: str) -> dict[str, int]:
    """Every token of a ``tokenizer.json`` of an archive."""
    return tokens_in(archive.read_bytes(member), f"{archive.path}: {member}")


def tokens_in(description: bytes, where: str) -> dict[str, int]:
    """Every token of a ``tokenizer.json``'s content; CheckpointError: it is damaged, or has an id of no vocabulary."""
    return dict(_parsed(_described, description, where))


def forget_tokens() -> None:
    """Free what is kept of the last one: planning asks for its tokens several times, what follows does not."""
    _parsed.cache_clear()


@lru_cache(maxsize=1)
def _parsed(read: Callable[[bytes, str], dict[str, int]], content: bytes, where: str) -> dict[str, int]:
    return read(content, where)


def _vocabulary(content: bytes, where: str) -> dict[str, int]:
    tokens = parse_json(content, where)
    return tokens if _is_plain(tokens) else checked(wholes(tokens, where), where)


def _described(description: bytes, where: str) -> dict[str, int]:
    content = Fields(parse_json(description, where), where)
    model = content.fields("model")
    if isinstance(model.get("vocab"), list):  # Unigram
        pairs = [(entries(entry, f"{where}: vocab"), index) for index, entry in enumerate(model.entries("vocab"))]
        tokens: dict[Any, Any] = {entry[0]: index for entry, index in pairs if entry}
    else:
        model.fields("vocab")
        tokens = dict(model["vocab"])
    for entry in content.entries("added_tokens", ()):
        added = Fields(entry, f"{where}: added_tokens")
        tokens[added.text("content")] = added.whole("id")
    if _is_plain(tokens):
        return tokens
    return checked(
        {text(token, f"{where}: vocab"): whole(number, f"{where}: {token}") for token, number in tokens.items()}, where
    )


def _is_plain(tokens: Any) -> bool:
    """Whether something is a vocabulary beyond doubt: no entry of hundreds of thousands is looked at on its own."""
    if not isinstance(tokens, dict) or set(map(type, tokens)) != {str} or set(map(type, tokens.values())) != {int}:
        return False
    return min(tokens.values()) in _IDS and max(tokens.values()) in _IDS


def checked(tokens: dict[str, int], where: str) -> dict[str, int]:
    """Refuse what is no vocabulary: without a token, or with an id that no model has."""
    if not tokens:
        raise CheckpointError(f"{where} has no token", "copy the checkpoint again")
    for token, number in tokens.items():
        if number not in _IDS:
            raise CheckpointError(
                f"{where}: the token {quoted(token)} has the id {number}, which is not {_IDS}",
                "copy the checkpoint again",
            )
    return tokens
