"""What a class of tokenizers counts with: the vocabulary of pieces, of a ``tokenizer.json``, or of pairs to merge."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.checkpoints.tokenizers.classes import Vocabulary
from export_scripts.checkpoints.tokenizers.pieces import CONTROL, USER_DEFINED, Pieces
from export_scripts.checkpoints.tokenizers.settings import Token
from export_scripts.checkpoints.tokenizers.vocabularies import checked
from export_scripts.weights.values import wholes
from handover.errors import CheckpointError


def of_pieces(pieces: Pieces, is_bpe: bool) -> Vocabulary:
    """Take a SentencePiece model's pieces; every pair of pieces that is a piece is a merge, in the order of ids."""
    if not is_bpe:
        return Vocabulary([(token, score) for token, score, _ in pieces.tokens], charsmap=pieces.charsmap)
    ids = pieces.ids
    merges = []
    for token, number in ids.items():
        cuts = ((token[:place], token[place:]) for place in range(1, len(token)))
        known = sorted((ids[left], ids[right], left, right) for left, right in cuts if left in ids and right in ids)
        merges += [(number, len(left), len(right), left, right) for _, _, left, right in known]
    pairs = [(left, right) for *_, left, right in sorted(merges, key=lambda merge: merge[:3])]
    return Vocabulary(ids, pairs, pieces.charsmap)


def own_tokens(pieces: Pieces) -> Iterator[Token]:
    """List the pieces that are found in a text as they are."""
    for content, _, kind in pieces.tokens:
        if kind in (CONTROL, USER_DEFINED):
            yield Token(content, (("normalized", False), ("special", kind == CONTROL)))


def of_description(description: Mapping[str, Any], is_scored: bool) -> Vocabulary:
    """Take the vocabulary of a ``tokenizer.json``."""
    model = description["model"]
    tokens, merges = model["vocab"], model.get("merges") or ()
    if is_scored:
        parts = description.get("normalizer") or {}
        tables = [part.get("precompiled_charsmap") for part in parts.get("normalizers", [parts])]
        table = next((base64.b64decode(each) for each in tables if each), b"")
        return Vocabulary([(str(token), float(score)) for token, score in tokens], charsmap=table)
    if isinstance(tokens, list):
        tokens = {each[0] if isinstance(each, list) else each: number for number, each in enumerate(tokens)}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]
    return Vocabulary(dict(tokens), [(left, right) for left, right in pairs])


def of_pairs(tokens: bytes, merges: bytes, where: str) -> Vocabulary:
    """Take ``vocab.json`` and ``merges.txt``."""
    try:
        lines = [line.rstrip("\r") for line in merges.decode().split("\n")]
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}merges.txt is not UTF-8: {error}", "copy it again") from error
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    ids = wholes(parse_json(tokens, f"{where}vocab.json"), f"{where}vocab.json")
    return Vocabulary(checked(ids, f"{where}vocab.json"), [(left, right) for left, right in pairs])


def with_renamed(vocabulary: Vocabulary, added: Mapping[int, Token]) -> Vocabulary:
    """Name pieces that were kept for later as they are called now."""
    if not isinstance(vocabulary.tokens, dict):
        return vocabulary
    tokens = dict(vocabulary.tokens)
    names = {number: token for token, number in tokens.items()}
    for number, token in added.items():
        if number in names and names[number] != token.content and token.content not in tokens:
            tokens[token.content] = tokens.pop(names[number])
    return replace(vocabulary, tokens=tokens)
