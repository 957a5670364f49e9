"""The tokens that start and end a text, from the files of a model's directory."""

from __future__ import annotations

import json
from pathlib import Path

from ft_format.config_ini import FILE_NAME as CONFIG_INI
from ft_format.config_ini import ConfigIni
from ft_format.values import INDEX
from handover.errors import ArtefactError

_HUGGING_FACE = "config.json"


def read_special_ids(directory: Path) -> tuple[int | None, int | None]:
    """Return the ids of the start and the end token; None where the files do not say them.

    Args:
        directory: of an FT checkpoint (``config.ini``), or of Hugging Face's files (``config.json``).

    Raises:
        ArtefactError: config.ini or config.json cannot be read.
    """
    if (directory / CONFIG_INI).is_file():
        ini = ConfigIni.read(directory, ArtefactError)
        return first_id(ini, "start_id", "decoder_start_token_id"), first_id(ini, "end_id", "eos_token_id")
    file = directory / _HUGGING_FACE
    if not file.is_file():
        return None, None
    try:
        config = dict(json.loads(file.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ArtefactError(f"{file} is not a configuration of Hugging Face's: {error}") from error
    return _one(config.get("bos_token_id")), _one(config.get("eos_token_id"))


def first_id(ini: ConfigIni, *keys: str) -> int | None:
    """Return the token id under the first of the keys that exists in any section; None without one."""
    found = ((key, section) for key in keys if (section := ini.with_key(key)))
    return next((section.get(key, INDEX) for key, section in found), None)


def _one(value: object) -> int | None:
    """Return the id; the first one of several end tokens."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) and not isinstance(first, bool) else None
