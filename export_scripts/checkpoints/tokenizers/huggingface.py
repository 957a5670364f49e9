"""The tokenizer's files of a Hugging Face checkpoint, and its special ids.

Rules: FasterTransformer's converters of Hugging Face models take start_id and end_id from bos_token_id and eos_token_id
of the configuration. ``tokenizer.json`` is the whole truth about a tokenizer; where it is missing, ``vocab.json`` with
``merges.txt``, ``tokenizer.model`` or fairseq's ``sentencepiece.bpe.model`` has to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.huggingface.files import read_json
from export_scripts.checkpoints.tokenizers.fairseq_pieces import with_fairseq_ids
from export_scripts.checkpoints.tokenizers.nemo import SpecialIds, TokenizerFiles
from handover.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
_GENERATION_FILE = "generation_config.json"
# Our names of the two, and those of the hub and of FasterTransformer's scripts.
_BYTE_PAIRS = (("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt"))
_SENTENCEPIECE = "tokenizer.model"
FAIRSEQ_PIECES = "sentencepiece.bpe.model"
NO_TOKENIZER = (
    "no tokenizer lies beside the weights, and the export stage needs one: put tokenizer.json, vocab.json and "
    "merges.txt, or tokenizer.model there and convert again"
)


def find_tokenizer(archive: Archive) -> TokenizerFiles:
    """Find the tokenizer's files; a checkpoint may have none."""
    members = {TOKENIZER_FILE: TOKENIZER_FILE} if TOKENIZER_FILE in archive else {}
    pairs = next((names for names in _BYTE_PAIRS if all(name in archive for name in names)), ())
    members |= dict(zip(_BYTE_PAIRS[0], pairs, strict=False))
    if members:
        return TokenizerFiles(members, "huggingface" if TOKENIZER_FILE in members else "bpe")
    if _SENTENCEPIECE in archive:
        return TokenizerFiles({_SENTENCEPIECE: _SENTENCEPIECE}, "sentencepiece")
    if FAIRSEQ_PIECES in archive:
        return TokenizerFiles(
            {_SENTENCEPIECE: FAIRSEQ_PIECES}, "sentencepiece", rewrites={_SENTENCEPIECE: with_fairseq_ids}
        )
    return TokenizerFiles({}, "none")


def special_ids(archive: Archive, config: Mapping[str, Any], vocab_size: int) -> SpecialIds:
    """Read start_id and end_id; a model without a start token begins with its end token.

    Raises:
        CheckpointError: no end token is named, or an id is beyond the vocabulary.
    """
    generation = read_json(archive, _GENERATION_FILE)
    end_id = _first(config.get("eos_token_id"), generation.get("eos_token_id"))
    start_id = _first(config.get("bos_token_id"), generation.get("bos_token_id"), end_id)
    if start_id is None or end_id is None:
        raise CheckpointError(
            f"{archive.path}: neither config.json nor {_GENERATION_FILE} names eos_token_id", "write it there"
        )
    for key, token in (("bos_token_id", start_id), ("eos_token_id", end_id)):
        if not 0 <= token < vocab_size:
            raise CheckpointError(f"{archive.path}: {key} {token} is beyond the vocabulary of {vocab_size}")
    return SpecialIds(start_id, end_id)


def _first(*values: Any) -> int | None:
    """Take the first number; of a list of end tokens the first."""
    for value in values:
        each = value[0] if isinstance(value, list) and value else value
        if isinstance(each, int) and not isinstance(each, bool):
            return each
    return None
