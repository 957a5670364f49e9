"""Reader of NeMo 1.x's T5 and mT5 checkpoints: archives and unpacked directories, any training TP and PP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.megatron.copies import differing_copies, refuse_differing, remarks_on_copies
from export_scripts.checkpoints.nemo import gpt as nemo
from export_scripts.checkpoints.nemo.companions import companions_of
from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE
from export_scripts.checkpoints.nemo.ia3 import is_ia3_config, read_ia3, with_ia3
from export_scripts.checkpoints.nemo.prompt_learning import KIND as PROMPTS
from export_scripts.checkpoints.nemo.prompt_learning import is_prompt_config, with_prompts
from export_scripts.checkpoints.nemo.t5_config import (
    beyond,
    biases,
    check_expressible,
    exact_gelu,
    read_dims,
    remarks,
    side_config,
)
from export_scripts.checkpoints.nemo.t5_sentinels import sentinels_of
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.nemo import find_tokenizer, special_ids
from export_scripts.checkpoints.tokenizers.user_tokenizer import given_tokenizer
from export_scripts.weights import nemo_t5
from export_scripts.weights.schema import rows_of
from export_scripts.weights.values import Fields
from ft_format.families import t5
from handover.errors import CheckpointError
from models.directory import SpecialIds

NAME = "NeMo T5 (.nemo archive or unpacked directory)"
_CLASS = re.compile(r"Megatron(T5|T0|BART)")
_EMBEDDING = "enc_dec_model.encoder_embedding.word_embeddings.weight"
_HEAD = "enc_dec_model.tokens_head.weight"
is_candidate = nemo.is_candidate


def recognises(archive: Archive) -> bool:
    """Whether a NeMo configuration is that of an encoder with a decoder."""
    if CONFIG_FILE not in archive:
        return False
    config = nemo.read_config(archive)
    name = str(config.get("target") or "").rpartition(".")[2]
    return bool(_CLASS.match(name)) if name else isinstance(config.get("decoder"), Mapping)


def open_source(archive: Archive) -> Source:
    """Open a T5.

    Raises:
        CheckpointError: incomplete, or not a model that FasterTransformer's T5 can express.
    """
    config = nemo.read_config(archive)
    if is_ia3_config(config) or is_prompt_config(config):
        raise CheckpointError(
            f"{archive.path} holds {'IA3 vectors' if is_ia3_config(config) else 'prompt tables'}, not a T5",
            "give a directory that holds them and their model",
        )
    if "adapter_tuning" in config:
        raise CheckpointError(
            f"{archive.path} holds linear adapters, not a T5", "of adapters, IA3's vectors are read and no others"
        )
    check_expressible(config)
    checkpoint = nemo.NemoCheckpoint(archive)
    source_map = nemo_t5.source_map(_variant(checkpoint.config, checkpoint.state.keys()))
    tensors = checkpoint.state.tensors(source_map.join_axis)
    refuse_differing(source_map, tensors, archive)
    # A missing embedding is for the completeness check to report.
    vocab_size = rows_of(tensors.get(_EMBEDDING))
    tokenizer = given_tokenizer(archive) or find_tokenizer(archive, config)
    ids = _starting_ids(archive, special_ids(archive, tokenizer))
    ia3 = read_ia3(archive)
    sentinels = sentinels_of(archive, config, tokenizer)
    source = Source(
        archive=archive,
        family=t5.FAMILY,
        source_map=replace(source_map, rules={**source_map.rules, **ia3.rules()}, biases=biases(config)),
        dims=(dims := with_ia3(read_dims(config, vocab_size), ia3)),
        tensors={**tensors, **ia3.tensors},
        tokenizer=tokenizer,
        ids=ids,
        other_keys=(*checkpoint.state.other_keys(), *ia3.other_keys),
        remarks=(*remarks(config), *remarks_on_copies(differing_copies(source_map, checkpoint.state, archive))),
        extra_config={**({} if ids.pad_id is None else {"decoder": {"pad_id": ids.pad_id}}), **ia3.config()},
        beyond=beyond(dims),
        activation=exact_gelu(config),
        is_padded=sentinels is not None,
        added_tokens=sentinels or (),
    )
    # FasterTransformer's converter too counts from the rows of the embedding, its padding included.
    return with_prompts(source, "encoder", width="d_model", first_id=vocab_size)


def _starting_ids(archive: Archive, ids: SpecialIds) -> SpecialIds:
    """Start with the padding where the prompt tables were trained so (``data.decoder_starts_with_pad``)."""
    configs = [nemo.read_config(companion) for companion in companions_of(archive, PROMPTS).values()]
    data = [Fields(config, CONFIG_FILE).fields("data", {}) for config in configs]
    starts = {bool(each.get("decoder_starts_with_pad")) for each in data}
    if len(starts) > 1:
        raise CheckpointError(
            f"{archive.path}: some prompt tables were trained with decoder_starts_with_pad and some without",
            "one server has one start: keep those of one kind",
        )
    return replace(ids, start_id=ids.pad_id) if starts == {True} and ids.pad_id is not None else ids


def _variant(config: Mapping[str, Any], keys: tuple[str, ...]) -> nemo_t5.Variant:
    encoder = side_config(config, "encoder")
    return nemo_t5.Variant(
        # Where the configuration promises one, the completeness check misses it.
        has_untied_head=_HEAD in keys or config.get("share_decoder_tokens_head_embeddings") is False,
        is_legacy=bool(encoder["megatron_legacy"]),
        has_fused_gate=encoder["activation"].startswith("fast-"),
        has_norm_less_one=encoder["normalization"] == "layernorm1p",
    )
