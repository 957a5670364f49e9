"""The tokenizer's files of a Hugging Face checkpoint, and its special ids.

Rules: FasterTransformer's converters of Hugging Face models take start_id and end_id from bos_token_id and
eos_token_id; where they stand, transformers' ``generate`` says. ``tokenizer.json`` is the whole truth about a
tokenizer; where it is missing, ``vocab.json`` with ``merges.txt``, ``tokenizer.model`` or fairseq's
``sentencepiece.bpe.model`` has to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.huggingface.files import read_json
from export_scripts.checkpoints.tokenizers.assembled import whole
from export_scripts.checkpoints.tokenizers.fairseq_pieces import with_fairseq_ids
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles
from export_scripts.checkpoints.tokenizers.user_tokenizer import given_tokenizer
from export_scripts.weights.remarks import ShardRemark
from handover.errors import CheckpointError
from models import directory
from models.directory import GENERATION_FILE, SpecialIds

TOKENIZER_FILE = "tokenizer.json"
# Our names of the two, and those of the hub and of FasterTransformer's scripts.
_BYTE_PAIRS = (("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt"))
_SENTENCEPIECE = "tokenizer.model"
FAIRSEQ_PIECES, T5_PIECES = "sentencepiece.bpe.model", "spiece.model"
NO_TOKENIZER = ShardRemark(
    "no tokenizer lies beside the weights, and the export stage needs one: put tokenizer.json, vocab.json and "
    "merges.txt, or tokenizer.model there, or give export.model.tokenizer, and convert again"
)


def find_tokenizer(archive: Archive, model_type: str) -> TokenizerFiles:
    """Find the tokenizer's files, and put the whole of it together; a checkpoint may have none.

    Raises:
        CheckpointError: a file is damaged, or names a token that the vocabulary lacks.
    """
    return whole(archive, find_tokenizer_files(archive), model_type)


def find_tokenizer_files(archive: Archive) -> TokenizerFiles:
    """Find the tokenizer's files as they are; a checkpoint may have none."""
    if (given := given_tokenizer(archive)) is not None:
        return given
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
    if T5_PIECES in archive:
        return TokenizerFiles({_SENTENCEPIECE: T5_PIECES}, "sentencepiece")
    return TokenizerFiles({}, "none")


def special_ids(archive: Archive, config: Mapping[str, Any], start_key: str = "bos_token_id") -> SpecialIds:
    """Read the ids as transformers' ``generate`` takes them; see ``models.directory.special_ids``."""
    return directory.special_ids(config, read_json(archive, GENERATION_FILE), CheckpointError, start_key)
