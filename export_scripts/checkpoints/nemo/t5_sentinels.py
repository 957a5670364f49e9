"""The tokens ``<extra_id_N>`` that NeMo's T5 puts behind a SentencePiece model's own and NeMo's special ones.

Source: NeMo 1.23, ``megatron_t5_model.py`` (``add_special_tokens_to_tokenizer``, ``_add_sentinel_tokens``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles
from export_scripts.weights.values import Fields, bounded

_MOST = 10_000


def sentinels_of(archive: Archive, config: Mapping[str, Any], tokenizer: TokenizerFiles) -> tuple[str, ...] | None:
    """Name the sentinels that a SentencePiece model lacks, in the order of the ids that training gave them.

    None: the tokenizer is of another kind, or UL2's, or has its sentinels before the special tokens: nothing is known.
    """
    said = Fields(config, CONFIG_FILE)
    settings, data = said.fields("tokenizer", {}), said.fields("data", {})
    is_other = settings.get("add_sentinel_tokens_first") or data.get("dataset_type", "t5") != "t5"
    if tokenizer.library != "sentencepiece" or not tokenizer.is_nemos or is_other:
        return None
    wanted = settings.get("num_sentinel_tokens")
    count = bounded(wanted, f"{CONFIG_FILE}: tokenizer: num_sentinel_tokens", _MOST) if wanted else 0
    names = [f"<extra_id_{number}>" for number in range(count)]
    if settings.get("add_sentinel_tokens_in_reverse_order"):
        names.reverse()
    pieces = _pieces(archive.read_bytes(tokenizer.members["tokenizer.model"]))
    return tuple(name for name in names if pieces.piece_to_id(name) == pieces.unk_id())


def _pieces(model: bytes) -> Any:
    """Open a SentencePiece model, which the ids have been read of already."""
    import sentencepiece  # only where such a tokenizer is needed

    return sentencepiece.SentencePieceProcessor(model_proto=model)
