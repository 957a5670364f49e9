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
from export_scripts.checkpoints.tokenizers.given import given_tokenizer
from export_scripts.checkpoints.tokenizers.nemo import NOT_NAMED, SpecialIds, TokenizerFiles
from export_scripts.weights.remarks import ShardRemark
from export_scripts.weights.values import quoted
from handover.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
_GENERATION_FILE = "generation_config.json"
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
    """Read the ids as transformers' ``generate`` takes them: ``generation_config.json`` goes before ``config.json``.

    Args:
        archive: the files.
        config: ``config.json``, with the architecture's defaults.
        start_key: the key of what a text, or a decoder's answer, begins with; where no file names it a decoder-only
            model begins with its end token.
    """
    named = {**config, **{key: v for key, v in read_json(archive, _GENERATION_FILE).items() if v is not None}}
    end_ids, pad_ids = _ids(named, "eos_token_id"), _ids(named, "pad_token_id")
    start_ids = _ids(named, start_key) or (end_ids if start_key == "bos_token_id" else pad_ids)
    start_id, end_id = (next(iter(ids), NOT_NAMED) for ids in (start_ids, end_ids))
    return SpecialIds(start_id, end_id, next(iter(pad_ids), None), tuple(dict.fromkeys(end_ids[1:])))


def _ids(named: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Read one id or a list of them.

    Raises:
        CheckpointError: it is neither.
    """
    value = named.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
        raise CheckpointError(
            f"{key} is {quoted(value)}, not a number", f"it stands in {_GENERATION_FILE} or config.json"
        )
    return tuple(values)
