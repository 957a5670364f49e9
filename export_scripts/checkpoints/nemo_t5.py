"""Reader of NeMo 1.x's T5 and mT5 checkpoints: archives and unpacked directories, any training TP and PP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_scripts.checkpoints import nemo
from export_scripts.checkpoints.archive import Archive
from export_scripts.checkpoints.nemo_t5_config import check_expressible, read_dims, remarks, side_config
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizer import find_tokenizer, special_ids
from export_scripts.weights import nemo_t5, t5

NAME = "NeMo T5 (.nemo archive or unpacked directory)"
_CLASS = re.compile(r"Megatron(T5|T0|BART)(?!.*(Prompt|Adapter))")
_EMBEDDING = "enc_dec_model.encoder_embedding.word_embeddings.weight"
_HEAD = "enc_dec_model.tokens_head.weight"


def is_candidate(path: Path) -> bool:
    """Whether a path is an archive by its name or an unpacked directory; what is in it, only its files say."""
    return nemo.is_candidate(path)


def recognises(archive: Archive) -> bool:
    """Whether a NeMo configuration is that of an encoder with a decoder."""
    if nemo.CONFIG_FILE not in archive:
        return False
    config = nemo.read_config(archive)
    name = str(config.get("target") or "").rpartition(".")[2]
    return bool(_CLASS.match(name)) if name else isinstance(config.get("decoder"), Mapping)


def open_source(archive: Archive) -> Source:
    """Open a T5.

    Raises:
        CheckpointError: incomplete, or not a model that FasterTransformer's T5 can express.
    """
    check_expressible(nemo.read_config(archive))
    checkpoint = nemo.NemoCheckpoint(archive)
    source_map = nemo_t5.source_map(_variant(checkpoint.config, checkpoint.keys()))
    tensors = checkpoint.tensors(source_map.join_axis)
    # A missing embedding is for the completeness check to report.
    vocab_size = tensors[_EMBEDDING].shape[0] if _EMBEDDING in tensors else 0
    tokenizer = find_tokenizer(archive, checkpoint.config)
    ids = special_ids(archive, tokenizer)
    return Source(
        archive=archive,
        family=t5.FAMILY,
        source_map=source_map,
        dims=read_dims(checkpoint.config, vocab_size),
        tensors=tensors,
        tokenizer=tokenizer,
        ids=ids,
        other_keys=checkpoint.other_keys(),
        remarks=remarks(checkpoint.config),
        extra_config={"decoder": {"pad_id": ids.pad_id}},
    )


def _variant(config: Mapping[str, Any], keys: tuple[str, ...]) -> nemo_t5.Variant:
    encoder = side_config(config, "encoder")
    return nemo_t5.Variant(
        has_untied_head=_HEAD in keys,
        is_legacy=bool(encoder["megatron_legacy"]),
        has_fused_gate=encoder["activation"].startswith("fast-"),
        has_norm_less_one=encoder["normalization"] == "layernorm1p",
    )
