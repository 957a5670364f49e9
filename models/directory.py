"""A directory of Hugging Face's: ``config.json``, safetensors in one file or several with an index, the special ids.

Names: transformers, ``utils/__init__.py`` (``SAFE_WEIGHTS_NAME``, ``WEIGHTS_INDEX_NAME``, ...).
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from models.checks import Refusal
from models.safetensors import StoredTensor, parse_json, read_header

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
WEIGHTS_FILE, INDEX_SUFFIX = "model.safetensors", ".index.json"
NOT_NAMED = -1
"""In the place of an id that nothing in a checkpoint names."""
LARGEST_ID = 2**31 - 1
"""Largest id that is read: FasterTransformer's ids are C's int."""
_DESCRIPTION_BYTES = 40 << 20
_MOST_LISTED = 20


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to read it; a pipe without a writer, which would hang its reader, is refused, and so is a device.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(kind := os.fstat(number).st_mode):
        return os.fdopen(number, "rb")
    os.close(number)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a device, pipe or socket, not a regular file", str(path))


def read_json(path: Path, error: Refusal) -> dict[str, Any]:
    """Read a JSON object of a directory; an absent file is empty."""
    try:
        if not path.exists():
            return {}
        with open_regular(path) as stream:
            content = stream.read(_DESCRIPTION_BYTES + 1)
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}", "") from None
    if len(content) > _DESCRIPTION_BYTES:
        raise error(f"{path} has more than {_DESCRIPTION_BYTES >> 20} MiB, which none of its kind has", "")
    found = parse_json(content, str(path), error)
    if not isinstance(found, dict):
        raise error(f"{path} is not a JSON object", "")
    return found


def find_tensors(directory: Path, error: Refusal) -> dict[str, tuple[str, StoredTensor]]:
    """Find the tensors of a directory: by name their file and their place in it.

    Args:
        directory: with ``model.safetensors``, or with its index and the files that this names.
        error: makes the exception where there are none, or a file is missing, damaged or not what the index says.
    """
    if (directory / WEIGHTS_FILE).exists():
        return {name: (WEIGHTS_FILE, stored) for name, stored in _header(directory, WEIGHTS_FILE, error).items()}
    index = WEIGHTS_FILE + INDEX_SUFFIX
    if not (directory / index).exists():
        raise error(f"{directory} has neither {WEIGHTS_FILE} nor {index}", "other formats of weights are converted")
    weight_map = read_index(read_json(directory / index, error), f"{directory / index}", error)
    files = sorted(set(weight_map.values()))
    if outside := [name for name in files if name.startswith(("../", "/"))]:
        raise error(f"{directory / index} names {outside[0]}, outside of the directory", "")
    held = {file: _header(directory, file, error) for file in files}
    if problems := index_problems(weight_map, held):
        listed = "\n  ".join(problems[:_MOST_LISTED])
        raise error(f"{directory}: {index} and its files differ in {len(problems)} keys\n  {listed}", "copy it again")
    return {name: (file, stored) for file, tensors in held.items() for name, stored in tensors.items()}


def read_index(content: Mapping[str, Any], where: str, error: Refusal) -> dict[str, str]:
    """Read an index: the file of each tensor by its name; it may write ``./`` before a file."""
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise error(f"{where} has no weight_map", "")
    return {key: posixpath.normpath(name) for key, name in weight_map.items()}


def index_problems(weight_map: Mapping[str, str], held: Mapping[str, Iterable[str]]) -> list[str]:
    """List the keys in which an index differs from its files, one line each.

    Args:
        weight_map: file by key.
        held: keys by file.
    """
    given: dict[str, set[str]] = {file: set() for file in held}
    for key, file in weight_map.items():
        given[file].add(key)
    problems = []
    for file, keys in held.items():
        there = set(keys)
        problems += [f"{key}  is not in {file}" for key in sorted(given[file] - there)]
        problems += [f"{key}  is in {file} and not in the index" for key in sorted(there - given[file])]
    return problems


def _header(directory: Path, file: str, error: Refusal) -> dict[str, StoredTensor]:
    path = directory / file
    try:
        with open_regular(path) as stream:
            return read_header(stream, path.stat().st_size, str(path), error)
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}", "copy or download the checkpoint again") from None


@dataclass(frozen=True)
class SpecialIds:
    """Ids as a checkpoint names them, beyond its vocabulary too; ``settled`` makes sense of them.

    Attributes:
        start_id: of the token that begins a text; or NOT_NAMED.
        end_id: of the token that ends one; or NOT_NAMED.
        pad_id: of the token that fills a batch up; None: not known.
        more_end_ids: of other tokens that end a text as well.
    """

    start_id: int
    end_id: int
    pad_id: int | None = None
    more_end_ids: tuple[int, ...] = ()

    def settled(self, vocab_size: int, stand_in: int | None = None) -> SpecialIds:
        """Make ids by which no request fails.

        An end token that the model cannot make never comes, so it stays as it is. An empty prompt that began with a
        token without an embedding would fail, so another begins it: the first of ``stand_in``, the end token and 0
        that has one.
        """
        end = self.end_id if 0 <= self.end_id <= LARGEST_ID else vocab_size
        starts = (self.start_id, stand_in, end)
        start = next((each for each in starts if each is not None and 0 <= each < vocab_size), 0)
        others = tuple(each for each in self.more_end_ids if each != end and each < vocab_size)
        return SpecialIds(start, end, self.pad_id, others)


def special_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], error: Refusal, start_key: str = "bos_token_id"
) -> SpecialIds:
    """Read the ids as transformers' ``generate`` takes them: ``generation_config.json`` goes before ``config.json``.

    Args:
        config: ``config.json``, with the architecture's defaults.
        generation: ``generation_config.json``.
        error: makes the exception for what is no id.
        start_key: the key of what a text, or a decoder's answer, begins with; where no file names it a decoder-only
            model begins with its end token.
    """
    named = {**config, **{key: value for key, value in generation.items() if value is not None}}
    end_ids, pad_ids, start_ids = (_ids(named, key, error) for key in ("eos_token_id", "pad_token_id", start_key))
    start_ids = start_ids or (end_ids if start_key == "bos_token_id" else pad_ids)
    start_id, end_id = (next(iter(ids), NOT_NAMED) for ids in (start_ids, end_ids))
    return SpecialIds(start_id, end_id, next(iter(pad_ids), None), tuple(dict.fromkeys(end_ids[1:])))


def _ids(named: Mapping[str, Any], key: str, error: Refusal) -> tuple[int, ...]:
    """Read one id or a list of them."""
    value = named.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
        raise error(f"{key} is {str(value)[:200]!r}, not a number", f"it stands in {GENERATION_FILE} or {CONFIG_FILE}")
    return tuple(values)
