"""Where the checkpoint of a served model lies: the engine and the proof before serving follow the same rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ft_format.config_ini import FILE_NAME
from models.directory import CONFIG_FILE

HUGGINGFACE = "huggingface"
"""Name of the Hugging Face directory below ``<repository>/<model>/<version>``."""
DRAFT = "draft"
"""Name of a draft model's or an EAGLE-3 head's directory below that of the model, and of the former's way."""
MTP = "mtp"
"""Name of speculation by the model's own predictor of further tokens, which vLLM calls so."""
EAGLE3 = "eagle3"
"""Name of speculation by an EAGLE-3 head, likewise."""


def checkpoint_places(path: str, version: Path, tensor_para_size: int | str) -> tuple[Path, ...]:
    """List the directories in which the drop-in engine looks for a model; the first that has one is taken.

    A relative model_checkpoint_path is looked for below ``<repository>/<model>/<version>``, then below
    ``<repository>/<model>``; an empty one means ``<T>-gpu``. An absolute one that is gone, because the repository was
    moved, falls back to ``<repository>/<model>/<version>/<T>-gpu``.

    Args:
        path: model_checkpoint_path of config.pbtxt; may be empty.
        version: directory ``<repository>/<model>/<version>``.
        tensor_para_size: of config.pbtxt.
    """
    usual = version / f"{tensor_para_size}-gpu"
    if not path:
        return (usual,)
    return (Path(path), usual) if Path(path).is_absolute() else (version / path, version.parent / path)


def is_hub_directory(directory: Path) -> bool:
    """Whether a directory is one of Hugging Face's and has no shards."""
    return (directory / CONFIG_FILE).is_file() and not (directory / FILE_NAME).is_file()


def first_checkpoint(places: Sequence[Path]) -> Path | None:
    """Return the first of the directories that has a config.ini or a config.json; None: none has."""
    return next((place for place in places if any((place / name).is_file() for name in (FILE_NAME, CONFIG_FILE))), None)
