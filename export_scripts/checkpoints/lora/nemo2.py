"""LoRA adapters of NeMo 2.x: a directory with ``weights/`` and ``context/`` whose weights are an adapter's alone.

Files and keys: NeMo 2.x, ``lightning/pytorch/callbacks/peft.py`` (``WrappedAdapterIO`` keeps the adapter's keys and
notes the model's path in ``weights/adapter_metadata.json``) and ``collections/llm/peft/lora.py`` (``LoRA`` is the
``model_transform`` of ``context/model.yaml``). The rows of linear_out of ``linear_fc1`` are always cut as a gated
weight's.
"""

from __future__ import annotations

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.checkpoints.files.distributed import is_distributed, open_distributed
from export_scripts.checkpoints.files.yaml_file import read_yaml
from export_scripts.checkpoints.lora.adapter import Adapter
from export_scripts.checkpoints.lora.core import Trained, is_adapter, updates_of
from export_scripts.weights.values import Fields, number, positive
from handover.errors import CheckpointError
from models.checks import quoted

_MODEL_FILE, _WEIGHTS = "context/model.yaml", "weights/"
_BASE_FILE = f"{_WEIGHTS}adapter_metadata.json"
_CLASS = "nemo.collections.llm.peft.lora.LoRA"


def recognises(archive: Archive) -> bool:
    """Whether the files are an adapter's: every weight belongs to one."""
    if _MODEL_FILE not in archive or not is_distributed(archive, _WEIGHTS):
        return False
    if _BASE_FILE not in archive and not read_yaml(archive, _MODEL_FILE).get("model_transform"):
        return False
    return is_adapter(open_distributed(archive, _WEIGHTS))


def refuse_adapter(archive: Archive) -> None:
    """Refuse an adapter where a model is wanted.

    Raises:
        CheckpointError: it is one; its model is named where the adapter names it.
    """
    if recognises(archive):
        base = _base(archive)
        model = f"its model, {base}," if base else "its model"
        raise CheckpointError(
            f"{archive.path} holds a LoRA adapter of NeMo 2, not a model",
            f"give {model} as export.model.checkpoint_path and this as export.model.adapter_path",
        )


def read_adapter(name: str, archive: Archive) -> Adapter:
    """Open an adapter; CheckpointError: it is incomplete, or none that can be merged exactly."""
    updates = updates_of(open_distributed(archive, _WEIGHTS), _read_transform(archive), str(archive.path))
    return Adapter(name, str(archive.path), updates)


def _base(archive: Archive) -> str:
    """Read the path of the model that an adapter was trained on; empty: it names none."""
    if _BASE_FILE not in archive:
        return ""
    where = f"{archive.path}: {_BASE_FILE}"
    path = Fields(parse_json(archive.read_bytes(_BASE_FILE), where), where).text("model_ckpt_path", "")
    return "" if path == "None" else path.removesuffix("/weights")


def _read_transform(archive: Archive) -> Trained:
    """Read what the products depend on.

    Raises:
        CheckpointError: it is another transformation than LoRA.
    """
    where = f"{archive.path}: {_MODEL_FILE}"
    model = Fields(read_yaml(archive, _MODEL_FILE), where)
    lora = model.fields("model_transform", {})
    if lora.get("_target_") != _CLASS:
        raise CheckpointError(
            f"{where}: model_transform is {quoted(lora.get('_target_'))}, and no such adapter can be merged",
            f"legal: {_CLASS}; CanonicalLoRA orders its rows by the training's ranks, DoRA scales the weights as well",
        )
    rank = positive(lora.get("dim"), f"{where}: model_transform: dim")
    alpha = number(lora.get("alpha"), f"{where}: model_transform: alpha")
    config = model.fields("config")
    experts = config.whole("num_moe_experts") if config.get("num_moe_experts") else 0
    return Trained(
        rank,
        alpha,
        bool(config.get("gated_linear_unit")),
        cuts_plain=True,
        expert_num=experts,
        expert_ranks=range(rank, rank + 1),
    )
