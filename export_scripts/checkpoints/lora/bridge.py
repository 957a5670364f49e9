"""LoRA adapters of Megatron-Bridge: an iteration with ``peft`` in its ``run_config.yaml``, and an adapter's keys alone.

Configuration: Megatron-Bridge, ``peft/lora.py`` and ``peft/canonical_lora.py``; the section ``model`` is that of the
model, which ``checkpoint.pretrained_checkpoint`` names.
"""

from __future__ import annotations

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.distributed import is_distributed, open_distributed
from export_scripts.checkpoints.lora.adapter import Adapter
from export_scripts.checkpoints.lora.core import Trained, is_adapter, updates_of
from export_scripts.checkpoints.megatron import bridge
from export_scripts.checkpoints.megatron.fsdp import is_fsdp
from export_scripts.checkpoints.runs.iterations import find_folder
from export_scripts.weights.values import Fields, number, positive
from handover.errors import CheckpointError
from models.checks import quoted

_CLASSES = {"megatron.bridge.peft.lora.LoRA": False, "megatron.bridge.peft.canonical_lora.CanonicalLoRA": True}
# What the merged weights do not depend on: how training began and ran, and which layers it adapted, which the keys say.
_HARMLESS = (
    *("_target_", "dim", "alpha", "target_modules", "exclude_modules", "canonical_mapping", "params_to_save"),
    *("dropout", "dropout_position", "lora_A_init_method", "lora_B_init_method", "lora_dtype", "a2a_experimental"),
    *("sequence_parallel_input_regather", "normalize_moe_lora", "share_expert_adapters", "experts_shared_outer_loras"),
)


def recognises(archive: Archive) -> bool:
    """Whether the files are an adapter's: a run with ``peft``, all of whose weights belong to one."""
    if not bridge.recognises(archive):
        return False
    folder, run = _open(archive)
    return bool(run.get("peft")) and is_distributed(archive, folder) and is_adapter(open_distributed(archive, folder))


def refuse_adapter(archive: Archive) -> None:
    """Refuse an adapter where a model is wanted.

    Raises:
        CheckpointError: it is one; its model is named where the run names it.
    """
    if recognises(archive):
        base = _open(archive)[1].fields("checkpoint", {}).get("pretrained_checkpoint")
        raise CheckpointError(
            f"{archive.path} holds a LoRA adapter of Megatron-Bridge, not a model",
            f"give {f'its model, {base},' if base else 'its model'} as export.model.checkpoint_path and this as "
            "export.model.adapter_path",
        )


def read_adapter(name: str, archive: Archive) -> Adapter:
    """Open an adapter.

    Raises:
        CheckpointError: it is incomplete, or none that can be merged exactly.
    """
    folder, run = _open(archive)
    if is_fsdp(archive, folder):
        raise CheckpointError(
            f"{archive.path} is an adapter that was saved with ckpt_format fsdp_dtensor, which is not read",
            "save the adapter once with ckpt_format torch_dist: it is read",
        )
    trained = _trained(run, f"{archive.path}: {folder}{bridge.CONFIG_FILE}")
    return Adapter(name, str(archive.path), updates_of(open_distributed(archive, folder), trained, str(archive.path)))


def _open(archive: Archive) -> tuple[str, Fields]:
    folder = find_folder(archive)
    return folder, bridge.read_run(archive, folder)


def _trained(run: Fields, where: str) -> Trained:
    """Read what the products depend on.

    Raises:
        CheckpointError: it is another transformation than LoRA, or has a key that is not known.
    """
    peft = run.fields("peft")
    kind = peft.get("_target_")
    if kind not in _CLASSES:
        raise CheckpointError(
            f"{where}: peft is {quoted(kind)}, and no such adapter can be merged",
            f"legal: {', '.join(_CLASSES)}; DoRA scales the weights as well",
        )
    unknown = [f"{key}: {quoted(value)}" for key, value in peft.items() if key not in _HARMLESS and value]
    if unknown:
        raise CheckpointError(f"{where}: peft has keys that are not known here\n  " + "\n  ".join(unknown))
    rank = positive(peft.get("dim"), f"{where}: peft: dim")
    alpha = number(peft.get("alpha"), f"{where}: peft: alpha")
    model = Fields(bridge.flat(run.fields("model")), f"{where}: model")
    heads = positive(model.get("num_attention_heads"), f"{where}: model: num_attention_heads")
    groups = positive(model.get("num_query_groups") or heads, f"{where}: model: num_query_groups")
    hidden = positive(model.get("hidden_size"), f"{where}: model: hidden_size")
    size = positive(model.get("kv_channels") or hidden // heads, f"{where}: model: kv_channels")
    ranks = positive(model.get("tensor_model_parallel_size") or 1, f"{where}: model: tensor_model_parallel_size")
    experts = model.whole("num_moe_experts") if model.get("num_moe_experts") else 0
    return Trained(
        rank,
        alpha,
        bool(model.get("gated_linear_unit")),
        is_canonical=_CLASSES[kind],
        sizes={"groups": groups, "heads_per_group": heads // groups, "size_per_head": size},
        ranks=ranks,
        expert_num=experts,
        expert_ranks=_expert_ranks(peft, model, rank, ranks),
        has_hybrids=True,
    )


def _expert_ranks(peft: Fields, model: Fields, rank: int, ranks: int) -> range:
    """Return what the rank of an expert's product may be: ``normalize_moe_lora`` divides it by a token's experts."""
    used = model.get("moe_router_topk")
    if not peft.get("normalize_moe_lora") or not isinstance(used, int) or used < 1:
        return range(rank, rank + 1)
    return range(rank // used, rank // used + (model.get("expert_tensor_parallel_size") or ranks))
