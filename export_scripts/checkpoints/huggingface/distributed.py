"""Weights with the hub's names in the parts that training ranks saved: torch's distributed files, and safetensors.

NeMo-RL saves ``{"model": state}`` (``utils/native_checkpoint.py``) or, as AutoModel does, the state itself. torch notes
of each key how it came about (``planner_data``), so that nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.distributed import OF_CORE
from export_scripts.checkpoints.files.distributed_metadata import METADATA_FILE
from export_scripts.checkpoints.files.distributed_torch import read_torch_dist
from export_scripts.checkpoints.files.parted_safetensors import has_parts, read_parted_safetensors
from export_scripts.checkpoints.files.yaml_file import read_yaml
from export_scripts.checkpoints.runs.hub_names import TRAINING_FILE
from export_scripts.weights.schema import LazyTensor
from handover.errors import CheckpointError
from models.directory import CONFIG_FILE

_EXTRA_STATE = "._extra_state"  # of Transformer Engine: FP8 scaling, no weights
_SECTION = "model"
_OF_TRAINING = ("optim", "optimizer", "sched", "scheduler", "lr_scheduler")


def holds_parts(archive: Archive) -> bool:
    """Whether the weights are those that training ranks saved in parts, whatever their names are."""
    is_torchs = METADATA_FILE in archive and not any(name in archive for name in OF_CORE)
    return is_torchs or has_parts(archive)


def has_hub_names(archive: Archive) -> bool:
    """Whether weights in parts lie where the files beside them say that their names are the hub's."""
    return holds_parts(archive) and (CONFIG_FILE in archive or TRAINING_FILE in archive)


def read_parts(archive: Archive) -> tuple[Mapping[str, LazyTensor], tuple[str, ...]]:
    """List the tensors, without reading them, and the keys of what is none.

    Raises:
        CheckpointError: something is missing or damaged.
    """
    if has_parts(archive):
        return read_parted_safetensors(archive), ()
    found = read_torch_dist(archive, "")
    names = {key: _name(key, found.paths) for key in (*found.tensors, *found.objects)}
    tensors: dict[str, LazyTensor] = {}
    for key, tensor in found.tensors.items():
        if (name := names[key]) in tensors:
            raise CheckpointError(f"{archive.path}: {name} is there twice, in a section and beside it", "keep one")
        if name:
            tensor.check()
            tensors[name] = tensor
    others = (names[key] for key in found.objects)
    return tensors, tuple(name for name in others if name and not name.endswith(_EXTRA_STATE))


def _name(key: str, paths: Mapping[str, tuple[object, ...]]) -> str:
    """Take a key's name in the state of the model; empty: it belongs to the training."""
    path = paths.get(key, ())
    if len(path) > 1 and path[0] in _OF_TRAINING:
        return ""
    return str(path[1]) if len(path) == 2 and path[0] == _SECTION else key


def overrides(archive: Archive) -> Mapping[str, object]:
    """Read what NeMo-RL set in the model's configuration; nothing where the training was another."""
    policy = _training(archive).get("policy") if holds_parts(archive) else None
    changes = policy.get("hf_config_overrides") if isinstance(policy, Mapping) else None
    return changes if isinstance(changes, Mapping) else {}


def missing_config(archive: Archive) -> CheckpointError:
    """Return the error of weights without their ``config.json``, which names the model where the training does."""
    training = _training(archive)
    policy, model = (training.get(name) for name in ("policy", "model"))
    named = policy.get("model_name") if isinstance(policy, Mapping) else None
    named = named or (model.get("pretrained_model_name_or_path") if isinstance(model, Mapping) else None)
    return CheckpointError(
        f"{archive.path} holds weights with Hugging Face's names and no {CONFIG_FILE}, which says what they are",
        f"copy {CONFIG_FILE} of {named or 'the model that the training began with'} into {archive.path}",
    )


def _training(archive: Archive) -> Mapping[str, object]:
    return read_yaml(archive, TRAINING_FILE) if TRAINING_FILE in archive else {}
