"""Reader of Megatron-LM's checkpoints: ``release/`` or ``iter_<n>/`` with one ``model_optim_rng.pt`` a training rank.

Files: Megatron-LM, ``megatron/checkpointing.py`` (``get_checkpoint_names``, ``latest_checkpointed_iteration.txt``);
newer ones are distributed (``.metadata``, ``common.pt``). The training's arguments lie in the file. The tokenizer's
files are no part of a checkpoint: they are looked for beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.checkpoints.files.chunked import ChunkedState
from export_scripts.checkpoints.files.distributed import flat, open_distributed, read_common
from export_scripts.checkpoints.files.distributed_metadata import METADATA_FILE
from export_scripts.checkpoints.files.distributed_torch import TRAINING_MODULES
from export_scripts.checkpoints.files.pickled import Record
from export_scripts.checkpoints.files.rank_files import RankFiles, StatesTogether
from export_scripts.checkpoints.files.torch_file import TorchFile
from export_scripts.checkpoints.files.torch_format import open_torch_file
from export_scripts.checkpoints.huggingface.distributed import has_hub_names, missing_config
from export_scripts.checkpoints.megatron.arguments import in_nemo_words, without_arguments
from export_scripts.checkpoints.megatron.arguments import remarks as remarks_on_arguments
from export_scripts.checkpoints.megatron.experts import MARK, numbered
from export_scripts.checkpoints.megatron.fsdp import is_fsdp, settle_fsdp, without_wrappers
from export_scripts.checkpoints.megatron.fused_sections import recurrent_of, taken_apart
from export_scripts.checkpoints.megatron.gpt import CHECKPOINT_VERSION, State, gpt_source
from export_scripts.checkpoints.megatron.rank_grid import grid_of
from export_scripts.checkpoints.runs.iterations import RANK, TRACKER, find_folder
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles
from export_scripts.weights.values import Fields
from handover.errors import CheckpointError

NAME = "Megatron-LM (release/ or iter_*/ with mp_rank_*/)"
_ARGUMENTS = "args.json"
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_MARK = re.compile(r"(?:(?:iter_\d+|release)/)?(?:\.metadata|mp_rank_\d+(?:_\d+){0,2}/model(?:_optim)?_rng\.pt)$")
_MODEL, _PART = "model", "#"
_PARTS = re.compile(rf"{_MODEL}\d*")
"""Keys of a file's models: several are those of interleaved pipeline stages."""
_CORE = ("decoder.", "embedding.", "language_model.")
# Patterns of the tokenizer's files; a file may also be called what the arguments call it.
_TOKENIZERS = (
    ("bpe", {"vocab.json": ("*vocab*.json", "vocab_file"), "merges.txt": ("*merges*.txt", "merge_file")}),
    ("sentencepiece", {"tokenizer.model": ("*.model", "tokenizer_model")}),
)


def is_candidate(path: Path) -> bool:
    """Whether a directory is laid out as Megatron-LM does it."""
    if not path.is_dir():
        return False
    folders = (path, path / "release", *path.glob("iter_*"))
    return (path / TRACKER).is_file() or any(
        (folder / METADATA_FILE).is_file() or any(folder.glob("mp_rank_*/model*_rng.pt")) for folder in folders
    )


def recognises(archive: Archive) -> bool:
    """Whether the files are Megatron-LM's."""
    return TRACKER in archive or (any(_MARK.match(name) for name in archive.sizes) and not has_hub_names(archive))


def open_source(archive: Archive) -> Source:
    """Open a GPT.

    Raises:
        CheckpointError: incomplete, or not a model that FasterTransformer's GPT can express.
    """
    folder = find_folder(archive)
    saved: dict[str, Any] = {}
    state: State
    if f"{folder}{METADATA_FILE}" in archive:
        state = open_distributed(archive, folder, without_wrappers)
        saved = dict(read_common(archive, folder, state))
        is_named_by_core = any(key.startswith(_CORE) for key in tuple(state.keys()))
        if not (saved or is_named_by_core) and is_fsdp(archive, folder):
            raise missing_config(archive)
    else:
        state = _open_ranks(archive, folder, saved)
    arguments = saved.get("args")
    remarks: tuple[str, ...] = ()
    if isinstance(arguments, Record):
        config, remarks = in_nemo_words(vars(arguments)), remarks_on_arguments(vars(arguments))
        if isinstance(state, ChunkedState) and is_fsdp(archive, folder):
            settle_fsdp(archive.path, state, config["activation"], vars(arguments))
    else:
        config, remarks = without_arguments(archive.path, state, _read_arguments(archive))
    config[CHECKPOINT_VERSION] = _version(archive, saved)
    named = vars(arguments) if isinstance(arguments, Record) else {}
    return gpt_source(archive, config, lambda: state, "", lambda: _find_tokenizer(archive, named), remarks)


def _rank_files(archive: Archive, folder: str) -> dict[tuple[int, ...], str]:
    """Files by the numbers in their folders' names."""
    found = {}
    for name in archive.sizes:
        place, _, file = name[len(folder) :].rpartition("/")
        rank = RANK.match(place)
        if name.startswith(folder) and rank and file in _FILES:
            found[tuple(int(number) for number in rank.groups() if number is not None)] = name
    return found


def _open_ranks(archive: Archive, folder: str, saved: dict[str, Any]) -> State:
    """Open every training rank's file; what the first of them holds beside the model goes into ``saved``."""
    files = _rank_files(archive, folder)
    if not files:
        raise CheckpointError(f"{archive.path}/{folder} has no mp_rank_XX/{_FILES[0]}")
    first = open_torch_file(archive, files[min(files)], _top, TRAINING_MODULES).state
    saved.update({key: value for key, value in first.items() if not _PARTS.fullmatch(key)})
    parts = max(1, sum(key != _MODEL for key in first if _PARTS.fullmatch(key)))
    arguments = saved.get("args")
    named = vars(arguments) if isinstance(arguments, Record) else {}
    grid = grid_of(files, named, archive.path)
    recurrent = recurrent_of(named)

    @cache
    def open_one(within: Archive, place: str) -> TorchFile:
        name, _, part = place.partition(_PART)

        def take(content: Any, where: str) -> Mapping[str, Any]:
            state = _model(content, f"{_MODEL}{part}", where)
            count = grid.experts_of_a_rank
            if recurrent:
                state = taken_apart(state, recurrent, grid.tensor_ranks, where)
            return numbered(state, grid.rank_of[name], count, where) if grid.expert_num else state

        return open_torch_file(within, name, take, TRAINING_MODULES)

    dense = RankFiles(
        archive,
        _in_parts(grid.dense(), parts),
        open_file=open_one,
        keep=lambda key: not (grid.has_apart and MARK in key),
    )
    dense.beside = tuple(saved)
    if not grid.has_apart:
        return dense

    def is_experts(key: str) -> bool:
        return MARK in key and "_extra_state" not in key

    return StatesTogether(
        (dense, RankFiles(archive, _in_parts(grid.experts(), parts), open_file=open_one, keep=is_experts))
    )


def _in_parts(ranks: list[list[tuple[str, ...]]], parts: int) -> list[list[tuple[str, ...]]]:
    """List the stages of each rank in the model's order where a file has the layers of several.

    Megatron-LM's interleaved schedule: all ranks' first parts come before all ranks' second ones.
    """
    if parts == 1:
        return ranks
    return [[tuple(f"{name}{_PART}{n}" for name in stage) for n in range(parts) for stage in rank] for rank in ranks]


def _top(content: Any, where: str) -> Mapping[str, Any]:
    """Take what a file has at its top."""
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}


def _model(content: Any, key: str, where: str) -> Mapping[str, Any]:
    if not isinstance(content, dict) or not isinstance(content.get(key), dict):
        there = (
            sorted(str(each) for each in content if str(each).startswith(_MODEL)) if isinstance(content, dict) else []
        )
        raise CheckpointError(
            f"{where} holds {', '.join(there) or 'something else'} instead of {key}",
            "is it a checkpoint of Megatron-LM, and are all of its files of one save?",
        )
    return flat(content[key])


def _version(archive: Archive, saved: Mapping[str, Any]) -> int:
    version = saved.get("checkpoint_version", 0)
    if version not in (0, 1, 2, 3):
        raise CheckpointError(f"{archive.path} has checkpoint_version {version}", "0, 1, 2 and 3 are read")
    return int(version)


def _read_arguments(archive: Archive) -> Mapping[str, Any]:
    """Read what the user says of a checkpoint that was saved without its arguments."""
    if _ARGUMENTS not in archive:
        return {}
    where = f"{archive.path}: {_ARGUMENTS}"
    return Fields(parse_json(archive.read_bytes(_ARGUMENTS), where), where)


def _find_tokenizer(archive: Archive, arguments: Mapping[str, Any]) -> TokenizerFiles:
    """Find the tokenizer's files beside the checkpoint."""
    at_root = [name for name in archive.sizes if "/" not in name]
    for library, wanted in _TOKENIZERS:
        members: dict[str, str] = {}
        for file, (pattern, argument) in wanted.items():
            called = str(arguments.get(argument)).rpartition("/")[2]
            found = [called] if called in at_root else [name for name in at_root if fnmatchcase(name, pattern)]
            if len(found) > 1:
                raise CheckpointError(f"{archive.path} holds several tokenizer files: {', '.join(found)}", "keep one")
            if found:
                members[file] = found[0]
        if len(members) == len(wanted):
            return TokenizerFiles(members, library)
    raise CheckpointError(
        f"{archive.path} has no tokenizer's files",
        f"put gpt2-vocab.json and gpt2-merges.txt, or the SentencePiece model, into {archive.path}: "
        "Megatron-LM does not save them",
    )
