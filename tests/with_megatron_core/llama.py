"""A Llama-like model in megatron-core itself: its logits, and its checkpoints by its own writer and by torch.

It runs on a CPU over gloo. megatron-core asks torch.cuda for four things that a CPU lacks: the device of the rotary
frequencies and of a window's mask, an end to copies from a GPU, and the GPU's random state (for dropout, which is 0
here).
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.transformer_config import TransformerConfig
from support.checkpoints.llama_configs import core_window, megatron_lm, nemo2, padded_vocabulary
from support.checkpoints.llama_files import write_megatron_lm_tree, write_nemo2_tree
from support.checkpoints.llama_state import core_state, cut, local_norms
from support.tiny_models.llama_models import input_ids, saved


def without_cuda() -> None:
    """Give megatron-core what it asks torch.cuda for, from the CPU."""
    ones = torch.ones
    torch.ones = lambda *sizes, **given: ones(*sizes, **{**given, "device": None})
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    parallel_random.initialize_rng_tracker()
    parallel_random._CUDA_RNG_STATE_TRACKER.fork = lambda *_: contextlib.nullcontext()


def _transformer(config: Any, ranks: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        ffn_hidden_size=config.intermediate_size,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.model_type == "qwen3",
        window_size=core_window(config),
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        tensor_model_parallel_size=ranks,
    )


def _built(name: str, ranks: int, rank: int) -> Any:
    """The model of ``llama_models`` with its weights, this rank's part of it."""
    source = saved(name)
    config, rope = source.config, source.config.rope_parameters
    padded = padded_vocabulary(config, ranks)
    is_scaled = rope["rope_type"] == "llama3"
    model = GPTModel(
        _transformer(config, ranks),
        get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.model_type == "qwen3"),
        vocab_size=padded,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(rope["rope_theta"]),
        rope_scaling=is_scaled,
        rope_scaling_factor=rope.get("factor", 8.0),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        parallel_output=False,
    ).eval()
    state = local_norms(core_state(source.tensors, config, padded))
    told = model.load_state_dict({key: cut(key, value, ranks, rank) for key, value in state.items()}, strict=False)
    assert not told.unexpected_keys
    assert all("_extra_state" in key or "inv_freq" in key for key in told.missing_keys), told
    return model


def work(rank: int, ranks: int, name: str, folder: Path) -> None:
    """One training rank: compute the logits and write all forms below ``folder``.

    ``logits.pt`` [2, 12, padded vocabulary]; ``nemo2`` and ``distributed`` by dist_checkpointing; ``plain`` by torch.
    """
    saved(name)  # before there are ranks: transformers then writes on the first alone
    rendezvous = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    without_cuda()
    model = _built(name, ranks, rank)
    ids = torch.from_numpy(input_ids())
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = model(ids, positions, hidden)
    arguments = Namespace(**megatron_lm(saved(name).config, (ranks, 1), transformer_impl="local"))
    about = {"args": arguments, "checkpoint_version": 3.0, "iteration": 500}
    plain = folder / f"plain/iter_0000500/mp_rank_{rank:02d}"
    if rank == 0:
        torch.save(logits, folder / "logits.pt")
        write_nemo2_tree(folder / "nemo2", nemo2(saved(name).config, name)).mkdir()
        write_megatron_lm_tree(folder / "distributed").mkdir()
        write_megatron_lm_tree(folder / "plain").mkdir()
    torch.distributed.barrier()
    plain.mkdir()
    torch.save({**about, "model": model.state_dict()}, plain / "model_optim_rng.pt")
    dist_checkpointing.save(model.sharded_state_dict(prefix="module."), folder / "nemo2/weights")
    distributed = {**about, "model": model.sharded_state_dict()}
    dist_checkpointing.save(distributed, folder / "distributed/iter_0000500")
    torch.distributed.destroy_process_group()
