"""LAMBADA's data file: its identity and its texts. The login node imports this module: no numpy, no client."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from evaluation.arguments import LambadaArguments
from handover.errors import ConfigError
from handover.regular_file import read_bytes, read_text

ANY_FILE = "any"
FULL_FILE_SHA256 = "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"
SUBSET_SHA256 = "59d2ac8c920ce01e7952db060fd9095837c3d68e90ac3b72e3e05e3b2380ce2b"
KNOWN_FILES = {
    FULL_FILE_SHA256: "LAMBADA test set, OpenAI's preprocessing, 5153 texts",
    SUBSET_SHA256: "first 200 texts of the LAMBADA test set, OpenAI's preprocessing",
}


def check_files(arguments: LambadaArguments, converted: Path | None) -> None:
    """Read the texts, which no conversion makes."""
    check_data(arguments.data_path, arguments.data_sha256)
    read_texts(arguments.data_path, arguments.samples)


def check_data(path: Path, expected: str | None) -> str:
    """Return the hex sha256 of the data file, or refuse an unexpected file.

    Args:
        path: path of the data file.
        expected: expected digest, with or without ``sha256:``; ``any``; or None for one of KNOWN_FILES.

    Raises:
        ConfigError: the file is missing or has another digest.
    """
    try:
        digest = hashlib.sha256(read_bytes(path)).hexdigest()
    except OSError as error:
        raise ConfigError(f"the LAMBADA file {path} cannot be read: {error.strerror}") from error
    if expected is None and digest not in KNOWN_FILES:
        known = "; ".join(f"{name}: {sha256}" for sha256, name in KNOWN_FILES.items())
        raise ConfigError(
            f"{path} is no known LAMBADA file: its sha256 is {digest}",
            f"known are: {known}; give data_sha256={digest} if this is the file you mean",
        )
    if expected not in (None, ANY_FILE) and digest != str(expected).lower().removeprefix("sha256:"):
        raise ConfigError(
            f"{path} is not the expected LAMBADA file: its sha256 is {digest}, expected is {expected}",
            "mend data_path or data_sha256",
        )
    return digest


def read_texts(path: Path, samples: int | None) -> list[str]:
    """Read the ``text`` of the first lines of a JSON Lines file, as many as there are samples; None for all.

    Raises:
        ConfigError: the file is missing, damaged, or shorter than the samples asked for.
    """
    try:
        # Not splitlines: it also splits at U+2028, which a text may contain.
        lines = [line for line in read_text(path).split("\n") if line]
        texts = [str(json.loads(line)["text"]) for line in lines[:samples]]
    except OSError as error:
        raise ConfigError(f"the LAMBADA file {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not LAMBADA: each line must be an object with a 'text' ({error})") from error
    if not texts or (samples is not None and len(texts) < samples):
        raise ConfigError(f"{path} has {len(texts)} texts, but {samples or 'at least 1'} are asked for")
    return texts
