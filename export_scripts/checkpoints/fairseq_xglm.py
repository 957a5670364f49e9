"""Reader of XGLM as fairseq published it: a directory with ``model.pt``, ``dict.txt`` and ``sentencepiece.bpe.model``.

Its keys are those of transformers' XGLM below ``decoder.``, so that one table serves both. What the training's
arguments say is put into the words of ``config.json``.

Keys and arguments: fairseq, ``models/transformer_lm.py`` and ``modules/transformer_layer.py``; transformers,
``models/xglm/convert_xglm_original_ckpt_to_trfms.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.pickled import Record
from export_scripts.checkpoints.files.rank_files import tensors_of
from export_scripts.checkpoints.files.torch_format import open_torch_file
from export_scripts.checkpoints.huggingface.tied_head import untied_where_it_differs
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.huggingface import NO_TOKENIZER, find_tokenizer_files
from export_scripts.weights.huggingface_xglm import XGLM
from export_scripts.weights.schema import LazyTensor, ModelDims
from export_scripts.weights.settings import Settings
from handover.errors import CheckpointError
from handover.text_ids import TextIds
from models.directory import SpecialIds

NAME = "fairseq's XGLM (directory with model.pt and dict.txt)"
_WEIGHTS, _DICTIONARY, _HEAD = "model.pt", "dict.txt", "output_projection.weight"
# Objects of these are read as records: arguments and what the training keeps beside the weights.
_MODULES = ("argparse", "fairseq", "omegaconf", "typing", "numpy")
_IDS = SpecialIds(start_id=0, end_id=2, pad_id=1)  # fairseq, data/dictionary.py
_BESIDE = ("version", "embed_positions._float_tensor")
_LEGAL: Mapping[str, tuple[Any, ...]] = {
    "decoder_normalize_before": (True,),
    **{name: (False, None, 0) for name in ("decoder_learned_pos", "no_token_positional_embeddings", "adaptive_input")},
    **{name: (False, None, 0) for name in ("layernorm_embedding", "no_decoder_final_norm", "base_layers", "moe_freq")},
    **{name: (False, None, 0) for name in ("scale_attn", "scale_fc", "scale_heads", "scale_resids")},
    "adaptive_softmax_cutoff": (None, ""),
}


def is_candidate(path: Path) -> bool:
    """Whether a directory looks like one of fairseq's language models."""
    return (path / _WEIGHTS).is_file() and (path / _DICTIONARY).is_file()


def recognises(archive: Archive) -> bool:
    """Whether the files are one of fairseq's language models."""
    return _WEIGHTS in archive and _DICTIONARY in archive


def open_source(archive: Archive) -> Source:
    """Open a model.

    Raises:
        CheckpointError: it is none of a decoder alone, or one that FasterTransformer's GPT cannot express.
    """
    saved: dict[str, Any] = {}
    tensors, other_keys = _open_weights(archive, saved)
    arguments = _arguments(archive, saved)
    embedding = tensors.get(XGLM.embedding)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{archive.path}: {_WEIGHTS} has no decoder.{XGLM.embedding}", "is it a language model?")
    settings = _in_transformers_words(arguments, embedding.shape[0])
    if problems := _problems(arguments) + XGLM.problems(settings):
        raise CheckpointError(
            "FasterTransformer's gpt cannot express this checkpoint\n  " + "\n  ".join(problems),
            f"the names are those of fairseq's arguments, which lie in {_WEIGHTS}",
        )
    settings, of_head = untied_where_it_differs(settings, XGLM, tensors, archive)
    dims = XGLM.dims(settings)
    assert isinstance(dims, ModelDims), "XGLM is FasterTransformer's GPT"
    dims = replace(dims, has_untied_head=dims.has_untied_head or not XGLM.is_tied(settings))
    table = XGLM.table(settings, dims)
    reasons = dict.fromkeys(_BESIDE, "what fairseq keeps beside the weights")
    tokenizer = find_tokenizer_files(archive)
    if tokenizer.members:  # fairseq encodes a text so too
        tokenizer = replace(tokenizer, text_ids=TextIds(before=(_IDS.end_id,)))
    return Source(
        archive=archive,
        family=XGLM.family,
        source_map=replace(table, name="fairseq's XGLM", ignored={**table.ignored, **reasons}),
        dims=dims,
        tensors=tensors,
        tokenizer=tokenizer,
        ids=_IDS,
        other_keys=other_keys,
        remarks=XGLM.remarks(settings, dims) + of_head + (() if tokenizer.members else (NO_TOKENIZER,)),
    )


def _open_weights(archive: Archive, saved: dict[str, Any]) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """List tensors and other keys in transformers' names; what lies beside the model goes into ``saved``."""

    def take_model(content: Any, where: str) -> Mapping[str, Any]:
        model = content.get("model") if isinstance(content, dict) else None
        if not isinstance(model, dict) or not all(isinstance(key, str) for key in model):
            raise CheckpointError(f"{where} holds no model", "is it a checkpoint of fairseq?")
        saved.update({key: value for key, value in content.items() if key != "model"})
        return model

    file = open_torch_file(archive, _WEIGHTS, take_model, _MODULES)
    named = {key.removeprefix("decoder."): value for key, value in file.state.items()}
    return tensors_of(file, {XGLM.head if key == _HEAD else key: value for key, value in named.items()})


def _arguments(archive: Archive, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the model's arguments: ``cfg`` of fairseq since 0.10.2, ``args`` before."""
    found = _as_mapping(saved.get("cfg")).get("model") or saved.get("args")
    arguments = _as_mapping(found)
    if "decoder_layers" not in arguments:
        raise CheckpointError(
            f"{archive.path}: {_WEIGHTS} does not say how the model is built", "cfg.model or args has decoder_layers"
        )
    return arguments


def _as_mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Record):
        return vars(value)
    return value if isinstance(value, dict) else {}


def _in_transformers_words(arguments: Mapping[str, Any], vocab_size: int) -> Settings:
    lengths = (arguments.get(name) for name in ("max_target_positions", "tokens_per_sample"))
    return Settings(
        {
            "d_model": arguments.get("decoder_embed_dim"),
            "num_layers": arguments.get("decoder_layers"),
            "attention_heads": arguments.get("decoder_attention_heads"),
            "ffn_dim": arguments.get("decoder_ffn_embed_dim"),
            "vocab_size": vocab_size,
            "max_position_embeddings": next(filter(None, lengths), 2048),
            "activation_function": arguments.get("activation_fn") or "relu",
            "scale_embedding": not arguments.get("no_scale_embedding"),
            "tie_word_embeddings": bool(arguments.get("share_decoder_input_output_embed")),
        }
    )


def _problems(arguments: Mapping[str, Any]) -> list[str]:
    """List the arguments in the way, one line each."""
    width = arguments.get("decoder_embed_dim")
    legal = {**_LEGAL, "decoder_input_dim": (None, width), "decoder_output_dim": (None, width)}
    return [
        f"{name}: {arguments[name]}  (XGLM has {values[0]})"
        for name, values in legal.items()
        if name in arguments and arguments[name] not in values
    ]
