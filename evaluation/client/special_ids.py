"""The tokens that start and end a text, from the files of a model's directory."""

from __future__ import annotations

from pathlib import Path

from ft_format.config_ini import FILE_NAME as CONFIG_INI
from ft_format.config_ini import ConfigIni
from ft_format.values import INDEX
from handover.errors import ArtefactError
from models.directory import CONFIG_FILE, GENERATION_FILE, NOT_NAMED, read_json, special_ids


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
    config, generation = (read_json(directory / name, ArtefactError) for name in (CONFIG_FILE, GENERATION_FILE))
    ids = special_ids(config, generation, ArtefactError)
    start, end = (None if each == NOT_NAMED else each for each in (ids.start_id, ids.end_id))
    return start, end


def first_id(ini: ConfigIni, *keys: str) -> int | None:
    """Return the token id under the first of the keys that exists in any section; None without one."""
    found = ((key, section) for key in keys if (section := ini.with_key(key)))
    return next((section.get(key, INDEX) for key, section in found), None)
