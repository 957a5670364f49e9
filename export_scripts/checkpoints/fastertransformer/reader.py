"""Reader of FT checkpoints: a ``<T>-gpu`` directory of shards with ``config.ini``, to be cut for other ranks.

Whoever wrote it: its files carry no shape, so that each must have exactly the size that ``config.ini`` gives it. Where
a manifest lies beside them, each must have its digest too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from export_scripts.checkpoints.fastertransformer.config import FtConfig
from export_scripts.checkpoints.fastertransformer.table import table_of
from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles
from export_scripts.tensors.dtypes import STORAGE, Array, item_bytes
from export_scripts.tensors.mapped import map_record
from ft_format.config_ini import FILE_NAME as CONFIG_INI
from ft_format.families.family import Family
from ft_format.layout import Dims, TensorSpec
from handover.digests import file_digest
from handover.errors import ArtefactError, CheckpointError
from handover.manifest import FILE_NAME as MANIFEST
from handover.manifest import Manifest, artefact_files
from handover.templates import TEMPLATES_FILE
from handover.text_ids import TEXT_IDS_FILE, TextIds
from models.directory import SpecialIds

NAME = "FT checkpoint (a <T>-gpu directory with config.ini)"
_FILE = re.compile(r"(?P<name>.+?)(?:\.(?P<rank>\d+))?\.bin")
_UNTRANSPOSED = "self_attn.o_proj"
_TOKENIZER = ("vocab.json", "merges.txt", "tokenizer.model", "tokenizer.json", "vocab.txt")


def is_candidate(path: Path) -> bool:
    """Whether a directory looks like an FT checkpoint, by names alone."""
    return (path / CONFIG_INI).is_file() and next(path.glob("*.bin"), None) is not None


def recognises(archive: Archive) -> bool:
    """Whether there are shards with a ``config.ini``."""
    return CONFIG_INI in archive and any(_FILE.fullmatch(name) and "/" not in name for name in archive.sizes)


def open_source(archive: Archive) -> Source:
    """Open an FT checkpoint.

    Raises:
        CheckpointError: a file is missing, left over, or of another size than ``config.ini`` says.
        ArtefactError: a file is not what the manifest beside it says.
    """
    manifest = read_manifest(archive)
    if manifest:
        check_manifest(archive, manifest, are_weights_read=False)
    config, files = FtConfig(archive), _files(archive)
    _refuse_untransposed(archive, files)
    archive.refuse_pointers(name for names in files.values() for name in names)
    of_files = config.dims(lambda name: name in files, _position_num(archive, config))
    dims, kv_ranks = config.without_copies(of_files)
    prompts = config.prompt_targets()
    schema, tensors = {**config.family.schema(dims), **prompts}, {**config.family.tensors(dims), **prompts}
    ranks = max((len(names) for names in files.values()), default=1)
    source_map = table_of(schema, tensors, ranks, kv_ranks=kv_ranks)
    found = {name: names for name, names in files.items() if not source_map.is_ignored(name)}
    _check_files(archive, config, found, schema, of_files, ranks)
    digests = {record.path: record.digest for record in manifest.files} if manifest else {}
    start_id, end_id = config.ids()
    text_ids = _text_ids(archive)
    return Source(
        archive=archive,
        family=replace(
            config.family,
            schema=lambda _: schema,
            own=lambda _: tensors,
            config=config.resharded,
            divided=_divided(config.family, dims),
        ),
        source_map=source_map,
        dims=dims,
        tensors={
            name: Shards(archive, names, schema[name].shard_shape(of_files, ranks), config.data_type, axis, digests)
            for name, names in found.items()
            for axis in (schema[name].split_axis if len(names) > 1 else None,)
        },
        tokenizer=TokenizerFiles({name: name for name in _TOKENIZER if name in archive}, "as it is", text_ids=text_ids),
        ids=SpecialIds(start_id, end_id, more_end_ids=text_ids.more_end_ids),
        activation=config.exact_function(),
        extra_files={name: archive.read_bytes(name) for name in (TEMPLATES_FILE,) if name in archive},
    )


def _refuse_untransposed(archive: Archive, files: Iterable[str]) -> None:
    """Refuse the shards of a converter of Llama that cannot give right numbers, told by a name of its own."""
    if any(_UNTRANSPOSED in name for name in files):
        raise CheckpointError(
            f"{archive.path} has files of {_UNTRANSPOSED}: they were written by cameronfr's converter of Llama, which "
            "leaves matrices untransposed and cuts every head across the ranks, so that no engine computes the model",
            "convert the original checkpoint",
        )


def _text_ids(archive: Archive) -> TextIds:
    """What stands around a text's own tokens.

    Raises:
        CheckpointError: the file is damaged.
    """
    if TEXT_IDS_FILE not in archive:
        return TextIds()
    try:
        return TextIds.parse(archive.read_bytes(TEXT_IDS_FILE), f"{archive.path}: {TEXT_IDS_FILE}")
    except ArtefactError as error:
        raise CheckpointError(error.problem, error.hint) from error


def _divided(family: Family, dims: Dims) -> tuple[str, ...]:
    has_adapters = getattr(dims, "adapter_inter_size", 0)
    return (*family.divided, *(("adapter_inter_size",) if has_adapters else ()))


@dataclass(frozen=True)
class Shards:
    """A tensor in the files of one or several ranks.

    Attributes:
        archive: the directory.
        names: of the files, in the order of ranks.
        data_type: fp32, fp16 or bf16.
        axis: along which they follow one another; None: there is one.
        digests: of files, by name, as a manifest has them.
    """

    archive: Archive
    names: tuple[str, ...]
    part_shape: tuple[int, ...]
    data_type: str
    axis: int | None
    digests: Mapping[str, str]
    _verified: set[str] = field(default_factory=set, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(n * len(self.names) if i == self.axis else n for i, n in enumerate(self.part_shape))

    @property
    def unproved(self) -> tuple[str, ...]:
        """Files of which no manifest has a digest."""
        return tuple(name for name in self.names if name not in self.digests)

    def parts(self) -> tuple[Array, ...]:
        """Map the files, read-only; bf16 comes as uint16.

        Raises:
            CheckpointError: a file is not the one that the manifest names.
        """
        return tuple(self._part(name) for name in self.names)

    def _part(self, name: str) -> Array:
        extent = self.archive.extent(name)
        if name in self.digests and name not in self._verified:
            if file_digest(extent.path, self.digests[name]) != self.digests[name]:
                raise CheckpointError(f"{extent.path} is damaged: it is not what the manifest beside it says")
            self._verified.add(name)
        record = map_record(extent.path, extent.offset, extent.size_bytes)
        return record.view(STORAGE[self.data_type]).reshape(self.part_shape)


def _files(archive: Archive) -> dict[str, tuple[str, ...]]:
    """Group the shards' files by the tensor's name, in the order of ranks; gaps show as a wrong last rank."""
    ranks: dict[str, dict[int, str]] = {}
    for file in sorted(archive.sizes):
        if "/" not in file and (parts := _FILE.fullmatch(file)):
            ranks.setdefault(parts["name"], {})[int(parts["rank"] or 0)] = file
    return {name: tuple(files[rank] for rank in sorted(files)) for name, files in ranks.items()}


def _position_num(archive: Archive, config: FtConfig) -> int:
    """Rows of the position table by the size of its file: not every dialect says them."""
    keys = config.sections.get("gpt", {})
    try:
        width = int(keys["head_num"]) * int(keys["size_per_head"])
        return archive.sizes["model.wpe.bin"] // (width * item_bytes(config.data_type))
    except (KeyError, ValueError, ZeroDivisionError):
        return 0


def _check_files(
    archive: Archive,
    config: FtConfig,
    found: Mapping[str, tuple[str, ...]],
    schema: Mapping[str, TensorSpec],
    dims: Dims,
    ranks: int,
) -> None:
    """Refuse a directory in which a file is missing, left over or of a wrong size."""
    unit = item_bytes(config.data_type)
    said = config.sections[config.family.main].get("tensor_para_size", str(ranks))
    problems = [] if said == str(ranks) else [f"{CONFIG_INI} says tensor_para_size {said}; there are files of {ranks}"]
    problems += [
        f"{file}  belongs to no tensor of this model" for name in found.keys() - schema for file in found[name]
    ]
    for name, target in schema.items():
        expected = prod(target.shard_shape(dims, ranks)) * unit
        is_split = target.split_axis is not None
        for file in [f"{name}.{rank}.bin" for rank in range(ranks)] if is_split else [f"{name}.bin"]:
            size = archive.sizes.get(file)
            if size is None:
                problems.append(f"{file}  is missing")
            elif size != expected:
                problems.append(f"{file}  has {size} bytes, not {expected}: {config.data_type}, {ranks} ranks")
        problems += [f"{file}  is not a rank's" for file in found.get(name, ())[ranks if is_split else 1 :]]
    if problems:
        raise CheckpointError(
            f"{archive.path}: {len(problems)} files are not what {CONFIG_INI} says\n  " + "\n  ".join(problems),
            "FasterTransformer would only warn and compute with random weights",
        )


def read_manifest(archive: Archive) -> Manifest | None:
    """Read the manifest that Slipway's own conversion wrote; None: there is none."""
    return Manifest.read(archive.path) if MANIFEST in archive and archive.path.is_dir() else None


def check_manifest(archive: Archive, manifest: Manifest, are_weights_read: bool) -> None:
    """Compare a directory with its manifest.

    Args:
        archive: the directory.
        manifest: that lies in it.
        are_weights_read: whether the shards' digests are compared too; else they are when the shards are read.

    Raises:
        ArtefactError: naming every file that is missing, altered or left over.
        CheckpointError: a file is a git-lfs pointer.
    """
    archive.refuse_pointers(record.path for record in manifest.files if record.path in archive)
    small = replace(manifest, files=tuple(each for each in manifest.files if not each.path.endswith(".bin")))
    problems = manifest.problems(archive.path, check_digests=are_weights_read)
    if not are_weights_read:
        problems = sorted({*problems, *small.problems(archive.path)})
    surplus = set(artefact_files(archive.path)) - {record.path for record in manifest.files}
    problems += [f"{name}  is not in the manifest" for name in sorted(surplus)]
    if problems:
        raise ArtefactError(
            f"{archive.path}: {len(problems)} files are not those of its manifest\n  " + "\n  ".join(problems),
            "convert the checkpoint again; without its manifest the directory is taken as it is, and nothing proves it",
        )
