"""Reader of Hugging Face checkpoints of decoder-only models: a directory with ``config.json`` and weights.

One architecture is one table: adding one is a module in weights/ and a line here. Llama's relatives are models/'.
"""

from __future__ import annotations

from dataclasses import replace

import models
from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.parted_safetensors import has_parts
from export_scripts.checkpoints.huggingface.distributed import has_hub_names, overrides
from export_scripts.checkpoints.huggingface.files import (
    ADAPTER_FILE,
    Weights,
    is_checkpoint,
    open_model_weights,
    own_quantization,
    read_config,
    written,
)
from export_scripts.checkpoints.huggingface.predictors import of_passed_over, without_absent_predictors
from export_scripts.checkpoints.huggingface.products import with_products
from export_scripts.checkpoints.huggingface.text_part import PARTS, text_settings, text_weights
from export_scripts.checkpoints.huggingface.tied_head import is_said_tied, untied_where_it_differs
from export_scripts.checkpoints.huggingface.unread import refusal
from export_scripts.checkpoints.runs.hub_names import TRAINING_FILE
from export_scripts.checkpoints.source import OwnModel, Source
from export_scripts.checkpoints.tokenizers.huggingface import NO_TOKENIZER, find_tokenizer, special_ids
from export_scripts.weights.architecture import Architecture
from export_scripts.weights.huggingface_bloom import BLOOM
from export_scripts.weights.huggingface_decoder import HUB_DECODERS, PREDICTORS
from export_scripts.weights.huggingface_gpt2 import GPT2
from export_scripts.weights.huggingface_gpt_bigcode import GPT_BIGCODE
from export_scripts.weights.huggingface_gptj import GPTJ
from export_scripts.weights.huggingface_gptneox import GPTNEOX
from export_scripts.weights.huggingface_opt import OPT
from export_scripts.weights.huggingface_xglm import XGLM
from export_scripts.weights.remarks import ShardRemark
from export_scripts.weights.schema import DecoderDims, LazyTensor
from export_scripts.weights.settings import Settings
from handover.errors import CheckpointError
from models.decoder import Decoder
from models.directory import CONFIG_FILE

NAME = "Hugging Face (directory with config.json and safetensors or pytorch_model.bin)"
ARCHITECTURES: tuple[Architecture, ...] = (GPT2, OPT, BLOOM, XGLM, GPTJ, GPTNEOX, GPT_BIGCODE, *HUB_DECODERS)
is_candidate = is_checkpoint


def recognises(archive: Archive) -> bool:
    """Whether the files are a Hugging Face checkpoint, of whatever architecture, so that its faults are named."""
    return CONFIG_FILE in archive or ADAPTER_FILE in archive or has_parts(archive) or has_hub_names(archive)


def open_source(archive: Archive) -> Source:
    """Open a model.

    Raises:
        CheckpointError: incomplete, or not a model that FasterTransformer can express.
    """
    said, of_name = _by_class(Settings(read_config(archive)))
    config = text_settings(said)
    architecture, described_dims, beyond = _expressed(config)
    files, is_renamed = open_model_weights(archive, config), config is not said
    if is_renamed:
        files = text_weights(files, said.text("model_type"), config)
    weights = _with_embedding(_named_alike(files, architecture), architecture, config)
    used = weights.tensors
    config, of_head = untied_where_it_differs(config, architecture, used, archive)
    config, of_predictors = without_absent_predictors(config, described_dims, used)
    settings, dims = architecture.settled(config), _expressed(config)[1]
    products = architecture.products(settings)
    weights = replace(weights, tensors=with_products(weights.tensors, products))
    table = architecture.table(settings, dims)
    tokenizer = find_tokenizer(archive, architecture.model_type)
    remarks = (*files.remarks, *architecture.remarks(settings, dims), *(() if tokenizer.members else (NO_TOKENIZER,)))
    if changes := overrides(archive):
        remarks += (f"{TRAINING_FILE} sets {', '.join(changes)} of {CONFIG_FILE} (hf_config_overrides)",)
    remarks += (
        of_name
        + of_head
        + of_predictors
        + tuple(
            ShardRemark(f"{key} is {each.rows} times {each.weight}, computed in fp32") for key, each in products.items()
        )
    )
    has_own = not (is_renamed and PARTS[said.text("model_type")].has_arrays)
    config, of_others = of_passed_over(config, table, used, has_own)
    prefix, stays = architecture.prefix, ("", PREDICTORS)
    kept = written(files, (used[key] for key in used if table.ignored_as(key) in stays))
    scales = {key: each for key, each in files.scales.items() if table.ignored_as(key.removeprefix(prefix)) in stays}
    own = OwnModel(config, kept, is_renamed, own_quantization(archive), scales)
    return Source(
        archive=archive,
        family=architecture.family,
        source_map=table,
        dims=dims,
        tensors=weights.tensors,
        tokenizer=tokenizer,
        ids=special_ids(archive, settings),
        other_keys=weights.other_keys,
        remarks=remarks + of_others,
        beyond=beyond,
        activation=architecture.exact_function(settings),
        own=own if has_own else None,
    )


def described(settings: Settings) -> tuple[Architecture, DecoderDims]:
    """Read what ``config.json`` alone says: the architecture and its dimensions.

    Raises:
        CheckpointError: it is none that is expressed.
    """
    architecture, dims, beyond = _expressed(text_settings(_by_class(settings)[0]))
    if beyond:
        raise _inexpressible(architecture, beyond)
    return architecture, dims


def _expressed(settings: Settings) -> tuple[Architecture, DecoderDims, tuple[str, ...]]:
    """Read the architecture, the dimensions of its tensors, and what FasterTransformer cannot express of it.

    Raises:
        CheckpointError: it is no architecture that is read, or what is in the way changes the tensors.
    """
    architecture = _architecture(settings)
    settings = architecture.settled(settings)
    beyond = tuple(architecture.problems(settings))
    if beyond:
        in_the_way = {problem.partition(":")[0] for problem in beyond}
        settings = Settings({key: value for key, value in settings.items() if key not in in_the_way})
        if architecture.problems(settings):
            raise _inexpressible(architecture, beyond)
    dims = architecture.dims(settings)
    if isinstance(dims, Decoder):
        return architecture, dims, beyond
    untied = dims.has_untied_head or not architecture.is_tied(settings)
    return architecture, replace(dims, has_untied_head=untied), beyond


def _by_class(settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    """Call an architecture by the name that transformers has for its class; also returns what is to be said of it."""
    name = settings.get("model_type")
    own = models.OTHER_NAMES.get(name) if isinstance(name, str) else None
    if own is None:
        return settings, ()
    kept = {key: value for key, value in settings.items() if key != "auto_map"}
    remark = f"model_type {name} becomes {own}, whose class computes it; code that auto_map names is not needed for it"
    return Settings({**kept, "model_type": own}), (remark,)


def _inexpressible(architecture: Architecture, problems: tuple[str, ...]) -> CheckpointError:
    return CheckpointError(
        f"FasterTransformer's {architecture.family.name} cannot express this checkpoint\n  " + "\n  ".join(problems),
        "the keys are those of config.json",
    )


def _architecture(settings: Settings) -> Architecture:
    name = settings.get("model_type")
    for each in ARCHITECTURES:
        if each.model_type == name:
            return each
    raise refusal(settings, (*(each.model_type for each in ARCHITECTURES), "t5", "mt5"))


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
