"""Merge the LoRA adapter that lies beside a model, or is given, into the model's weights.

What an adapter adds to a weight is ``alpha / r`` times a product of two thin matrices. Each sum is computed in fp32
where it is read, and then cast as every weight is. Every key of the adapter must be used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.chunked import ChunkedTensor, taken_apart
from export_scripts.checkpoints.huggingface.files import ADAPTER_FILE
from export_scripts.checkpoints.lora import bridge, nemo, nemo2, peft
from export_scripts.checkpoints.lora.adapter import KIND, Adapter
from export_scripts.checkpoints.lora.on_hub import on_hub_names
from export_scripts.checkpoints.lora.update import MergedTensor, Update, suffix_in
from export_scripts.checkpoints.nemo.companions import companions_of
from export_scripts.checkpoints.source import OwnModel, Source
from export_scripts.weights.schema import LazyTensor
from handover.errors import CheckpointError
from models.decoder import NAMES
from models.directory import CONFIG_FILE

_OF_TRAININGS: tuple[tuple[Callable[[Archive], bool], Callable[[str, Archive], Adapter]], ...] = (
    (nemo.recognises, nemo.read_adapter),
    (nemo2.recognises, nemo2.read_adapter),
    (bridge.recognises, bridge.read_adapter),
)
_ALL_EXPERTS = ".mlp.experts.experts.linear_"
_ONE_EXPERT = re.compile(r"\.mlp\.experts\.experts\.\d+\.linear_")


@dataclass
class _Merging:
    """The work on one model.

    Attributes:
        tensors: its tensors, with what was merged so far.
        changed: keys that the adapter has changed.
        problems: what does not fit, one line each.
    """

    source: Source
    tensors: dict[str, LazyTensor]
    changed: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def of_tensors(self, update: Update) -> tuple[Update, ...]:
        """Split an update of a gated weight where the model has its halves apart (``singleton_local_shards``)."""
        if not update.is_gated or any(suffix_in(self.tensors, name) for name in update.names):
            return (update,)
        halves = update.halves()
        is_apart = any(suffix_in(self.tensors, name) for name in halves[0].names)
        return halves if is_apart else (update,)

    def find(self, names: tuple[str, ...], what: str, shape: tuple[int, ...]) -> str | None:
        """Find the weight that an adapter means, and note what is wrong with it."""
        key = next((found for name in names if (found := suffix_in(self.tensors, name))), None)
        if key is None:
            self.problems.append(f"{what}  the model has no {names[0]}")
            return None
        table = self.source.source_map
        if table.is_ignored(key) or not table.targets(key):
            self.problems.append(f"{what}  {key} is not used: {_reason(table.ignored)}")
        elif key in self.changed:
            self.problems.append(f"{what}  {key} is changed twice")
        elif self.tensors[key].shape != shape:
            self.problems.append(f"{what}  {list(shape)} does not fit {key}  {list(self.tensors[key].shape)}")
        else:
            self.changed.add(key)
            return key
        return None

    def refuse_tied(self, key: str) -> bool:
        """Note that an embedding which is also the output projection cannot be changed as one of the two."""
        dims, targets = self.source.dims, self.source.source_map.targets(key)
        has_tied_head = getattr(dims, "has_tied_head", not getattr(dims, "has_untied_head", True))
        is_tied = has_tied_head and any(each in targets for each in ("model.wte", f"{NAMES['embedding']}.weight"))
        if is_tied:
            self.problems.append(f"{key}  is the embedding and the output projection; the adapter changes one of them")
        return is_tied


def with_adapter(source: Source) -> Source:
    """Merge the adapter that lies in a model's archive, if there is one.

    Raises:
        CheckpointError: it cannot be merged exactly, it does not fit the model, or there are several.
    """
    adapter = _open_adapter(source)
    if adapter is None:
        return source
    work = _Merging(source, _with_experts_apart(source.tensors, adapter))
    for update in (each for whole in adapter.updates for each in work.of_tensors(whole)):
        if key := work.find(update.names, ", ".join(update.keys), update.shape):
            work.tensors[key] = MergedTensor(work.tensors[key], update)
    for names, tensor in adapter.replaced.items():
        key = work.find(names, names[0], tensor.shape)
        if key and not work.refuse_tied(key):
            work.tensors[key] = tensor
    if work.problems:
        raise CheckpointError(
            f"{adapter.where} does not fit {source.archive.path}\n  " + "\n  ".join(work.problems),
            "nothing of an adapter is dropped: give the adapter that was trained for this model",
        )
    said = f"the LoRA adapter {adapter.name} is merged into {len(adapter.updates)} weights, computed in fp32"
    if adapter.replaced:
        said += f", and replaces {len(adapter.replaced)} tensors"
    return replace(source, tensors=work.tensors, remarks=(*source.remarks, said), own=_own(source, work.tensors))


def _with_experts_apart(tensors: Mapping[str, LazyTensor], adapter: Adapter) -> dict[str, LazyTensor]:
    """Take arrays of all experts apart where the adapter changes single ones."""
    if not any(_ONE_EXPERT.search(name) for update in adapter.updates for name in update.names):
        return dict(tensors)
    found: dict[str, LazyTensor] = {}
    for key, tensor in tensors.items():
        before, mark, after = key.partition(_ALL_EXPERTS)
        if mark and isinstance(tensor, ChunkedTensor):
            found |= {
                f"{before}.mlp.experts.experts.{n}.linear_{after}": each for n, each in enumerate(taken_apart(tensor))
            }
        else:
            found[key] = tensor
    return found


def _own(source: Source, merged: Mapping[str, LazyTensor]) -> OwnModel | None:
    """Put merged tensors into the model as its own directory has it."""
    if source.own is None:
        return None
    changed = {id(old): merged[key] for key, old in source.tensors.items() if merged[key] is not old}
    held = {id(tensor) for tensor in source.own.tensors.values()}
    if changed.keys() - held:
        raise CheckpointError(
            "the adapter changes a tensor that is computed from two of the model's",
            "merge it first: peft's merge_and_unload() and save_pretrained()",
        )
    tensors = {name: changed.get(id(old), old) for name, old in source.own.tensors.items()}
    return replace(source.own, tensors=tensors, quantization={}, scales={})


def _open_adapter(source: Source) -> Adapter | None:
    archive = source.archive
    companions = companions_of(archive, KIND)
    if ADAPTER_FILE in archive and CONFIG_FILE in archive and not companions:
        companions = {archive.path.name: archive}  # as transformers takes a directory with both
    if len(companions) > 1:
        raise CheckpointError(
            f"{archive.path} holds {len(companions)} LoRA adapters: {', '.join(companions)}",
            "export.model.adapter_path names the one to merge",
        )
    for name, companion in companions.items():
        return _read(name, companion, source)
    return None


def _read(name: str, companion: Archive, model: Source) -> Adapter:
    if peft.recognises(companion):
        return peft.read_adapter(name, companion, model.archive, model.tensors)
    for recognises, read_adapter in _OF_TRAININGS:
        if recognises(companion):
            adapter = read_adapter(name, companion)
            if model.own is None:
                return adapter
            return replace(adapter, updates=on_hub_names(adapter.updates, model.dims, adapter.where))
    raise CheckpointError(
        f"{companion.path} is no LoRA adapter",
        f"a directory of PEFT with {ADAPTER_FILE}, a .nemo with peft.lora_tuning in its model_config.yaml, and a "
        "directory of NeMo 2 or Megatron-Bridge whose weights are an adapter's alone, are",
    )


def _reason(ignored: Mapping[str, str]) -> str:
    return "its table drops it" if ignored else "its table does not know it"
