"""IA3 adapters of a T5 as NeMo saves them, and the same multiplied into Hugging Face's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.checkpoints.nemo_archive import write_nemo
from support.tiny_models.t5_models import (
    HEADS,
    INTER,
    SIZE,
    VOCABULARY,
    Saving,
    filling,
    huggingface_t5,
    nemo_states,
    plain_from_huggingface,
    relative_config,
)

LAYERS = {"encoder": 2, "decoder": 4}
MODULES = {"encoder": ("self_attention", "mlp"), "decoder": ("self_attention", "inter_attention", "mlp")}
ONE_RANK = Saving()
CLASSES = "nemo.collections.nlp.models.language_modeling.megatron_t5_adapter_model."


def vectors(task: str) -> dict[tuple[str, int, str, str], torch.Tensor]:
    """Every vector of a task: (side, layer, module, part) -> values around 1."""
    result = {}
    for side, modules in MODULES.items():
        for layer in range(LAYERS[side]):
            for module in modules:
                for part in ("mlp",) if module == "mlp" else ("key", "value"):
                    size = INTER if module == "mlp" else HEADS * SIZE
                    result[side, layer, module, part] = filling(f"norm {task} {side} {layer} {module} {part}", (size,))
    return result


def saved_key(version: str, side: str, layer: int, module: str, part: str) -> tuple[str, str]:
    """Outer and inner key, as three versions of NeMo wrote them; the last one has no outer keys."""
    if version == "first":
        inter = "inter_" if module == "inter_attention" else ""
        return f"enc_dec_model.enc_dec_model.{side}.model.layers.{layer}:{inter}{part}_infused_adapter", "scalers"
    if version == "middle":
        return f"{side}:model.layers.{layer}.{module}:{part}_infused_adapter", "scalers"
    path = f"enc_dec_model.enc_dec_model.{side}.model.layers.{layer}.{module}"
    return "", f"{path}.adapter_layer.{part}_infused_adapter.scalers"


def write_task(path: Path, task: str, version: str, saving: Saving = ONE_RANK) -> Path:
    """Save a task's vectors as training ranks do."""
    states: dict[str, Any] = {}
    for rank in range(saving.tensor):
        for stage in range(saving.pipeline):
            state: dict[str, Any] = {}
            for (side, layer, module, part), values in vectors(task).items():
                stages = max(1, saving.pipeline // 2)
                each = LAYERS[side] // stages
                at = layer // each + (stages if side == "decoder" and saving.pipeline > 1 else 0)
                if at == stage or saving.pipeline == 1:
                    local = layer % each if saving.pipeline > 1 else layer
                    outer, inner = saved_key(version, side, local, module, part)
                    cut = values.chunk(saving.tensor)[rank].clone()
                    state |= {outer: {inner: cut}} if outer else {inner: cut}
            folder = f"tp_rank_{rank:02d}_pp_rank_{stage:03d}/" if saving.pipeline > 1 else ""
            states[f"{folder or (f'mp_rank_{rank:02d}/' if saving.tensor > 1 else '')}model_weights.ckpt"] = state
    is_last = version == "last"
    config = {
        "target": "megatron_t5_sft_model.MegatronT5SFTModel" if is_last else f"{CLASSES}MegatronT5InfusedAdapterModel",
        "tensor_model_parallel_size": saving.tensor,
        "pipeline_model_parallel_size": saving.pipeline,
        **({"peft": {"peft_scheme": "ia3"}} if is_last else {}),
    }
    return write_nemo(path, config, states, files={})


def base(path: Path) -> Any:
    """Write the model; returns it as transformers has it."""
    model = huggingface_t5(is_multilingual=True, feed_forward_proj="gated-gelu", num_decoder_layers=4)
    states = nemo_states(plain_from_huggingface(model), HEADS, Saving())
    path.parent.mkdir()
    write_nemo(path, relative_config(Saving(), "geglu"), states, files=VOCABULARY)
    return model


def multiplied(model: Any, task: str) -> Any:
    """Scale keys, values and the feed-forward's middle by scaling what makes or takes them."""
    with torch.no_grad():
        for (side, layer, module, part), values in vectors(task).items():
            block = getattr(model, side).block[layer].layer
            if module == "mlp":
                block[-1].DenseReluDense.wo.weight.mul_(values)
            else:
                attention = block[0].SelfAttention if module == "self_attention" else block[1].EncDecAttention
                {"key": attention.k, "value": attention.v}[part].weight.mul_(values[:, None])
    return model


def huggingface_copy(model: Any) -> Any:
    copy = huggingface_t5(is_multilingual=True, feed_forward_proj="gated-gelu", num_decoder_layers=4)
    copy.load_state_dict(model.state_dict())
    return copy
