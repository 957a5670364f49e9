"""Work out a LoRA adapter as PEFT saves it: ``adapter_config.json`` and ``adapter_model.safetensors``.

Files and keys: PEFT, ``utils/save_and_load.py`` and ``tuners/lora/config.py``. vLLM and SGLang read the same two files;
neither of them reads a rank or an alpha of one layer, so that all layers have those of the directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.formats import open_source
from export_scripts.checkpoints.huggingface.files import ADAPTER_FILE
from export_scripts.checkpoints.lora import peft
from export_scripts.checkpoints.lora.adapter import KIND as LORA
from export_scripts.checkpoints.nemo.companions import companions_of
from export_scripts.conversion.move.assembly import Assembly, Piece
from export_scripts.conversion.plan.check import check_types
from export_scripts.conversion.write.safetensors_layout import PlannedTensor, file_of
from export_scripts.conversion.write.shards import ShardSettings
from export_scripts.targets.huggingface.plan import HuggingFacePlan, Wish, facts_of, target_of
from export_scripts.targets.peft.modules import Module, modules_of
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.matching import match
from handover.errors import CheckpointError
from models.peft import name_in_class

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def adapter_in(archive: Archive, may_be_peft: bool = False) -> Archive:
    """Find the adapter that is to be written.

    Raises:
        CheckpointError: there is none, or it is PEFT's already, and may not be.
    """
    companions = companions_of(archive, LORA)
    if not may_be_peft and (ADAPTER_FILE in archive or any(map(peft.recognises, companions.values()))):
        raise CheckpointError(f"{archive.path}: its adapter is a directory of PEFT already", "it is loaded as it is")
    if not companions:
        raise CheckpointError(
            f"{archive.path} comes with no LoRA adapter", "export.model.adapter_path names the one to write"
        )
    return next(iter(companions.values()))


def plan_peft(archive: Archive, wish: Wish, base_model: str | None, may_be_peft: bool = False) -> HuggingFacePlan:
    """Work out the directory of an adapter.

    Args:
        archive: the model's files with the adapter's, which must fit.
        wish: the data type, and whether what is not finite may be written.
        base_model: what the directory calls the model; None: nothing.
        may_be_peft: whether PEFT's own adapters are written too, as they are served.

    Raises:
        CheckpointError: the adapter does not fit, or PEFT cannot say what it does.
    """
    adapter = adapter_in(archive, may_be_peft)
    source = open_source(archive, for_shards=False)
    assignments = match(source.schema(), source.source_map, source.dims, source.tensors, source.other_keys)
    check_types(source, assignments)
    facts = facts_of(source, source, assignments)
    target = target_of(source.family, source.dims, facts)
    tensors = target.written(source.dims, facts)
    modules, problems = modules_of(source, assignments, tensors)
    if peft.recognises(adapter):
        problems += [f"{key}  takes the place of the model's" for key in peft.others_in(adapter)]
    if len({module.is_transposed for module in modules}) > 1:
        problems.append("transformers keeps some of its layers as [in, out] and others as [out, in]")
    if problems:
        raise CheckpointError(
            f"{adapter.path} cannot be said as an adapter of PEFT\n  " + "\n  ".join(problems),
            "export.adapter.format=null merges it into the model",
        )
    widest = max(modules, key=lambda module: module.rank)
    planned = [each for module in modules for each in _planned(module, widest)]
    return HuggingFacePlan(
        source,
        target.class_name,
        (file_of(WEIGHTS_FILE, planned, wish.data_type),),
        {ADAPTER_FILE: _config(widest, [module.name for module in modules], tensors, base_model)},
        tuple(dict.fromkeys(tensor for module in modules for tensor in module.update.factors)),
        ShardSettings(1, wish.data_type, source.dims, wish.allow_nonfinite),
        (f"the adapter {adapter.path.name} changes {len(modules)} linear layers; nothing of the model is written",),
    )


def _planned(module: Module, widest: Module) -> tuple[PlannedTensor, ...]:
    """Plan a layer's two matrices, of the rank and for the scale of the widest."""
    rank, scale = widest.rank, widest.update.scale
    shapes = {"A": (rank, len(module.columns)), "B": (len(module.rows), rank)}

    def plan(letter: str, shape: tuple[int, int]) -> PlannedTensor:
        def make() -> Assembly:
            values: Array = module.matrices(rank, scale)["AB".index(letter)]
            return Assembly(shape, ((Piece(values, "fp32", (0, 0)),),))

        return PlannedTensor(f"{_PREFIX}{module.name}.lora_{letter}.weight", shape, shape, make)

    return tuple(plan(letter, shape) for letter, shape in shapes.items())


def _config(widest: Module, names: Sequence[str], tensors: Mapping[str, Any], base_model: str | None) -> bytes:
    """Render ``adapter_config.json``."""
    alpha = round(widest.update.scale * widest.rank, 9)
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": widest.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": widest.is_transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": _targets(names, tensors),
    }
    return f"{json.dumps(content, indent=2)}\n".encode()


def _targets(names: Sequence[str], tensors: Mapping[str, Any]) -> list[str]:
    """Name the layers by their last word, as users do, where that means these and no others."""
    words = {name.rpartition(".")[2] for name in names}
    layers = {name_in_class(name.removesuffix(".weight")) for name in tensors if name.endswith(".weight")}
    meant = {layer for layer in layers if layer.rpartition(".")[2] in words}
    return sorted(words if meant == set(names) else names)
