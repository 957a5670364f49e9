"""Names under which a model may be served. Standard library only: the login side checks them too."""

from __future__ import annotations

from handover.errors import ConfigError

ENGINE = "fastertransformer"
PREPROCESSING = "preprocessing"
POSTPROCESSING = "postprocessing"
ENSEMBLE = "ensemble"

_MOST_BYTES = 255
"""Longest file name of the usual file systems: a Triton model's name is its directory's name."""


def check_model_name(name: str) -> None:
    """Refuse a name that cannot be a Triton model beside the four of the repository.

    Triton takes a model's name from its directory, so spaces, quotes, semicolons and non-ASCII letters
    are fine; what is no file name is not. ``fastertransformer`` is legal: it is the engine's own name.

    Raises:
        ConfigError: the name is empty, reserved, hidden, too long, or no file name.
    """
    if name in (PREPROCESSING, POSTPROCESSING, ENSEMBLE):
        raise ConfigError(
            f"the model cannot be called '{name}': that is one of the repository's own models",
            f"any name other than {PREPROCESSING}, {POSTPROCESSING} and {ENSEMBLE} will do",
        )
    reason = _refusal(name)
    if reason:
        raise ConfigError(
            f"'{name}' cannot be a Triton model's name: {reason}",
            "it becomes the name of a directory in the model repository",
        )


def _refusal(name: str) -> str:
    if not name:
        return "it is empty"
    if "/" in name:
        return "it contains '/'"
    if name.startswith("."):
        return "it starts with a dot"
    if any(ord(character) < 32 or ord(character) == 127 for character in name):
        return "it contains a control character"
    if name != name.strip():
        return "it starts or ends with a space"
    if len(name.encode("utf-8", "surrogatepass")) > _MOST_BYTES:
        return f"it is longer than {_MOST_BYTES} bytes"
    return ""
