"""Write a LoRA adapter of NeMo or Megatron-Bridge as a directory of PEFT."""

from __future__ import annotations

import sys

from export_scripts.arguments import PEFT, ConvertArguments
from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.formats import find_archive
from export_scripts.conversion.job import check_apart, check_signed, given_files, origin
from export_scripts.targets.huggingface.convert import wish_of, write_directory
from export_scripts.targets.huggingface.plan import HuggingFacePlan
from export_scripts.targets.peft.plan import adapter_in, plan_peft
from handover.errors import CheckpointError
from handover.manifest import Manifest
from handover.signatures.sealing import Seal

_OF_THE_MODEL = ("checkpoint_sha256", "start_id", "end_id")


def convert_to_peft(arguments: ConvertArguments, seal: Seal, may_be_peft: bool = False) -> Manifest:
    """Write the adapter's directory and its manifest last; of the model, nothing but its configuration is read.

    Args:
        arguments: of the conversion.
        seal: signs it.
        may_be_peft: see ``plan_peft``.

    Raises:
        CheckpointError: the adapter cannot be written; see ``plan_peft``.
        ArtefactError: the disk is full or the output directory holds foreign files.
    """
    archive, plan = _plan(arguments, may_be_peft)
    adapter = adapter_in(archive, may_be_peft)
    for each in (archive, adapter):
        check_apart(each, arguments.output)
    check_signed(seal, adapter, arguments)
    made_from = {
        **origin(adapter, plan.source.source_map.name, arguments),
        "model": str(archive.path),
        "format": PEFT,
        "base_model": arguments.base_model,
    }
    del made_from["tensor_para_size"]
    sys.stderr.write(f"convert: note: an adapter for transformers' {plan.architecture}\n")
    return write_directory(PEFT, plan, adapter, made_from, arguments, seal, lambda unpacked: plan)


def inspect_peft(arguments: ConvertArguments) -> HuggingFacePlan:
    """Check that an adapter can be written, as the conversion will; nothing is written.

    Raises:
        CheckpointError: it cannot; see ``plan_peft``.
    """
    return _plan(arguments)[1]


def _plan(arguments: ConvertArguments, may_be_peft: bool = False) -> tuple[Archive, HuggingFacePlan]:
    given = [name for name in _OF_THE_MODEL if getattr(arguments, name) is not None]
    if given:
        raise CheckpointError(
            f"export.model.{given[0]} is of the model, and only its adapter is written", "leave it out"
        )
    wish = wish_of(arguments)
    archive = find_archive(arguments.checkpoint, given_files(arguments))
    return archive, plan_peft(archive, wish, arguments.base_model, may_be_peft)
