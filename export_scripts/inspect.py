"""Print what a checkpoint holds, or verify an FT checkpoint.

    python3 -m export_scripts.inspect gpt.nemo
    python3 -m export_scripts.inspect results/gpt3_demo/export/1-gpu
    python3 -m export_scripts.inspect --trusted=keys.pem --require results/gpt3_demo/export/model_repo

Of a checkpoint: its format, FasterTransformer's family for it, dimensions, tokenizer, and every key with its shape,
data type and what it becomes; layers are counted, not repeated. Of an FT checkpoint also: that ``config.ini`` fits the
files, that every file has the size and digest of the manifest, and, without a manifest, that every value is finite.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import models
from export_scripts.checkpoints.digests import UNPROVED, check_published, sha256_of, unproved
from export_scripts.checkpoints.fastertransformer.reader import check_manifest, read_manifest
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.huggingface.quantized import stored_bytes, stored_type
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.user_files import GivenFiles
from export_scripts.conversion.plan.check import check_types
from export_scripts.conversion.plan.ranks import possible_ranks
from export_scripts.conversion.plan.special_ids import with_settled_ids
from export_scripts.conversion.write.shards import ShardSettings, Workspace, check_values
from export_scripts.tensors.dtypes import STORAGE
from export_scripts.weights.matching import match, zeros_made
from export_scripts.weights.schema import LazyTensor, split_layer
from ft_format.config_ini import FILE_NAME as CONFIG_INI
from ft_format.layout import Dims
from handover.errors import ArtefactError, exit_status
from handover.manifest import FILE_NAME as MANIFEST
from handover.manifest import Manifest
from handover.progress import human_bytes
from handover.signatures.arguments import TrustArguments
from handover.signatures.hashed import FileDigests
from handover.signatures.trust import verify as verify_signature

_CHECKPOINTS = ("ft_checkpoint", "huggingface", "peft")
"""Kinds of directories that are read as checkpoints; of other artefacts the files are compared."""


def describe(source: Source) -> Iterator[str]:
    """Yield the lines that describe a checkpoint."""
    archive, dims = source.archive, source.dims
    sizes = archive.sizes
    yield f"{archive.path}  {human_bytes(sum(sizes.values()))} in {len(sizes)} files"
    yield f"  format      {source.source_map.name}"
    yield f"  family      {source.family.name}"
    yield "  dimensions  " + "  ".join(f"{name} {value}" for name, value in _named(dims).items())
    ranks = possible_ranks(source.dims, source.family.divided)
    yield f"  ranks       tensor_para_size can be {', '.join(map(str, ranks))}"
    for data_type, (count, numbers, size_bytes) in sorted(_totals(source.tensors.values()).items()):
        size = human_bytes(size_bytes)
        yield f"  weights     {count} tensors of {data_type}, {numbers:,} numbers, {size}"
    files = ", ".join(source.tokenizer.members) or "none"
    yield f"  tokenizer   {files}  start_id {source.ids.start_id}  end_id {source.ids.end_id}"
    for remark in source.remarks:
        yield f"  note        {remark}"
    yield "  keys"
    yield from _keys(source)


def _named(dims: Dims) -> Mapping[str, Any]:
    """Return what a model is in the words of its family; a decoder in those of its ``config.json``."""
    if not isinstance(dims, models.Decoder):
        return vars(dims)
    for architecture in models.ARCHITECTURES:
        if not architecture.lacks(dims):
            return {"model_type": architecture.model_type, **architecture.write(dims)}
    return dims.fields()


def _totals(tensors: Iterable[LazyTensor]) -> Mapping[str, tuple[int, int, int]]:
    """Tensors, numbers and bytes of each data type; an unknown one counts no bytes."""
    totals: dict[str, tuple[int, int, int]] = {}
    for tensor in tensors:
        count, numbers, size_bytes = totals.get(kind := stored_type(tensor), (0, 0, 0))
        stored = stored_bytes(tensor) if tensor.data_type in STORAGE else 0
        totals[kind] = (count + 1, numbers + prod(tensor.shape), size_bytes + stored)
    return totals


def _keys(source: Source) -> Iterator[str]:
    """One line for each kind of key: how often, shape, data type and what it becomes."""
    kinds: dict[tuple[str, tuple[int, ...], str, str], int] = {}
    for key, tensor in source.tensors.items():
        becomes = " ".join(split_layer(name)[0] for name in source.source_map.targets(key))
        if source.source_map.is_ignored(key):
            becomes = "(ignored)"
        kind = (split_layer(key)[0], tensor.shape, stored_type(tensor), becomes or "(no rule)")
        kinds[kind] = kinds.get(kind, 0) + 1
    width = max((len(kind[0]) for kind in kinds), default=0)
    for (pattern, shape, data_type, becomes), count in kinds.items():
        yield f"    {pattern:<{width}}  x{count:<3} {data_type:<5} {list(shape)!s:<16} {becomes}"
    if source.other_keys:
        patterns = sorted({split_layer(key)[0] for key in source.other_keys})
        yield f"    {len(source.other_keys)} keys without a tensor: {', '.join(patterns)}"


def verify(source: Source) -> Iterator[str]:
    """Verify an FT checkpoint, whose reader has compared ``config.ini`` with the files' names and sizes.

    Raises:
        CheckpointError: a value is NaN or infinite, where no manifest says that it was so before.
    """
    root = source.archive.path
    if (root / MANIFEST).is_file():
        manifest = Manifest.read(root)
        made_from = manifest.made_from
        yield f"  made from   {made_from.get('checkpoint', 'unknown')} ({made_from.get('source_format', 'unknown')})"
        yield f"  manifest    {manifest.digest}"
        size = human_bytes(manifest.size_bytes)
        yield f"  verified    {len(manifest.files)} files, {size}: sizes, digests, {CONFIG_INI}"
        return
    targets = match(source.schema(), source.source_map, source.dims, source.tensors, source.other_keys)
    for assignment in targets:
        sources = [source.tensors[key] for key in assignment.keys]
        settings = ShardSettings(1, sources[0].data_type if sources else "fp32", source.dims)
        check_values(assignment, sources, settings, Workspace(set()))
    yield f"  verified    {len(source.tensors)} tensors: shapes of {CONFIG_INI}, every value finite; no manifest"


def artefact(path: Path) -> Iterator[str]:
    """Yield the lines that describe what a stage has written and no conversion reads, such as a repository.

    Raises:
        ArtefactError: a file is missing or other than it was.
    """
    manifest = Manifest.read(path) if (path / MANIFEST).is_file() else None
    if manifest is None or manifest.kind in _CHECKPOINTS:
        return
    if problems := manifest.problems(path):
        raise ArtefactError(f"{path} is not as its manifest records it\n  " + "\n  ".join(problems), "make it again")
    yield f"{path}  {manifest.kind}, {human_bytes(manifest.size_bytes)}"
    yield f"  verified    {len(manifest.files)} files: sizes, digests; {manifest.digest}"


def main(argv: Sequence[str]) -> None:
    """Describe the checkpoint that a path means; raise where it cannot be converted, is damaged, or not signed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a directory that holds exactly one")
    parser.add_argument("--sha256", action="store_true", help="read all of it, and print what checkpoint_sha256 pins")
    parser.add_argument("--adapter", type=Path, help="LoRA adapter that is merged: a .nemo, or a directory of PEFT")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer in the place of the checkpoint's own")
    parser.add_argument("--trusted", type=Path, help="PEM file of public keys and certificates: verify the signature")
    parser.add_argument("--require", action="store_true", help="refuse what has no signature")
    arguments = parser.parse_args(list(argv))
    trust = TrustArguments(signing_trusted=arguments.trusted, signing_require=arguments.require or None)
    if signed := verify_signature(arguments.checkpoint, trust, FileDigests()):
        sys.stdout.write(f"  signature   {signed}\n")
    if lines := list(artefact(arguments.checkpoint)):
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return
    describe_checkpoint(arguments)


def describe_checkpoint(arguments: argparse.Namespace) -> None:
    """Describe a checkpoint, and verify what it says of itself; raise where it cannot be converted or is damaged."""
    archive = find_archive(arguments.checkpoint, GivenFiles(arguments.adapter, arguments.tokenizer))
    if CONFIG_INI in archive and (manifest := read_manifest(archive)):  # all that differs, before its reader stops
        check_manifest(archive, manifest, are_weights_read=True)
    source = with_settled_ids(open_source(archive))
    for line in describe(source):
        sys.stdout.write(f"{line}\n")
    assignments = match(source.schema(), source.source_map, source.dims, source.tensors, source.other_keys)
    check_types(source, assignments)
    for remark in zeros_made(assignments):
        sys.stdout.write(f"  note        {remark}\n")
    tensors = [source.tensors[key] for assignment in assignments for key in assignment.keys]
    if unproved(source.archive, tensors, published := check_published(source.archive, len(os.sched_getaffinity(0)))):
        sys.stdout.write(f"  note        {UNPROVED}\n")
    elif published:
        sys.stdout.write(f"  published   {len(published)} files are what the digests beside them say\n")
    if arguments.sha256:
        sys.stdout.write(f"  sha256      {sha256_of(source.archive, len(os.sched_getaffinity(0)))}\n")
    if CONFIG_INI in source.archive and source.archive.path.is_dir():
        for line in verify(source):
            sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "inspect"))
