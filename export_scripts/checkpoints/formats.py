"""The formats that are read, and which of them a path holds.

A format is a module with ``NAME``, ``is_candidate(path)``, ``recognises(archive)`` and ``open_source(archive)``; adding
one is a line here.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from export_scripts.checkpoints import fairseq_xglm, gptj_slim
from export_scripts.checkpoints.fastertransformer import reader as fastertransformer
from export_scripts.checkpoints.fastertransformer import turbomind
from export_scripts.checkpoints.files.archive import Archive, open_archive
from export_scripts.checkpoints.huggingface import decoder as huggingface
from export_scripts.checkpoints.huggingface import t5 as huggingface_t5
from export_scripts.checkpoints.huggingface.files import is_adapter
from export_scripts.checkpoints.lora import bridge as bridge_lora
from export_scripts.checkpoints.lora import nemo as nemo_lora
from export_scripts.checkpoints.lora import nemo2 as nemo2_lora
from export_scripts.checkpoints.lora.adapter import KIND as LORA
from export_scripts.checkpoints.lora.merge import with_adapter
from export_scripts.checkpoints.megatron import bridge as megatron_bridge
from export_scripts.checkpoints.megatron import reader as megatron
from export_scripts.checkpoints.nemo import gpt as nemo
from export_scripts.checkpoints.nemo import ia3 as nemo_t5_ia3
from export_scripts.checkpoints.nemo import nemo2, prompt_learning
from export_scripts.checkpoints.nemo import t5 as nemo_t5
from export_scripts.checkpoints.nemo.companions import with_companions
from export_scripts.checkpoints.nemo.ia3 import is_ia3_config
from export_scripts.checkpoints.nemo.prompt_learning import is_prompt_config, refuse_unread_prompts
from export_scripts.checkpoints.runs.hub_names import find_run
from export_scripts.checkpoints.runs.iterations import with_one_iteration
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.nemo import check_files
from export_scripts.checkpoints.tokenizers.user_tokenizer import refuse_unused
from export_scripts.checkpoints.user_files import NOTHING_GIVEN, GivenFiles, with_given
from handover.errors import CheckpointError


class Format(Protocol):
    """One format of checkpoints."""

    NAME: str

    def is_candidate(self, path: Path) -> bool:
        """Whether a file or directory looks like one checkpoint of this format, by names alone."""

    def recognises(self, archive: Archive) -> bool:
        """Whether the files are a checkpoint of this format; cheap."""

    def open_source(self, archive: Archive) -> Source:
        """Read configuration and keys; CheckpointError where FasterTransformer cannot express the model."""


_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".npz", ".h5", ".msgpack", ".gguf")
_NESTED = 3  # folders above a file in which its checkpoint may be
_HUB_FOLDER = re.compile(r"models--[^/]+")
_REVISION = 100  # characters of a name of a snapshot, at most
FORMATS: tuple[Format, ...] = (
    huggingface_t5,
    nemo2,
    nemo_t5,
    nemo,
    megatron_bridge,
    megatron,
    gptj_slim,
    fairseq_xglm,
    huggingface,
    turbomind,
    fastertransformer,
)


def _find(path: Path) -> tuple[Path, dict[str, Path]]:
    """Find the one model that a path means, and its companions, each by the folder it gets.

    Args:
        path: a checkpoint, or a directory that holds exactly one of them, with or without prompt tables or adapters.

    Raises:
        CheckpointError: there is none, or there are several, which are listed.
    """
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist",
            "checkpoint_path names an archive, a directory, or as hf:org/name a model of huggingface.co",
        )
    _refuse_part(path)
    path = _in_hub_cache(path)
    if not path.is_dir() or _is_candidate(path):
        return path, {}
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    found = [entry for entry in entries if _is_candidate(entry)]
    kinds = {entry: kind for entry in found if (kind := _companion_kind(entry))} if found[1:] else {}
    models = [entry for entry in found if entry not in kinds]
    if len(models) > 1:
        names = "\n  ".join(entry.name for entry in models)
        raise CheckpointError(f"{path} holds {len(models)} checkpoints\n  {names}", "give the path of one of them")
    if not models:
        what = "prompt tables or adapters and no model for them" if kinds else "no checkpoint"
        raise CheckpointError(f"{path} holds {what}", f"these are read: {_names()}")
    return models[0], {f"{kind}/{entry.name}": entry for entry, kind in kinds.items()}


def _refuse_part(path: Path) -> None:
    """Refuse a file of weights: without its configuration nothing says what they are.

    Raises:
        CheckpointError: naming the checkpoint that it lies in, if there is one.
    """
    if not path.is_file() or path.suffix not in _WEIGHT_SUFFIXES:
        return
    whole = next((folder for folder in list(path.absolute().parents)[:_NESTED] if _is_candidate(folder)), None)
    if whole is not None:
        raise CheckpointError(f"{path} is one file of the checkpoint {whole}", f"give {whole}")
    raise CheckpointError(
        f"{path} is a file of weights without its configuration",
        f"give a checkpoint: a directory with config.json beside the weights, ...; these are read: {_names()}",
    )


def _in_hub_cache(path: Path) -> Path:
    """Find the model in a folder of huggingface_hub's cache, ``models--org--name``: the snapshot of the branch main.

    Raises:
        CheckpointError: there is none of main, and not just one other.
    """
    if not _HUB_FOLDER.fullmatch(path.name) or not (path / "snapshots").is_dir():
        return path
    snapshots = sorted(entry for entry in (path / "snapshots").iterdir() if entry.is_dir())
    main = path / "refs" / "main"
    named = main.read_text("utf-8", "replace").strip()[:_REVISION] if main.is_file() else ""
    chosen = [entry for entry in snapshots if entry.name == named] or snapshots
    if len(chosen) != 1:
        names = "".join(f"\n  {entry}" for entry in chosen)
        raise CheckpointError(
            f"{path} is huggingface_hub's cache of a model, with {len(chosen)} snapshots{names}",
            "give one of them" if chosen else "download the model again",
        )
    return chosen[0]


def _companion_kind(path: Path) -> str:
    """Return what belongs to a model there; empty: it is a model itself."""
    if is_adapter(path):
        return LORA
    with suppress(CheckpointError):  # it is listed with the models, and says itself what is wrong with it
        if nemo2.is_candidate(path) and nemo2_lora.recognises(open_archive(path)):
            return LORA
        if megatron_bridge.is_candidate(path) and bridge_lora.recognises(open_archive(path)):
            return LORA
        if nemo.is_candidate(path):
            archive = open_archive(path)
            config = nemo.read_config(archive)
            if is_ia3_config(config):
                return nemo_t5_ia3.KIND
            if nemo_lora.holds_adapter(archive):
                return LORA
            return prompt_learning.KIND if is_prompt_config(config) else ""
    return ""


def open_source(archive: Archive, for_shards: bool = True) -> Source:
    """Open a checkpoint by the first format that recognises it.

    Args:
        archive: the checkpoint.
        for_shards: the model must be one that FasterTransformer's shards can hold.

    Raises:
        CheckpointError: no format does, or the model cannot be expressed.
    """
    nemo_lora.refuse_adapter(archive)
    nemo2_lora.refuse_adapter(archive)
    bridge_lora.refuse_adapter(archive)
    for each in FORMATS:
        if each.recognises(archive):
            source = with_adapter(each.open_source(archive))
            source = replace(source, remarks=(*filter(None, (archive.remark,)), *source.remarks))
            if for_shards and source.beyond:
                raise CheckpointError(
                    f"FasterTransformer's {source.family.name} cannot express this checkpoint\n  "
                    + "\n  ".join(source.beyond),
                    "export.model.format=huggingface keeps it",
                )
            refuse_unread_prompts(source)
            nemo_t5_ia3.refuse_unread(source)
            refuse_unused(archive, source.tokenizer)
            check_files(source.archive, source.tokenizer)
            return source
    raise CheckpointError(f"{archive.path} is no checkpoint of a known format", f"these are read: {_names()}")


def find_archive(path: Path, given: GivenFiles = NOTHING_GIVEN) -> Archive:
    """Find the checkpoint that a path means and list its files; see ``find_run``, ``_find`` and ``open_archive``.

    Args:
        path: see ``_find``.
        given: what lies elsewhere and belongs to it; a given adapter takes the place of those beside the model.
    """
    if (run := find_run(path)) is not None:
        return with_given(with_one_iteration(run), given)
    model, companions = _find(path)
    archive = with_one_iteration(open_archive(model))
    if given.adapter is not None:
        companions = {folder: each for folder, each in companions.items() if not folder.startswith(f"{LORA}/")}
    if companions:
        archive = with_companions(model.parent, archive, companions)
    return with_given(archive, given)


def _is_candidate(path: Path) -> bool:
    return any(each.is_candidate(path) for each in FORMATS)


def _names() -> str:
    return ", ".join(each.NAME for each in FORMATS)
