"""BERT's WordPiece tokenizer: a NeMo checkpoint has its ``vocab.txt`` alone, and its type says whether case counts.

``tokenizer.json`` says both, so it is written beside ``vocab.txt`` and everything after the conversion reads that.
``BertWordPieceLowerCase`` and ``BertWordPieceCase`` of Megatron and NeMo are transformers' ``BertTokenizer`` as trained
for bert-large-uncased and -cased.
"""

from __future__ import annotations

import json

from handover.errors import CheckpointError

LIBRARY = "wordpiece"
VOCABULARY_FILE = "vocab.txt"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def is_lower_case(tokenizer_type: str) -> bool:
    """Whether a NeMo type of tokenizer ignores case: ``BertWordPieceLowerCase`` does."""
    return "lower" in tokenizer_type.lower()


def tokens_of(vocabulary: bytes) -> list[str]:
    """Read ``vocab.txt``: one token a line, its number is its id."""
    return [line.rstrip("\r") for line in vocabulary.decode("utf-8", "replace").removesuffix("\n").split("\n")]


def ids_of(vocabulary: bytes, where: str) -> tuple[int, int, int]:
    """Find the tokens that NeMo's AutoTokenizer takes for begin, end and padding: [CLS], [SEP], [PAD].

    Raises:
        CheckpointError: one of them is not in the vocabulary.
    """
    tokens = tokens_of(vocabulary)
    missing = [token for token in ("[CLS]", "[SEP]", "[PAD]") if token not in tokens]
    if missing:
        raise CheckpointError(f"{where} lacks {', '.join(missing)}", "is it a BERT vocabulary?")
    return tokens.index("[CLS]"), tokens.index("[SEP]"), tokens.index("[PAD]")


def describe(vocabulary: bytes, ignores_case: bool) -> bytes:
    """Write the tokenizer in Hugging Face's format, ``tokenizer.json``.

    Args:
        vocabulary: content of ``vocab.txt``.
        ignores_case: text becomes lower case, and accents are dropped.
    """
    tokens = tokens_of(vocabulary)
    ids = {token: index for index, token in enumerate(tokens)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    normalizer = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": ignores_case}
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[token], "content": token, **plain} for token in tokens if token in _SPECIAL],
        "normalizer": {"type": "BertNormalizer", **normalizer},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": ids,
        },
    }
    return json.dumps(description, ensure_ascii=False, indent=1).encode() + b"\n"
