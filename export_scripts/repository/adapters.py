"""The LoRA adapters that a repository serves beside its model, each as PEFT saves it, whatever form it came in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from export_scripts.arguments import PEFT, ConvertArguments, ExportArguments
from handover.durable import temporary_beside
from handover.errors import ArtefactError, ConfigError
from handover.signatures.sealing import Seal
from models import peft
from models.described import read_directory


@contextmanager
def written_adapters(arguments: ExportArguments) -> Iterator[dict[str, Path]]:
    """Write the adapters as PEFT's directories, which are there as long as the context; by name.

    Raises:
        ConfigError: the model is no Hugging Face directory, or a name is none or comes twice.
        CheckpointError: an adapter is damaged, does not fit the model, or cannot be said as PEFT's.
        ArtefactError: it is one that the drop-in engine does not serve, or is not signed as it must be.
    """
    adapters = arguments.adapters or ()
    check_names(adapters)
    folder = temporary_beside(arguments.output)
    try:
        yield {name: _written(arguments, name, Path(path), folder / name) for name, path in adapters}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_names(adapters: Sequence[Sequence[str]]) -> None:
    """Raise a ConfigError if the name of an adapter is none, or comes twice."""
    names = [name for name, _ in adapters]
    for name in names:
        peft.check_name(name, ConfigError)
        if names.count(name) > 1:
            raise ConfigError(f"export.adapters names {name} twice", "give each adapter a name of its own")


def _written(arguments: ExportArguments, name: str, path: Path, folder: Path) -> Path:
    from export_scripts.targets.peft.convert import convert_to_peft  # what reads every kind of checkpoint

    root = arguments.ft_checkpoint
    decoder = read_directory(root, ArtefactError).decoder
    if not path.exists():
        raise ArtefactError(f"the adapter {name}: {path} does not exist", "export.adapters names what is there")
    if (path / peft.CONFIG_FILE).exists():
        peft.check_sums_alone(path, ArtefactError)
    convert = ConvertArguments(
        checkpoint=root,
        output=folder,
        adapter=path,
        format=PEFT,
        weight_data_type="fp32",
        signing_trusted=arguments.signing_trusted,
        signing_require=arguments.signing_require,
    )
    convert_to_peft(convert, Seal(convert), may_be_peft=True)
    peft.read_adapter(folder, decoder, ArtefactError)
    return folder
