"""Every key of NeMo's configurations that is known: what it means for the function that a model computes.

Sources: NeMo 1.0 to 2.0, ``megatron_gpt_config.yaml``, ``megatron_t5_config.yaml``,
``megatron_model_base_config.yaml``, ``megatron_gpt_model.py`` (``mcore_model_customize``) and the fine-tuning
configurations; NeMo 2.x, ``GPTConfig``; megatron-core 0.4 to 0.16, ``TransformerConfig`` and ``ModelParallelConfig``.
A name that ends with ``*`` stands for all that begin so. What a model honours beside these stands in
``gpt_config.py`` and ``t5_config.py``.
"""

from __future__ import annotations

from export_scripts.checkpoints.nemo.limits import Limit, is_off, is_one_of

_NO_CUSTOM_SCORES = "it divides scores by the root of the head's size, and nothing else is done to them"
_NO_CAPS = "it does not cap logits or scores"

CORE_LIMITS: dict[str, Limit] = {
    "softmax_scale": Limit(is_off, _NO_CUSTOM_SCORES),
    "softmax_type": Limit(is_one_of(None, "vanilla"), _NO_CUSTOM_SCORES),
    "query_pre_attn_scalar": Limit(is_off, _NO_CUSTOM_SCORES),
    "sqrt_query_pre_attn_scalar": Limit(is_off, _NO_CUSTOM_SCORES),
    "attn_logit_softcapping": Limit(is_off, _NO_CAPS),
    "final_logit_softcapping": Limit(is_off, _NO_CAPS),
    "qk_l2_norm": Limit(is_off, "it does not normalise queries and keys"),
    "attention_output_gate": Limit(is_off, "its attention has no gate"),
    "head_wise_attn_gate": Limit(is_off, "its attention has no gate"),
    "multi_latent_attention": Limit(is_off, "every head has its own keys and values"),
    "experimental_attention_variant": Limit(is_off, "it has plain attention"),
    "no_rope_freq": Limit(is_off, "all its layers rotate positions, or none"),
    "rotary_base_per_layer": Limit(is_off, "all its layers rotate alike"),
    "rope_scaling": Limit(is_off, "it does not scale the rotation"),
    "scale_factor": Limit(is_one_of(None, 0, 1, 1.0), "it does not scale the rotation"),
    "parallel_attention": Limit(is_off, "its GPT has attention before the feed-forward"),
    "new_decoder_architecture": Limit(is_off, "its GPT has attention before the feed-forward"),
    "glu_linear_offset": Limit(is_off, "its feed-forward has no gate"),
    "activation_func_clamp_value": Limit(is_off, "it does not clamp the feed-forward's values"),
    "heterogeneous_block_specs": Limit(is_off, "its layers are all alike"),
    "heterogeneous_layers_config_path": Limit(is_off, "its layers are all alike"),
    "linear_attention_freq": Limit(is_off, "its layers are all alike"),
    "is_hybrid_model": Limit(is_off, "its layers are all alike"),
    "mtp_num_layers": Limit(is_off, "it predicts one token at a time"),
    "use_mup": Limit(is_off, "it does not scale embeddings and logits"),
    "embedding_multiplier": Limit(is_one_of(None, 0, 1, 1.0), "it does not scale embeddings"),
    "use_kitchen": Limit(is_off, "its weights are plain"),
}
"""Keys of megatron-core: NeMo 2 has them as they are, NeMo 1 also in ``mcore_customization_config``."""

NEMO1_LIMITS: dict[str, Limit] = {
    **CORE_LIMITS,
    "apply_embedding_scaling": Limit(is_off, "it does not scale embeddings"),
    "scale_positional_embedding": Limit(is_off, "it does not scale the rotation"),
    "drop_layers": Limit(is_off, "every layer is computed"),
    "hyena": Limit(is_off, "it has attention"),
    "retro": Limit(is_off, "it looks nothing up"),
    "megatron_lm_head_scale": Limit(is_off, "it does not scale logits"),
}
"""Keys of NeMo 1's GPT."""

_PARALLEL_AND_PRECISION = {
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *(
        "context_parallel_size",
        "hierarchical_context_parallel_sizes",
        "sequence_parallel",
        "expert_model_parallel_size",
    ),
    *("expert_tensor_parallel_size", "pipeline_model_parallel_split_rank", "pipeline_model_parallel_comm_backend"),
    *("pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("first_pipeline_num_layers", "last_pipeline_num_layers", "account_for_*", "encoder_tensor_model_parallel_size"),
    *("encoder_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage", "num_microbatches_*"),
    *(
        "contiguous_micro_batch",
        "variable_seq_lengths",
        "overlap_*",
        "batch_p2p_*",
        "use_ring_exchange_p2p",
        "tp_comm_*",
    ),
    *(
        "use_tp_pp_dp_mapping",
        "ub_tp_comm_*",
        "tp_only_amax_red",
        "cp_comm_type",
        "cp_partition_mode",
        "sync_batch_comm",
    ),
    *("nccl_*", "sharp", "high_priority_*", "batch_p2p_comm", "deallocate_pipeline_outputs", "defer_embedding_wgrad_*"),
    *("wgrad_deferral_limit", "timers", "barrier_with_*", "no_sync_func", "grad_sync_func", "param_sync_func"),
    *(
        "grad_scale_func",
        "finalize_model_grads_func",
        "perform_initialization",
        "use_cpu_initialization",
        "params_dtype",
    ),
    *("fp16", "bf16", "fp4*", "fp8*", "first_last_layers_bf16", "num_layers_at_*", "enable_autocast", "autocast_dtype"),
    *("pipeline_dtype", "precision", "disable_parameter_transpose_cache", "reduce_amax", "inference_*", "cuda_graph_*"),
    *(
        "enable_cuda_graph",
        "use_te_*",
        "external_cuda_graph",
        "te_rng_tracker",
        "use_te_rng_tracker",
        "cpu_offloading*",
    ),
    *("async_tensor_model_parallel_allreduce", "gradient_accumulation_fusion", "tensor_parallel_*", "delay_wgrad_*"),
    *("deterministic_mode", "batch_invariant_mode", "symmetric_ar_type", "use_custom_fsdp", "gradient_as_bucket_view"),
    *("megatron_amp_O2", "native_amp_*", "hysteresis", "fp32_residual_connection", "fp16_lm_cross_entropy"),
    *("attention_softmax_in_fp32", "apply_query_key_layer_scaling", "disable_bf16_reduced_precision_matmul"),
}
_TRAINING = {
    *(
        "hidden_dropout",
        "attention_dropout",
        "ffn_dropout",
        "embedding_dropout",
        "init_method*",
        "output_layer_init_method",
    ),
    *("embedding_init_method*", "use_scaled_init_method", "init_model_with_meta_device", "recompute_*", "distribute_*"),
    *("activations_checkpoint_*", "num_micro_batches_with_partial_activation_checkpoints", "clone_scatter_*"),
    *(
        "calculate_per_token_loss",
        "cross_entropy_*",
        "test_mode",
        "log_max_attention_logit",
        "qk_clip*",
        "moe_*",
        "dsa_*",
    ),
    *("mtp_loss_scaling_factor", "mtp_*", "csa_*", "mamba_*", "config_logger_dir", "flash_decode", "linear_*", "mup_*"),
    *("persist_layer_norm", "memory_efficient_layer_norm", "bias_activation_fusion", "bias_gelu_fusion"),
    *("bias_dropout_fusion", "bias_dropout_add_fusion", "masked_softmax_fusion", "apply_rope_fusion", "use_fused_*"),
    *(
        "fused_single_qkv_rope",
        "grad_div_ar_fusion",
        "get_attention_mask_from_fusion",
        "activation_func_fp8_input_store",
    ),
    *("attention_backend", "use_flash_attention", "use_transformer_engine_*", "parallel_output", "scatter_embedding_*"),
    *("low_freq_factor", "high_freq_factor", "old_context_len", "rope_scaling_factor", "window_attn_skip_freq"),
    *("make_vocab_size_divisible_by", "vocab_size", "should_pad_vocab", "_*"),
}
# What megatron-core and NeMo 2 have, and the readers honour or limit by NeMo 1's names.
_CORE_HONOURED = {
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
    *("layernorm_epsilon", "layernorm_zero_centered_gamma", "normalization", "add_bias_linear", "add_qkv_bias"),
    *("gated_linear_unit", "activation_func", "position_embedding_type", "rotary_percent", "rotary_base"),
    *("rotary_interleaved", "seq_len_interpolation_factor", "seq_length", "share_embeddings_and_output_weights"),
    *("num_moe_experts", "apply_residual_connection_post_layernorm", "qk_layernorm", "window_size"),
}
CORE_KNOWN = frozenset(
    {*CORE_LIMITS, *_PARALLEL_AND_PRECISION, *_TRAINING, *_CORE_HONOURED}
    | {"transformer_layer_spec", "forward_step_fn", "data_step_fn", "generation_config", "hf_model_id"}
)
"""Keys of megatron-core and of NeMo 2's ``GPTConfig``."""

_SECTIONS = {
    "data",
    "optim",
    "tokenizer",
    "nsys_profile",
    "memory_profile",
    "inference",
    "peft",
    "megatron_timer_kwargs",
}
_NEMO1_HARMLESS = {
    *("mcore_gpt", "mcore_t5", "micro_batch_size", "global_batch_size", "rampup_batch_size", "encoder_seq_length"),
    *("seq_length", "max_position_embeddings", "pre_process", "post_process", "seed", "resume_from_checkpoint"),
    *("restore_from_path", "restore_from_ckpt*", "restore_path", "apex_transformer_log_level", "onnx_safe"),
    *("do_layer_norm_weight_decay", "grad_allreduce_chunk_size_mb", "fsdp*", "transformer_engine", "use_emha"),
    *("enable_megatron_timers", "gc_interval", "target", "nemo_version", "name", "override_vocab_size", "hidden_steps"),
    *("reset_lr*", "dist_ckpt_*", "torch_distributed_*", "skip_train", "use_loss_mask", "use_mcore_*", "validation_*"),
    *(
        "answer_only_loss",
        "sync_*",
        "save_nemo_on_validation_end",
        "hparams_file",
        "language_model_path",
        "label_smoothing",
    ),
    *(
        "report_validation_metric",
        "metric",
        "log_*",
        "estimated_*",
        "global_*",
        "dropout",
        "start_weight_decay",
        "class_*",
    ),
    *("end_weight_decay", "weight_decay", "lr", "*_sched", "openai_gelu", "tokens_head_bias", "ignore_dummy_data"),
    *(
        "rotary_percentage",
        "mcore_customization_config",
        "attention_dropout",
        "apply_rope_fusion",
        "trainer",
        "exp_manager",
    ),
}
GPT_KNOWN = frozenset(
    {*CORE_KNOWN, *NEMO1_LIMITS, *_SECTIONS, *_NEMO1_HARMLESS} | {"bias", "megatron_legacy", "qkv_bias"}
)
"""Keys of NeMo 1's GPT, beside those of the limits in ``gpt_config.py``."""

T5_KNOWN = frozenset(
    {*_PARALLEL_AND_PRECISION, *_TRAINING, *_SECTIONS, *_NEMO1_HARMLESS}
    | {"encoder", "decoder", "encoder_arch", "decoder_arch", "share_decoder_tokens_head_embeddings", "data_*"}
    | {"num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "layernorm_epsilon"}
    | {
        "bias",
        "normalize_attention_scores",
        "megatron_legacy",
        "relative_*",
        "position_embeddings_*",
        "virtual_prompt_style",
        "task_templates",
    }
)
"""Keys of NeMo 1's T5, on top and of a side, beside those of the limits in ``t5_config.py``."""

T5_LIMITS: dict[str, Limit] = {
    "hiddens": Limit(is_off, "the decoder sees what the encoder gives"),
    "apply_embedding_scaling": Limit(is_off, "it does not scale embeddings"),
    "scale_positional_embedding": Limit(is_off, "it does not scale positions"),
    "encoder_arch": Limit(is_one_of(None, "transformer"), "encoder and decoder are transformers"),
    "decoder_arch": Limit(is_one_of(None, "transformer"), "encoder and decoder are transformers"),
    "add_position_embedding": Limit(is_one_of(None, True), "it has positions"),
    **CORE_LIMITS,
}
"""Keys that change what a T5 computes, on top and of a side."""
