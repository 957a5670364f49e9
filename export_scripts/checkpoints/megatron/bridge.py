"""Reader of Megatron-Bridge's checkpoints: ``iter_<n>/`` with ``run_config.yaml`` beside a distributed checkpoint.

Files: Megatron-Bridge, ``training/checkpointing.py`` and ``training/utils/checkpoint_utils.py``; keys are those of
megatron-core, without a prefix. ``run_config.yaml`` holds the training's configuration; ``model`` is megatron-core's
TransformerConfig with GPT's own fields (``models/gpt_provider.py``), in newer versions with a section ``transformer``
(``models/gpt/model_config.py``). ``tokenizer/`` holds the tokenizer's files, where the training saved them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.chunked import ChunkedState
from export_scripts.checkpoints.files.distributed import is_distributed, open_distributed
from export_scripts.checkpoints.files.yaml_file import read_yaml
from export_scripts.checkpoints.megatron.fsdp import is_fsdp, settle_fsdp, without_wrappers
from export_scripts.checkpoints.megatron.gpt import gpt_source
from export_scripts.checkpoints.nemo.core_fields import CORE_KNOWN
from export_scripts.checkpoints.nemo.gemma3 import is_gemma3
from export_scripts.checkpoints.nemo.limits import remark_on, unknown_keys
from export_scripts.checkpoints.nemo.model_class import (
    BEHIND_ALONE,
    builds_exaone4,
    class_remarks,
    own_type,
    scales_embeddings,
    sees_images,
    with_windows_of_layers,
)
from export_scripts.checkpoints.nemo.nemo2 import in_nemo1_words
from export_scripts.checkpoints.nemo.windows import AS_CORE, AS_SAID, window_of
from export_scripts.checkpoints.runs.iterations import find_folder
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles, only_named
from export_scripts.checkpoints.tokenizers.user_tokenizer import tokenizer_in
from export_scripts.weights.megatron_decoder import OF_IMAGES, OF_TEXT
from export_scripts.weights.values import Fields
from handover.errors import CheckpointError
from models.checks import shown

NAME = "Megatron-Bridge (iter_*/ with run_config.yaml)"
CONFIG_FILE = "run_config.yaml"
_MARK = re.compile(rf"(?:(?:iter_\d+|release)/)?{re.escape(CONFIG_FILE)}$")
_OF_IMAGES = re.compile(
    r"vision_|image_|video_|freeze_|mm_|max_vision_|use_hf_vision|(spatial|temporal)_|(bos|eos)_token_id|hf_text_config"
    r"|patch_size|in_channels|out_hidden_size|num_position_embeddings|deepstack|dist_train|add_(en|de)coder|return_dict"
    r"|language_max|language_world|apply_rotary_pos_emb_in_fp32|mrope_section"
)
"""Fields of the classes that see images."""
_ACTIVATION = "megatron_bridge.activation_func"


def is_candidate(path: Path) -> bool:
    """Whether a directory is laid out as Megatron-Bridge does it."""
    return (path / CONFIG_FILE).is_file() or any(path.glob(f"iter_*/{CONFIG_FILE}"))


def recognises(archive: Archive) -> bool:
    """Whether the files are Megatron-Bridge's."""
    return any(_MARK.match(name) for name in archive.sizes)


def open_source(archive: Archive) -> Source:
    """Open a GPT.

    Raises:
        CheckpointError: incomplete, or not a model that is expressed.
    """
    folder = find_folder(archive)
    run = read_run(archive, folder)
    model = run.fields("model")
    if not is_distributed(archive, folder):
        raise CheckpointError(
            f"{archive.path}/{folder} has no .metadata: it is no checkpoint of torch_dist",
            "ckpt_format torch_dist is read",
        )
    saved_as = run.fields("checkpoint", {}).get("ckpt_format")
    if saved_as not in (None, "torch_dist", "zarr", "fsdp_dtensor"):
        raise CheckpointError(
            f"{archive.path}: {folder}{CONFIG_FILE} says ckpt_format {shown(saved_as)}, which is not read",
            "save the run once with ckpt_format torch_dist: it is read",
        )
    config, words = flat(model), model_in_nemo1_words(model)

    def open_state() -> ChunkedState:
        state = open_distributed(archive, folder, without_wrappers)
        if is_fsdp(archive, folder):
            settle_fsdp(archive.path, state, words["activation"], config)
        return state

    return gpt_source(
        archive,
        words,
        open_state,
        OF_TEXT if sees_images(model) else "",
        lambda: _find_tokenizer(archive, folder, run.fields("tokenizer", {})),
        (
            *_text_remark(model),
            *remark_on(_unknown(model, config), CONFIG_FILE),
            *class_remarks(model, config, CONFIG_FILE),
            *_window_remark(config),
        ),
    )


def read_run(archive: Archive, folder: str) -> Fields:
    """Read the configuration of the run that saved an iteration."""
    return Fields(read_yaml(archive, f"{folder}{CONFIG_FILE}"), f"{archive.path}: {folder}{CONFIG_FILE}")


def model_in_nemo1_words(model: Fields) -> dict[str, Any]:
    """Put the section ``model`` into the words of ``model_config.yaml``.

    Raises:
        CheckpointError: the provider may compute what its fields do not say.
    """
    config = flat(model)
    words = {**in_nemo1_words(config), AS_CORE: True}
    if is_gemma3(config):
        words |= {"window_size": [words["window_size"][0] - 1, 0], "qk_layernorm": config.get("qk_layernorm")}
    elif builds_exaone4(config):
        words |= {AS_SAID: True, BEHIND_ALONE: True}
    if sees_images(model) and words.get("position_embedding_type") == "mrope":
        words["position_embedding_type"] = "rope"  # the three numbers of a text's position are equal
    return {**words, **own_type(model), "apply_embedding_scaling": scales_embeddings(model, config, CONFIG_FILE)}


def _unknown(model: Fields, config: Mapping[str, Any]) -> list[str]:
    """List the fields that are set and not known; those of images do nothing to the text model."""
    fields = {key: each for key, each in config.items() if not (sees_images(model) and _OF_IMAGES.match(key))}
    return unknown_keys(fields, CORE_KNOWN)


def _text_remark(model: Fields) -> tuple[str, ...]:
    if not sees_images(model):
        return ()
    return (
        f"{CONFIG_FILE} builds a model that sees images: its text model alone is converted, which computes the same of "
        f"texts without images; tensors of {', '.join(OF_IMAGES)} are left out",
    )


def _window_remark(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the number of a window meant to Megatron-Bridge's importers before 0.4 (its #2656, March 2026)."""
    if (window := window_of(config)) is None:
        return ()
    return (
        f"a run that Megatron-Bridge before 0.4 imported from Hugging Face has its sliding_window as window_size, and "
        f"trained with one token more: to convert such a run as it was imported, write [{window - 1}, 0]",
    )


def flat(model: Fields) -> dict[str, Any]:
    """Put the fields of a model and of its transformer into one mapping, with the activation function's name."""
    config = {**model.fields("transformer", {}), **model}
    named = model.fields("extra_checkpoint_metadata", {}).get(_ACTIVATION)
    if named is not None and config.get("activation_func") is None:
        config["activation_func"] = named
    if config.pop("rope_scaling", False):  # the newer words for what Llama31ModelProvider called scale_factor
        config["scale_factor"] = config.get("rope_scaling_factor", 8.0)
    if not is_gemma3(config):
        config.pop("rope_scaling_factor", None)
    return with_windows_of_layers(config)


def _find_tokenizer(archive: Archive, folder: str, settings: Mapping[str, Any]) -> TokenizerFiles:
    """Find the tokenizer's files: beside the weights, where the training saved them, or at the root."""
    for place in (f"{folder}tokenizer/", "tokenizer/", ""):
        if (found := tokenizer_in(archive, place)) is not None:
            return found
    if settings.get("tokenizer_type") == "NullTokenizer":
        raise CheckpointError(
            f"{archive.path} was trained with NullTokenizer: on ids, without a tokenizer",
            "give the one that its data was encoded with as export.model.tokenizer=PATH",
        )
    raise only_named(archive, str(settings.get("tokenizer_model") or settings.get("tokenizer_type")))
