"""Reader of Hugging Face checkpoints of decoder-only models: a directory with ``config.json`` and weights.

One architecture is one table: adding one is a module in weights/ and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.huggingface.files import (
    ADAPTER_FILE,
    CONFIG_FILE,
    Weights,
    is_checkpoint,
    open_model_weights,
    read_config,
    written,
)
from export_scripts.checkpoints.huggingface.products import with_products
from export_scripts.checkpoints.huggingface.tied_head import is_said_tied, untied_where_it_differs
from export_scripts.checkpoints.source import OwnModel, Source
from export_scripts.checkpoints.tokenizers.huggingface import NO_TOKENIZER, find_tokenizer, special_ids
from export_scripts.weights.architecture import Architecture, Settings
from export_scripts.weights.huggingface_bloom import BLOOM
from export_scripts.weights.huggingface_gpt2 import GPT2
from export_scripts.weights.huggingface_gpt_bigcode import GPT_BIGCODE
from export_scripts.weights.huggingface_gptj import GPTJ
from export_scripts.weights.huggingface_gptneox import GPTNEOX
from export_scripts.weights.huggingface_llama import LLAMA_FAMILY
from export_scripts.weights.huggingface_opt import OPT
from export_scripts.weights.huggingface_xglm import XGLM
from export_scripts.weights.remarks import ShardRemark
from export_scripts.weights.schema import DecoderDims, LazyTensor
from export_scripts.weights.values import quoted
from handover.errors import CheckpointError

NAME = "Hugging Face (directory with config.json and safetensors or pytorch_model.bin)"
_ENCODERS = ("bert", "roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "xlm-roberta")
_WITHOUT_TABLE = {
    "codegen": "FasterTransformer's gptj computes the same; its query, key and value lie in four blocks, in an order "
    "that docs/add_a_model_family.md takes for its example",
    "falcon": "no model of FasterTransformer has its block as it is: one key and value for many heads, beside a "
    "feed-forward that runs side by side with attention or, with ALiBi, behind it",
    "mpt": "no model of FasterTransformer has its block as it is: norms and layers without biases, ALiBi with slopes "
    "of its own where the heads are no power of two, and queries that may be clipped",
}
"""Why an architecture that is not read would, or would nearly, be one of FasterTransformer's."""
ARCHITECTURES: tuple[Architecture, ...] = (GPT2, OPT, BLOOM, XGLM, GPTJ, GPTNEOX, GPT_BIGCODE, *LLAMA_FAMILY)


def is_candidate(path: Path) -> bool:
    """Whether a directory looks like a Hugging Face checkpoint."""
    return is_checkpoint(path)


def recognises(archive: Archive) -> bool:
    """Whether the files are a Hugging Face checkpoint, of whatever architecture, so that its faults are named."""
    return CONFIG_FILE in archive or ADAPTER_FILE in archive


def open_source(archive: Archive) -> Source:
    """Open a model.

    Raises:
        CheckpointError: incomplete, or not a model that FasterTransformer can express.
    """
    config = Settings(read_config(archive))
    architecture, _ = described(config)
    files = open_model_weights(archive, config)
    weights = _with_embedding(_named_alike(files, architecture), architecture, config)
    used = weights.tensors
    config, of_head = untied_where_it_differs(config, architecture, used, archive)
    settings, (_, dims) = architecture.settled(config), described(config)
    products = architecture.products(settings)
    weights = replace(weights, tensors=with_products(weights.tensors, products))
    table = architecture.table(settings, dims)
    tokenizer = find_tokenizer(archive, architecture.model_type)
    remarks = architecture.remarks(settings, dims) + (() if tokenizer.members else (NO_TOKENIZER,))
    remarks += of_head + tuple(
        ShardRemark(f"{key} is {each.rows} times {each.weight}, computed in fp32") for key, each in products.items()
    )
    return Source(
        archive=archive,
        family=architecture.family,
        source_map=table,
        dims=dims,
        tensors=weights.tensors,
        tokenizer=tokenizer,
        ids=special_ids(archive, settings),
        other_keys=weights.other_keys,
        remarks=remarks,
        own=OwnModel(config, written(files, (used[key] for key in used if not table.is_ignored(key)))),
    )


def described(settings: Settings) -> tuple[Architecture, DecoderDims]:
    """Read what ``config.json`` alone says: the architecture and its dimensions.

    Raises:
        CheckpointError: it is none that is expressed.
    """
    architecture = _architecture(settings)
    settings = architecture.settled(settings)
    if problems := architecture.problems(settings):
        raise CheckpointError(
            f"FasterTransformer's {architecture.family.name} cannot express this checkpoint\n  "
            + "\n  ".join(problems),
            "the keys are those of config.json",
        )
    dims = architecture.dims(settings)
    return architecture, replace(dims, has_untied_head=dims.has_untied_head or not architecture.is_tied(settings))


def _architecture(settings: Settings) -> Architecture:
    name = settings.get("model_type")
    for each in ARCHITECTURES:
        if each.model_type == name:
            return each
    known = ", ".join(each.model_type for each in ARCHITECTURES) + "; and t5, mt5"
    if isinstance(name, str) and name in _WITHOUT_TABLE:
        raise CheckpointError(
            f"model_type {quoted(name)} has no table here\n  {_WITHOUT_TABLE[name]}",
            f"these have one: {known}; docs/add_a_model_family.md says how another is added",
        )
    reasons = _reasons(settings)
    raise CheckpointError(
        f"model_type {quoted(name)} is no architecture that FasterTransformer can express"
        + "".join(f"\n  {reason}" for reason in reasons),
        f"these are: {known}",
    )


def _reasons(settings: Mapping[str, Any]) -> list[str]:
    """Say what of an unknown architecture FasterTransformer has no counterpart for, one line each."""
    is_gpt_neo = settings.get("model_type") == "gpt_neo"
    is_encoder = settings.get("model_type") in _ENCODERS and not settings.get("is_decoder")
    experts = settings.get("num_local_experts") or settings.get("num_experts") or settings.get("n_routed_experts")
    found = {
        f"experts: {experts}  (its feed-forward is one)": bool(experts),
        "lm_head.bias  (its gptneox, which rotates halves, has a head without)": settings.get("model_type") == "phi",
        "attention_types  (every layer sees all positions)": _is_local(settings),
        "its scores are not divided by the root of the head's size, FasterTransformer's are": is_gpt_neo,
        "it is an encoder, which generates nothing  (it has decoders, and encoders with one)": is_encoder,
        "is_encoder_decoder: True  (it is no decoder alone)": bool(settings.get("is_encoder_decoder")),
    }
    return [reason for reason, is_so in found.items() if is_so]


def _is_local(settings: Mapping[str, Any]) -> bool:
    """Whether some layers see only what is near; GPT-Neo's do where its configuration is silent."""
    default = "local" if settings.get("model_type") == "gpt_neo" else None
    return "local" in str(settings.get("attention_types", default))


def _named_alike(weights: Weights, architecture: Architecture) -> Weights:
    """Call keys as the model without its head does, and by the table's names: checkpoints of both are about.

    Raises:
        CheckpointError: a key is there under two names.
    """
    tensors: dict[str, LazyTensor] = {}
    named: dict[str, str] = {}
    for key, tensor in weights.tensors.items():
        short = key.removeprefix(architecture.prefix)
        name = architecture.other_names.get(short, short)
        if name in tensors:
            raise CheckpointError(f"one tensor is there under two names, {named[name]} and {key}", "keep one of them")
        tensors[name], named[name] = tensor, key
    return Weights(tensors, weights.other_keys)


def _with_embedding(weights: Weights, architecture: Architecture, settings: Settings) -> Weights:
    """Find a tied embedding under the head's name: whoever saves each tensor once keeps one of its two names.

    safetensors' ``save_model`` keeps the name that comes first in the alphabet; transformers ties whichever is there.
    """
    embedding, head = architecture.embedding, architecture.head
    if not is_said_tied(settings, architecture) or embedding in weights.tensors or head not in weights.tensors:
        return weights
    renamed = {embedding if key == head else key: tensor for key, tensor in weights.tensors.items()}
    return replace(weights, tensors=renamed)
