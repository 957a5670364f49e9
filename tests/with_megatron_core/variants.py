"""Logits of a tiny decoder in megatron-core with one field of its configuration changed, on a CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from with_megatron_core.llama import without_cuda

_TOKENS, _VOCABULARY = 12, 40
_BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "kv_channels": 8,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "use_cpu_initialization": True,
    "bias_activation_fusion": False,
}
_EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_token_dispatcher_type": "allgather",
}
# Of fields whose default says nothing of their other values.
OTHER_VALUES: dict[str, Any] = {
    "window_size": (3, 0),
    "softmax_type": "off-by-one",
    "softmax_scale": 0.1,
    "normalization": "LayerNorm",
    "no_rope_freq": 2,
    "activation_func": torch.nn.functional.relu,
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_router_score_function": "sigmoid",
    "moe_layer_freq": 2,
    "moe_expert_capacity_factor": 0.5,
    "moe_router_dtype": "fp64",
    "moe_token_drop_policy": "position",
    "moe_router_group_topk": 1,
    "moe_input_jitter_eps": 0.0,
    "layernorm_epsilon": 0.1,
    "kv_channels": 16,
    "num_attention_heads": 8,
}
# Of fields that count beside another.
BESIDE: dict[str, dict[str, Any]] = {
    "moe_router_group_topk": {"moe_router_num_groups": 2},
    "window_attn_skip_freq": {"window_size": (3, 0)},
    "moe_expert_capacity_factor": {"moe_router_load_balancing_type": "none"},
}


def changed(field: dataclasses.Field[Any]) -> Any:
    """Another value of a field than its default."""
    if field.name in OTHER_VALUES:
        return OTHER_VALUES[field.name]
    value = _BASE.get(field.name, {**_BASE, **_EXPERTS}.get(field.name, field.default))
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 or 1
    return True if "bool" in str(field.type) else 2


def logits(changes: dict[str, Any], experts: bool) -> torch.Tensor:
    """Compute a model whose weights are the same for every set of changes that lets them be."""
    given = {**_BASE, **(_EXPERTS if experts else {}), **changes}
    config = TransformerConfig(**given)
    spec = (
        get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        if experts
        else get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    )
    model = GPTModel(
        config, spec, _VOCABULARY, 64, position_embedding_type="rope", parallel_output=False, rotary_base=100
    ).eval()
    generator = torch.Generator().manual_seed(1)
    for _, weight in sorted(model.named_parameters()):
        weight.data = torch.randn(weight.shape, generator=generator) * (0.3 if weight.ndim > 1 else 0.5)
    ids = torch.arange(2 * _TOKENS).reshape(2, _TOKENS) * 7 % _VOCABULARY
    hidden = torch.ones(1, 1, _TOKENS, _TOKENS, dtype=torch.bool).triu(1)
    with torch.no_grad():
        made: torch.Tensor = model(ids, torch.arange(_TOKENS).expand(2, -1), hidden)
    return made


def work(_: int, folder: Path) -> None:
    """Write for each field what megatron-core makes of another value: by how much logits differ, or why it refuses.

    What concerns experts is tried in a mixture, all else in a model without one.
    """
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    without_cuda()
    moe_utils.te_general_gemm = None  # a name that is looked up without Transformer Engine too
    found: dict[str, dict[str, str]] = {}
    for experts in (False, True):
        plain = logits({}, experts)
        kind = found.setdefault("experts" if experts else "one feed-forward", {})
        for field in dataclasses.fields(TransformerConfig):
            if ("moe" in field.name) != experts:
                continue
            try:
                made = logits(BESIDE.get(field.name, {}) | {field.name: changed(field)}, experts)
                kind[field.name] = f"differs by {(made - plain).abs().max():.3g}"
            except Exception as error:
                kind[field.name] = f"refused: {type(error).__name__} {error}"[:120]
    (folder / "found.json").write_text(json.dumps(found, indent=1))
    torch.distributed.destroy_process_group()
