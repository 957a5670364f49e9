"""Reader of Hugging Face's T5, T5 v1.1, flan-T5, mT5 and UL2.

Configuration: transformers, ``configuration_t5.py`` and ``configuration_mt5.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.huggingface import files as huggingface_files
from export_scripts.checkpoints.huggingface.files import open_model_weights, read_config, written
from export_scripts.checkpoints.source import OwnModel, Source
from export_scripts.checkpoints.tensor_values import same_values
from export_scripts.checkpoints.tokenizers.assembled import whole
from export_scripts.checkpoints.tokenizers.huggingface import NO_TOKENIZER, TOKENIZER_FILE, special_ids
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles
from export_scripts.checkpoints.tokenizers.pieces import read_pieces
from export_scripts.checkpoints.tokenizers.user_tokenizer import given_tokenizer
from export_scripts.weights.architecture import attention_problems
from export_scripts.weights.huggingface_t5 import SIZES, T5
from export_scripts.weights.remarks import EXACT_GELU as EXACT_GELU_REMARK
from export_scripts.weights.remarks import ShardRemark
from export_scripts.weights.schema import LazyTensor, T5Dims
from export_scripts.weights.values import Fields, epsilon, positive
from ft_format.families import t5
from handover.errors import CheckpointError
from handover.text_ids import TextIds
from models.blocks.feed_forward import EXACT_GELU, TANH_GELU
from models.checks import shown

NAME = "Hugging Face T5 (a directory with config.json)"
# umt5 is recognised to be refused by what it has: positions in every layer.
_MODEL_TYPES = ("t5", "mt5", "umt5")
_HEAD = "lm_head.weight"
_EMBEDDING, _COPIES = "shared.weight", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_PLAIN = {
    "relu": "relu",
    **dict.fromkeys((*EXACT_GELU, *TANH_GELU), "gelu"),
    **dict.fromkeys(("silu", "swish"), "silu"),
}
_ACTIVATIONS = {**_PLAIN, **{f"gated-{name}": f"gated-{function}" for name, function in _PLAIN.items()}}
"""FasterTransformer's ``feed_forward_proj`` by transformers' one."""
_EXACT = (*EXACT_GELU, "gated-gelu_python")  # gated-gelu is the tanh form in transformers
# transformers' defaults, and the names that it accepts for the same.
_DEFAULTS = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_MT5_DEFAULTS = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}
_ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
_SENTINELS = 100
"""Tokens ``<extra_id_N>`` that every published T5 has after its pieces."""
_TOKENIZER_FILES = {"spiece.model": "tokenizer.model", TOKENIZER_FILE: TOKENIZER_FILE}
is_candidate = huggingface_files.is_checkpoint


def recognises(archive: Archive) -> bool:
    """Whether the configuration is a T5's."""
    return huggingface_files.model_type(archive) in _MODEL_TYPES


def open_source(archive: Archive) -> Source:
    """Open a T5.

    Raises:
        CheckpointError: incomplete, or not a model that FasterTransformer's T5 can express.
    """
    given = read_config(archive)
    is_multilingual, config = given.get("model_type") != "t5", settled(given)
    weights = open_model_weights(archive, given)
    if not any(key.startswith("decoder.") for key in weights.tensors):
        raise CheckpointError(f"{archive.path} has no decoder", "FasterTransformer's T5 is an encoder with a decoder")
    dims = _dims(config)
    tokenizer = _tokenizer(archive, str(given.get("model_type")), dims.vocab_size)
    is_untied = _HEAD in weights.tensors or given.get("tie_word_embeddings", not is_multilingual) is False
    table, tensors = T5.table(dims, is_untied), _with_embedding(weights.tensors)
    _check_copies(tensors, archive)
    return Source(
        archive=archive,
        family=t5.FAMILY,
        source_map=table,
        dims=dims,
        tensors=tensors,
        tokenizer=tokenizer,
        ids=(ids := special_ids(archive, config, "decoder_start_token_id")),
        other_keys=weights.other_keys,
        remarks=(*weights.remarks, *_remarks(config), *(() if tokenizer.members else (NO_TOKENIZER,))),
        extra_config={} if ids.pad_id is None else {"decoder": {"pad_id": ids.pad_id}},
        activation=config["feed_forward_proj"] if config["feed_forward_proj"] in _EXACT else "",
        beyond=_beyond(config),
        own=OwnModel(given, written(weights, (tensors[key] for key in tensors if not table.is_ignored(key)))),
    )


def settled(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read ``config.json`` as transformers' class does: its defaults, and other names of keys, which go before them.

    Of the feed-forward's function, ``feed_forward_proj`` says what ``is_gated_act`` and ``dense_act_fn`` do not.
    """
    own = _MT5_DEFAULTS if given.get("model_type") != "t5" else {"feed_forward_proj": "relu"}
    config = {**_DEFAULTS, **own, **given}
    config |= {name: given[alias] for alias, name in _ALIASES.items() if given.get(alias) is not None}
    gate, _, name = str(config["feed_forward_proj"]).rpartition("-")
    name = "gelu_new" if (gate, name) == ("gated", "gelu") else name
    is_gated, name = config.get("is_gated_act", bool(gate)), str(config.get("dense_act_fn", name))
    if is_gated and gate in ("", "gated"):
        name = f"gated-{'gelu_python' if name == 'gelu' else name}"
    if "dense_act_fn" in given or "is_gated_act" in given:
        config["feed_forward_proj"] = name
    return {**config, "scale_decoder_outputs": _scales_logits(given)}


def _with_embedding(tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
    """Find the embedding under a copy's name, where whoever saved the file kept another of the copies."""
    copy = next((key for key in _COPIES if key in tensors), None)
    return {_EMBEDDING: tensors[copy], **tensors} if copy and _EMBEDDING not in tensors else tensors


def _check_copies(tensors: Mapping[str, LazyTensor], archive: Archive) -> None:
    """Compare the encoder's and the decoder's embedding with the shared one: transformers 5 ties only what is equal.

    Raises:
        CheckpointError: one of them differs.
    """
    for key in _COPIES:
        if key in tensors and _EMBEDDING in tensors and not same_values(tensors[key], tensors[_EMBEDDING], archive):
            raise CheckpointError(
                f"{archive.path}: {key} differs from {_EMBEDDING}, and T5 has one embedding for encoder and decoder",
                f"take {key} out of the files if {_EMBEDDING} is the one that was trained",
            )


def _scales_logits(config: Mapping[str, Any]) -> bool:
    """Whether logits are scaled by d_model**-0.5.

    Until transformers 5 tied embeddings said so. It has a key for it in T5 and never does it in mT5, while its
    ``tie_word_embeddings`` is always true.
    """
    is_multilingual = config.get("model_type") != "t5"
    if is_multilingual and not str(config.get("transformers_version", "")).startswith("4."):
        return False
    is_tied = config.get("tie_word_embeddings", not is_multilingual) is not False
    return bool(config.get("scale_decoder_outputs", is_tied))


def read_dims(config: Mapping[str, Any]) -> T5Dims:
    """Read the dimensions of what ``settled`` gives.

    Raises:
        CheckpointError: a size is missing, or FasterTransformer's T5 cannot express the model.
    """
    if beyond := _beyond(config):
        raise CheckpointError(
            "FasterTransformer's T5 cannot express this checkpoint\n  " + "\n  ".join(beyond),
            "the keys are those of config.json",
        )
    return _dims(config)


def _dims(config: Mapping[str, Any]) -> T5Dims:
    if config.get("model_type") == "umt5":
        raise CheckpointError(
            "FasterTransformer's T5 cannot express this checkpoint\n  model_type: umt5  (it has relative positions in "
            "the first layer alone, UMT5 in every one)"
        )
    function = str(config["feed_forward_proj"])
    given = {**config, "num_decoder_layers": config.get("num_decoder_layers") or config["num_layers"]}
    sizes: dict[str, Any] = {
        name: positive(given.get(key), f"config.json: {key}", "is it a T5 checkpoint?") for key, name in SIZES.items()
    }
    return T5Dims(
        **sizes,
        activation=_ACTIVATIONS.get(function, "gated-gelu" if function.startswith("gated-") else "relu"),
        has_scaled_logits=config["scale_decoder_outputs"],
        layernorm_eps=_epsilon(config),
    )


def _beyond(config: Mapping[str, Any]) -> tuple[str, ...]:
    """List what FasterTransformer's T5 cannot express, one line each."""
    problems = attention_problems(Fields(config, "config.json"))
    if config["feed_forward_proj"] not in tuple(_ACTIVATIONS):
        problems.append(f"feed_forward_proj: {shown(config['feed_forward_proj'])}  (it has {', '.join(_ACTIVATIONS)})")
    if config["relative_attention_max_distance"] != t5.MAX_DISTANCE:
        distance = shown(config["relative_attention_max_distance"])
        problems.append(f"relative_attention_max_distance: {distance}  (it computes with {t5.MAX_DISTANCE})")
    if config.get("is_encoder_decoder", True) is not True:
        problems.append(f"is_encoder_decoder: {shown(config['is_encoder_decoder'])}  (its decoder sees the encoder)")
    if config.get("tie_encoder_decoder"):
        problems.append("tie_encoder_decoder: True  (its decoder has weights of its own)")
    return tuple(problems)


def _remarks(config: Mapping[str, Any]) -> tuple[str, ...]:
    found = []
    epsilon = _epsilon(config)
    if epsilon != t5.LAYERNORM_EPS:
        found.append(
            ShardRemark(
                f"trained with layer_norm_epsilon {epsilon:g}; "
                f"FasterTransformer's T5 computes with {t5.LAYERNORM_EPS:g}"
            )
        )
    if config["feed_forward_proj"] in _EXACT:
        found.append(EXACT_GELU_REMARK)
    return tuple(found)


def _tokenizer(archive: Archive, model_type: str, vocab_size: int) -> TokenizerFiles:
    """Find the tokenizer; what ends a text is the encoder's end token, and no part of the tokenizer here."""
    members = {name: member for member, name in _TOKENIZER_FILES.items() if member in archive}
    library = "sentencepiece" if "tokenizer.model" in members else "none"
    own = TokenizerFiles(members, "huggingface" if TOKENIZER_FILE in members else library)
    found = given_tokenizer(archive) or own
    if found.library != "sentencepiece" or found.made:
        return found
    has_rows = len(read_pieces(found.contents(archive)["tokenizer.model"]).tokens) + _SENTINELS <= vocab_size
    return replace(whole(archive, found, model_type, _SENTINELS if has_rows else 0), text_ids=TextIds())


def _epsilon(config: Mapping[str, Any]) -> float:
    return epsilon(config["layer_norm_epsilon"], "config.json: layer_norm_epsilon")
