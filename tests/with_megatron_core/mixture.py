"""Mixtral and GPT-OSS in megatron-core itself, over expert-parallel ranks: what each rank holds, and in which file.

megatron-core places everything: it reads the whole model from a distributed checkpoint of the independent writer's, for
any parallelism, and each rank saves its own state as Megatron-LM does (``training/checkpointing.py``,
``get_checkpoint_name``).
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from support.checkpoints.llama_configs import megatron_lm, padded_vocabulary
from support.checkpoints.llama_files import write_megatron_lm_tree
from support.tiny_models.llama_models import saved
from with_megatron_core.llama import without_cuda

Grid = tuple[int, int, int]
"""Tensor parallelism, expert parallelism, tensor parallelism of the experts."""


def world_of(grid: Grid) -> int:
    """Ranks that a grid needs."""
    tensor, expert, own = grid
    return max(tensor, expert * own)


def _built(name: str, grid: Grid) -> Any:
    config, is_oss = saved(name).config, name == "gpt_oss"
    own: dict[str, Any] = {"activation_func": quick_gelu, "softmax_type": "learnable", "glu_linear_offset": 1.0}
    own |= {"kv_channels": config.head_dim, "add_bias_linear": True}
    transformer = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        ffn_hidden_size=config.intermediate_size,
        moe_ffn_hidden_size=config.intermediate_size,
        num_moe_experts=config.num_local_experts,
        moe_router_topk=config.num_experts_per_tok,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        tensor_model_parallel_size=grid[0],
        expert_model_parallel_size=grid[1],
        expert_tensor_parallel_size=grid[2],
        **(own if is_oss else {"activation_func": torch.nn.functional.silu, "add_bias_linear": False}),
    )
    return GPTModel(
        transformer,
        get_gpt_layer_local_spec(num_experts=config.num_local_experts, normalization="RMSNorm"),
        vocab_size=padded_vocabulary(config, 2),
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(config.rope_parameters["rope_theta"]),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    ).eval()


def work(rank: int, name: str, grid: Grid, whole: Path, folder: Path) -> None:
    """One training rank: read its part of the model, and write it below ``folder`` in both of Megatron-LM's forms."""
    saved(name)  # before there are ranks: transformers then writes on the first alone
    world = world_of(grid)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    tensor, expert, own = grid
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, expert_model_parallel_size=expert, expert_tensor_parallel_size=own
    )
    without_cuda()
    model = _built(name, grid)
    wanted = {key: each for key, each in model.sharded_state_dict().items() if "_extra_state" not in key}
    told = model.load_state_dict(dist_checkpointing.load(wanted, str(whole)), strict=False)
    assert not told.unexpected_keys and all("_extra_state" in key for key in told.missing_keys), told
    parallel = {"tensor_model_parallel_size": tensor, "expert_model_parallel_size": expert}
    arguments = {**megatron_lm(saved(name).config), **parallel, "expert_tensor_parallel_size": own}
    about = {"args": Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 500}
    place = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if expert > 1:
        place += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    if rank == 0:
        for form in ("plain", "distributed"):
            write_megatron_lm_tree(folder / form).mkdir()
    torch.distributed.barrier()
    target = folder / "plain/iter_0000500" / place
    target.mkdir()
    torch.save({**about, "model": model.state_dict()}, target / "model_optim_rng.pt")
    dist_checkpointing.save({**about, "model": model.sharded_state_dict()}, str(folder / "distributed/iter_0000500"))
    torch.distributed.destroy_process_group()
