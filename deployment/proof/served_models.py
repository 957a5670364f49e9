"""What a model repository says it serves: the engine's models and where their weights lie."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc import model_config_pb2

from export_scripts.repository.pbtxt import parse
from ft_format.config_ini import FILE_NAME
from ft_format.families import SECTIONS, find_family
from ft_format.families.family import read_tasks
from ft_format.location import checkpoint_places, first_checkpoint
from ft_format.served_config import read_served_config
from ft_format.weight_format import KEY
from handover.endpoint import WEIGHTS_DIGEST
from handover.errors import ArtefactError

ENGINE_BACKEND = "fastertransformer"
_TOKENIZER = "tokenizer_path"  # a parameter of preprocessing in FasterTransformer backend's stores
PUBLISHED_PARAMETERS = ("tensor_para_size", "pipeline_para_size", "data_type", KEY, WEIGHTS_DIGEST)
"""Parameters of an engine's model that clients and results are told."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.+-]+")


@dataclass(frozen=True)
class ServedModel:
    """One model of the repository that loads FasterTransformer shards, or a Hugging Face directory.

    Attributes:
        name: in Triton.
        directory: of the model; a relative checkpoint path starts here.
        checkpoint: directory of the shards and config.ini, or of Hugging Face's.
        parameters: of its ``config.pbtxt``.
        max_batch_size: of its ``config.pbtxt``.
        config: the family's section of config.ini (T5's decoder), keys in lower case; see ``read_served_config``.
        tasks: prompt-learning tasks of config.ini: name to number of virtual tokens.
        family: gpt, gptj, gptneox or t5.
    """

    name: str
    directory: Path
    checkpoint: Path
    parameters: Mapping[str, str]
    max_batch_size: int
    config: Mapping[str, str]
    tasks: Mapping[str, int]
    family: str = "gpt"

    @property
    def tensor_para_size(self) -> int:
        """Number of shards of each split tensor."""
        return int(self.parameters["tensor_para_size"])

    @property
    def pipeline_para_size(self) -> int:
        """Number of stages that the layers are cut into."""
        text = self.parameters.get("pipeline_para_size", "1")
        return int(text) if text.isdigit() else 1


def find_served_models(repository: Path, follows_moves: bool = True) -> list[ServedModel]:
    """Read every model of the repository whose backend is ``fastertransformer``.

    Args:
        repository: Triton model repository.
        follows_moves: our engine's way to find the shards; False: FasterTransformer's own backend, which
            opens ``model_checkpoint_path`` as it is, from the working directory (the model's directory).

    Raises:
        ArtefactError: there is none, or a configuration cannot be read, or a model that has a Python stub
            has a name that the stub's ``bash -c`` would not read as one word (ensembles have no stub).
    """
    models: list[ServedModel] = []
    tokenizers: dict[Path, str] = {}
    for path in sorted(repository.glob("*/config.pbtxt")):
        config = parse(path.read_text(encoding="utf-8", errors="replace"), str(path))
        if config.backend and not _PLAIN_NAME.fullmatch(path.parent.name):
            raise ArtefactError(
                f"the model directory '{path.parent}' has a name that Triton would pass to a shell",
                "rename it: letters, digits, '_', '-', '.' and '+' are safe",
            )
        if config.backend == ENGINE_BACKEND:
            models.append(_read_model(path.parent, config, follows_moves))
        elif _TOKENIZER in config.parameters:
            tokenizers[path] = config.parameters[_TOKENIZER].string_value
    if not models:
        raise ArtefactError(
            f"{repository} has no model with backend '{ENGINE_BACKEND}'", "give the model repository that export made"
        )
    for path, text in tokenizers.items():
        _check_tokenizer(path, text, models[0].directory)
    return models


def _check_tokenizer(config: Path, text: str, working_directory: Path) -> None:
    """Refuse a relative tokenizer_path that leads nowhere: published stores mean it from where they were first served.

    Raises:
        ArtefactError: the server would not find it; the message says where it lies, if it lies in the repository.
    """
    if Path(text).is_absolute() or (working_directory / text).exists():
        return
    found = sorted(config.parent.rglob(Path(text).name))
    raise ArtefactError(
        f"{config}: {_TOKENIZER} = '{text}' is not below the server's working directory, {working_directory}",
        f"write an absolute path{f', such as {found[0].absolute()}' if found else ''}",
    )


def _read_model(directory: Path, message: model_config_pb2.ModelConfig, follows_moves: bool) -> ServedModel:
    parameters = {key: value.string_value for key, value in message.parameters.items()}
    if not parameters.get("tensor_para_size", "").isdigit():
        raise ArtefactError(f"{directory}/config.pbtxt has no parameter tensor_para_size that is a number")
    candidates = _candidates(directory, parameters, message.default_model_filename, follows_moves)
    checkpoint = first_checkpoint(candidates) or candidates[-1]
    family, config, tasks = read_config(checkpoint)
    return ServedModel(
        directory.name, directory, checkpoint, parameters, int(message.max_batch_size), config, tasks, family
    )


def _candidates(
    directory: Path, parameters: Mapping[str, str], default_name: str, follows_moves: bool
) -> tuple[Path, ...]:
    """List the directories in which the engine looks for a checkpoint; the first that has one is taken."""
    versions = [int(path.name) for path in directory.iterdir() if path.name.isdigit()]
    if not versions:
        raise ArtefactError(f"{directory} has no version directory")
    version, path = directory / str(max(versions)), parameters.get("model_checkpoint_path", "")
    if not follows_moves and (path or default_name):
        return (directory / path if path else version / default_name,)
    return checkpoint_places(path, version, parameters["tensor_para_size"])


def read_config(checkpoint: Path) -> tuple[str, dict[str, str], dict[str, int]]:
    """Read what a checkpoint says of itself.

    Returns:
        The family; its section; prompt-learning tasks by name with their number of virtual tokens.

    Raises:
        ArtefactError: the file is missing, no INI file, or does not describe a model of FasterTransformer.
    """
    ini = read_served_config(checkpoint, ArtefactError)
    family = find_family(ini)
    if family is None:
        raise ArtefactError(
            f"{checkpoint / FILE_NAME} describes no model of FasterTransformer: it has none of the sections"
            f" {', '.join(SECTIONS)}",
            "export again",
        )
    return family.name, dict(family.section(ini).texts), read_tasks(ini, family)
