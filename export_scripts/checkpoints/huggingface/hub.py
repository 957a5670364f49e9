"""Fetch a checkpoint from huggingface.co, where the job runs.

A name there is written ``hf:org/name``, or ``hf:org/name@revision``. The library ``huggingface_hub`` is imported only
here; it knows tokens, mirrors (HF_ENDPOINT) and proxies, and goes on with files that are there in part.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from handover.digests import SHA256, file_digest
from handover.durable import sync_tree, write_atomically
from handover.errors import CheckpointError, ConfigError
from models.directory import CONFIG_FILE, read_json

PREFIX = "hf:"
_NAME = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*(?:@[\w./-]+)?")
_FETCHED = ".fetched.json"
_PEEK_S = 5.0
"""How long the hub may take to answer who only wants to know the model's family."""
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
)
# In order of preference; the first that a repository has is fetched.
_WEIGHTS = (
    ("model.safetensors",),
    ("model.safetensors.index.json", "model-*.safetensors"),
    ("pytorch_model.bin",),
    ("pytorch_model.bin.index.json", "pytorch_model-*.bin"),
)


def hub_name(checkpoint_path: str) -> str | None:
    """Return the name on huggingface.co that a checkpoint_path is; None: it is a path.

    Raises:
        ConfigError: it begins as a name and is none.
    """
    if not checkpoint_path.startswith(PREFIX):
        return None
    name = checkpoint_path.removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"checkpoint_path {checkpoint_path} is no name of huggingface.co",
            "write hf:org/name or hf:org/name@revision",
        )
    return name


def local_directory(name: str, data_directory: Path) -> Path:
    """Return where a name's files are fetched to."""
    return data_directory / "huggingface" / re.sub("[/@]", "--", name)


def is_fetched(name: str, directory: Path) -> bool:
    """Whether all files of a name are in a directory already."""
    try:
        return bool(json.loads((directory / _FETCHED).read_text())["name"] == name)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def peek_config(name: str) -> Mapping[str, Any]:
    """Read what a name's ``config.json`` says before all of it is fetched; empty where the hub does not tell."""
    repository, _, revision = name.partition("@")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        hub = importlib.import_module("huggingface_hub")
        commit = hub.HfApi().model_info(repository, revision=revision or None, timeout=_PEEK_S).sha
        path = hub.hf_hub_download(repository, CONFIG_FILE, revision=commit, etag_timeout=_PEEK_S)
    except Exception:  # no library, no network, no such name: whoever fetches it says what is wrong
        return {}
    return read_json(Path(path), CheckpointError)


def fetch(name: str, directory: Path, say: Callable[[str], None]) -> None:
    """Fetch what a conversion needs of a repository: configuration, tokenizer and one form of the weights.

    Args:
        name: on huggingface.co, without ``hf:``.
        directory: to fetch into; where all of it is there already, the network is not asked.
        say: tells people what is fetched.

    Raises:
        CheckpointError: there is no network, no such name, no access, or nothing to convert.
    """
    if is_fetched(name, directory):
        return
    # The library's own bars, before it is imported: on a terminal, which the runner's pipe may lead to, and only there.
    if sys.stderr.isatty() or os.environ.get("SLIPWAY_TERMINAL") == "1":
        os.environ.setdefault("TQDM_POSITION", "-1")
    else:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise CheckpointError(
            f"fetching {PREFIX}{name} needs the library huggingface_hub, which is not installed here",
            "pip install huggingface_hub, or download the checkpoint and give its directory",
        ) from error
    repository, _, revision = name.partition("@")
    try:
        info = hub.HfApi().model_info(repository, revision=revision or None, files_metadata=True)
        files = _wanted([each.rfilename for each in info.siblings], name)
        say(f"fetching {len(files)} files of {name}, commit {info.sha}, into {directory}")
        hub.snapshot_download(repository, revision=info.sha, local_dir=directory, allow_patterns=files)
        _check_digests(directory, {each.rfilename: each.lfs.sha256 for each in info.siblings if each.lfs})
    except CheckpointError:
        raise
    except Exception as error:  # the library raises its own errors, those of two HTTP libraries, and OSError
        raise CheckpointError(
            f"{PREFIX}{name} cannot be fetched: {_first_line(error)}",
            "check name, network, HF_TOKEN and HF_ENDPOINT where the job runs; or download the checkpoint and give its "
            "directory",
        ) from error
    sync_tree(directory)  # nothing in a file of weights would tell that a loss of power took a part
    write_atomically(directory / _FETCHED, json.dumps({"name": name, "commit": info.sha, "files": files}))


def _check_digests(directory: Path, digests: Mapping[str, str]) -> None:
    """Compare what was fetched with the digests that the hub gives: the library compares sizes, weights have none."""
    damaged = [
        name
        for name, digest in digests.items()
        if (directory / name).is_file() and file_digest(directory / name, SHA256) != f"{SHA256}:{digest}"
    ]
    if damaged:
        raise CheckpointError(
            f"{directory}: {', '.join(damaged)} is not what the hub has", "remove it; the next run fetches it again"
        )


def _wanted(given: Sequence[str], name: str) -> list[str]:
    for patterns in _WEIGHTS:
        weights = _matching(given, patterns)
        if patterns[0] in weights:
            return _matching(given, _SMALL_FILES) + weights
    raise CheckpointError(
        f"{PREFIX}{name} has neither safetensors nor pytorch_model.bin", f"it has {', '.join(sorted(given)[:9])}"
    )


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
