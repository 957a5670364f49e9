"""DeepSeek's blocks in megatron-core itself: latent attention, experts and a predictor, their logits and checkpoints.

megatron-core places the weights: it reads the whole model from a distributed checkpoint of the independent writer's.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig
from support.checkpoints import core_latent
from support.checkpoints.core_mixtures import mixture_config
from support.checkpoints.llama_configs import megatron_lm, padded_vocabulary
from support.checkpoints.llama_files import write_megatron_lm_tree
from support.tiny_models.llama_models import input_ids, saved
from with_megatron_core.llama import without_cuda


class _Attention(DotProductAttention):  # type: ignore[misc]
    """The local attention, which takes values of another width than the keys, but no arguments that say so."""

    def __init__(self, *given: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
        super().__init__(*given, **named)
        if v_channels:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def _built(name: str, ranks: int, predictors: int) -> Any:
    config = saved(name).config
    said = {**mixture_config(config), **core_latent.fields(config), "mtp_num_layers": predictors or None}
    transformer = MLATransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        rotary_base=config.rope_parameters["rope_theta"],
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        tensor_model_parallel_size=ranks,
        transformer_impl="local",
        **{**said, "moe_grouped_gemm": False, "add_qkv_bias": False},
    )
    LocalSpecProvider.core_attention = lambda _: _Attention
    # Names of Transformer Engine's, which 0.16 asks for without it.
    multi_latent_attention.TELinear, moe_utils.te_general_gemm = type("TELinear", (), {}), None
    spec = get_gpt_decoder_block_spec(transformer, use_transformer_engine=False)
    return GPTModel(
        transformer,
        spec,
        vocab_size=padded_vocabulary(config, ranks),
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(config.rope_parameters["rope_theta"]),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        parallel_output=False,
        mtp_block_spec=get_gpt_mtp_block_spec(transformer, spec, use_transformer_engine=False) if predictors else None,
    ).eval()


def work(rank: int, ranks: int, name: str, predictors: int, whole: Path, folder: Path) -> None:
    """One training rank: read its part of the model, compute logits and write both of Megatron-LM's forms.

    ``logits.pt`` is [2, 12, padded vocabulary].
    """
    saved(name)  # before there are ranks: transformers then writes on the first alone
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    without_cuda()
    model = _built(name, ranks, predictors)
    wanted = {key: each for key, each in model.sharded_state_dict().items() if "_extra_state" not in key}
    told = model.load_state_dict(dist_checkpointing.load(wanted, str(whole)), strict=False)
    assert not told.unexpected_keys and all("_extra_state" in key for key in told.missing_keys), told
    ids = torch.from_numpy(input_ids())
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    kept = model.mtp_process, model.config.mtp_num_layers
    model.mtp_process, model.config.mtp_num_layers = False, None  # predictors are computed beside a loss alone
    with torch.no_grad():
        logits = model(ids, positions, hidden)
    model.mtp_process, model.config.mtp_num_layers = kept
    given = {"mtp_num_layers": predictors or None, "transformer_impl": "local"}
    arguments = Namespace(**megatron_lm(saved(name).config, (ranks, 1), **given))
    about = {"args": arguments, "checkpoint_version": 3.0, "iteration": 500}
    if rank == 0:
        torch.save(logits, folder / "logits.pt")
        for form in ("plain", "distributed"):
            write_megatron_lm_tree(folder / form).mkdir()
    torch.distributed.barrier()
    target = folder / f"plain/iter_0000500/mp_rank_{rank:02d}"
    target.mkdir()
    torch.save({**about, "model": model.state_dict()}, target / "model_optim_rng.pt")
    dist_checkpointing.save({**about, "model": model.sharded_state_dict()}, str(folder / "distributed/iter_0000500"))
    torch.distributed.destroy_process_group()
