"""Fields of megatron-core and of the classes around it that change no function of a decoder that is read, by reason.

The sources of the names are those of ``core_fields.py``.
"""

from __future__ import annotations

_DIVISION = "how the work is divided over processes, and what they send"
_PRECISION = "the type that numbers are computed or kept in"
_KERNELS = "which kernel computes the same"
_MEMORY = "what is kept, computed again or offloaded"
_LOSS = "the loss, and what is added to it"
_BEGINNING = "how weights begin"
_NOISE = "noise of training, or what is logged and tested"
_MUP = "use_mup reads it, which is refused"
_VARIANT = "an attention or layer reads it that is refused by its own key"
_ROUTING = "how tokens travel to their experts"
_MULTIMODAL = "position_embedding_type mrope reads it, which is refused"
_PROGRAM = "how the program is built, not what it computes"
_VOCABULARY = "the embedding's rows say it"

WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    _DIVISION: (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
        *("pipeline_model_parallel_comm_backend", "pipeline_model_parallel_layout", "sequence_parallel"),
        *("context_parallel_size", "hierarchical_context_parallel_sizes", "max_seqlen_per_dp_cp_rank"),
        *("hybrid_context_parallel", "expert_model_parallel_size", "expert_tensor_parallel_size", "moe_extended_tp"),
        *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "first_pipeline_num_layers"),
        *("last_pipeline_num_layers", "pipeline_model_parallel_split_rank", "account_for_embedding_in_pipeline_split"),
        *("account_for_loss_in_pipeline_split", "microbatch_group_size_per_vp_stage", "variable_seq_lengths"),
        *("overlap_p2p_comm", "overlap_p2p_comm_warmup_flush", "batch_p2p_comm", "batch_p2p_sync", "cp_comm_type"),
        *("use_ring_exchange_p2p", "deallocate_pipeline_outputs", "async_tensor_model_parallel_allreduce"),
        *("tp_comm_overlap", "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag", "tp_comm_overlap_rs"),
        *("tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_atomic_ag", "tp_comm_split_rs"),
        *("tp_comm_atomic_rs", "tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1", "tp_comm_overlap_cfg"),
        *("tp_comm_bootstrap_backend", "overlap_moe_expert_parallel_comm", "ep_overlap_early_attn_memory_release"),
        *("overlap_dispatch_backward_with_experts_wgrad", "high_priority_a2a_comm_stream", "mtp_standalone"),
        *("symmetric_ar_type", "nccl_all_reduce_for_prefill", "scatter_embedding_sequence_parallel"),
        *("clone_scatter_output_in_embedding", "distribute_saved_activations", "parallel_output", "pre_process"),
        *("post_process", "pg_collection", "_pg_collection", "vp_stage", "tensor_parallel_num_weight_shards"),
        *("expert_tensor_parallel_num_weight_shards", "gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
        *("gtp_remat_opt_in_modules", "use_custom_fsdp"),
    ),
    _PRECISION: (
        *("fp16", "bf16", "params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype", "logit_dtype"),
        *("fp32_residual_connection", "apply_query_key_layer_scaling", "attention_softmax_in_fp32"),
        *("disable_bf16_reduced_precision_matmul", "fp8", "fp8_recipe", "fp8_param", "fp8_quantizer_factory"),
        *("fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad"),
        *("fp8_output_proj", "fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_param_gather"),
        *("tp_only_amax_red", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        *("fp4", "fp4_recipe", "fp4_param", "fp4_quantizer_factory", "activation_func_fp8_input_store"),
        *("disable_parameter_transpose_cache", "quant_recipe", "moe_router_dtype", "kitchen_attention_backend"),
        *("moe_router_padding_for_quantization", "moe_router_padding_for_fp8", "keep_mtp_spec_in_bf16"),
        *("restore_modelopt_state",),
    ),
    _KERNELS: (
        *("attention_backend", "flash_attention_version", "transformer_impl", "flash_decode", "mla_down_proj_fusion"),
        *("deterministic_mode", "batch_invariant_mode", "batch_invariant_backend", "masked_softmax_fusion"),
        *("persist_layer_norm", "memory_efficient_layer_norm", "bias_dropout_fusion", "bias_dropout_add_fusion"),
        *("apply_rope_fusion", "fused_single_qkv_rope", "fused_residual_rmsnorm", "use_fused_weighted_squared_relu"),
        *("gradient_accumulation_fusion", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
        *("use_transformer_engine_op_fuser", "use_transformer_engine_full_layer_spec", "mlp_chunks_for_prefill"),
        *("mlp_chunks_for_training", "use_inference_optimized_layers", "inference_fuse_tp_communication"),
        *("inference_disable_triton_nvls_kernels", "inference_grouped_gemm_backend"),
        *("inference_moe_disable_fused_quant_kernels", "inference_moe_token_dispatcher_type"),
        *("use_grouped_gemm_for_dense_mlp", "dense_grouped_gemm", "use_arbitrary_attention_mask"),
        *("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules"),
        *("cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph", "cuda_graph_warmup_steps"),
        *("inference_cuda_graph_scope",),
    ),
    _MEMORY: (
        *(
            "recompute_granularity",
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
            "cache_mla_latents",
        ),
        *("num_microbatches_with_partial_activation_checkpoints", "moe_layer_recompute", "delay_wgrad_compute"),
        *("defer_embedding_wgrad_compute", "wgrad_deferral_limit", "cpu_offloading", "cpu_offloading_num_layers"),
        *("cpu_offloading_activations", "cpu_offloading_weights", "cpu_offloading_double_buffering"),
        *("cpu_offloading_retain_pinned_cpu_buffers", "_cpu_offloading_context", "offload_modules"),
        *("fine_grained_activation_offloading", "min_offloaded_tensor_size", "delay_offload_until_cuda_graph"),
        *("delta_offload_bytes_across_pp_ranks", "activation_offload_fraction", "moe_paged_stash"),
        *(
            "fine_grained_offloading_max_inflight_offloads",
            "moe_paged_stash_page_size",
            "hetereogenous_dist_checkpoint",
        ),
        *("moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_buffer_size_factor_cpu"),
    ),
    _LOSS: (
        *("calculate_per_token_loss", "fp16_lm_cross_entropy", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
        *("mtp_loss_scaling_factor", "mtp_detach_heads"),
        *("mtp_hsm", "mtp_block_spec", "mtp_layer_types", "mtp_sliding_windows", "grad_scale_func", "no_sync_func"),
        *("grad_sync_func", "param_sync_func", "finalize_model_grads_func", "moe_grad_scale_func"),
        *("mtp_grad_scale_func", "experimental_attention_variant_loss_scale_func", "moe_router_bias_update_rate"),
        *("moe_router_quantile_balancing_ema", "qk_clip", "qk_clip_alpha", "qk_clip_threshold"),
        *("distill_submodule", "kd_config", "teacher"),
    ),
    _BEGINNING: (
        *("perform_initialization", "use_cpu_initialization", "init_method", "output_layer_init_method"),
        *("init_method_std", "embedding_init_method", "embedding_init_method_std", "init_model_with_meta_device"),
    ),
    _MUP: ("mup_width_mult", "mup_base_hidden_size", "mup_embedding_mult", "mup_base_head_dim", "mup_attn_scale_power"),
    _NOISE: (
        *("hidden_dropout", "attention_dropout", "ffn_dropout", "moe_input_jitter_eps", "use_te_rng_tracker"),
        *("te_rng_tracker", "inference_rng_tracker", "inference_sampling_seed", "test_mode", "log_max_attention_logit"),
        *("moe_per_layer_logging", "moe_enable_routing_replay", "config_logger_dir", "timers", "barrier_with_L1_time"),
    ),
    _ROUTING: (
        *("moe_grouped_gemm", "moe_use_legacy_grouped_gemm", "moe_use_grouped_tensor", "moe_single_grouped_weight"),
        *("moe_single_grouped_bias", "moe_token_dispatcher_type", "moe_enable_deepep", "moe_flex_dispatcher_backend"),
        *("moe_permute_fusion_into_hybridep", "moe_hybridep_pad_uneven_dispatch_inputs", "moe_permute_fusion"),
        *("moe_router_fusion", "moe_flex_dispatcher_num_sms", "moe_deepep_num_sms", "moe_hybridep_num_sms"),
        *("moe_hybridep_num_blocks_permute", "moe_hybridep_num_blocks_unpermute", "moe_ncclep_static_shape"),
        *("moe_hybridep_num_sms_preprocessing", "moe_ncclep_zero_copy", "moe_pad_expert_input_to_capacity"),
        *("moe_pad_experts_for_cuda_graph_inference", "moe_token_drop_policy", "moe_shared_expert_overlap"),
        *("use_grouped_gemm_for_shared_expert", "moe_shared_expert_glu_interleave_size", "moe_dispatch_fwd_dtype"),
        *("moe_combine_bwd_dtype",),
    ),
    _VARIANT: (
        *("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_topk_freq"),
        *("dsa_indexer_skip_topk_offset", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"),
        *("dsa_kernel_backend", "dsa_indexer_rope_interleaved", "dsa_indexer_rotate_activation"),
        *("dsa_indexer_scoring_relu", "dsa_indexer_k_norm_epsilon", "dsa_indexer_k_norm_fp32"),
        *(
            "use_mamba_mem_eff_path",
            "mamba_training_ssm_states_dtype",
            "gdp_num_householder",
            "gdp_cutedsl_kernel",
        ),
        *("gdp_num_chunk_states_to_recompute", "mhc_num_residual_streams", "mhc_sinkhorn_iterations"),
        *("mhc_init_gating_factor", "mhc_recompute_layer_num", "kimi_linear_num_heads", "kimi_linear_head_dim"),
        *("kimi_linear_conv_kernel_size", "kimi_kda_gate_lower_bound", "kimi_attn_res_block_size"),
    ),
    _MULTIMODAL: ("mrope_section",),
    _PROGRAM: (
        *("_builder_", "builder", "config", "extra_checkpoint_metadata", "hf_model_id", "hf_model_revision"),
        *("generation_config", "forward_step_fn", "data_step_fn", "is_vision_language"),
    ),
    _VOCABULARY: ("vocab_size", "should_pad_vocab", "make_vocab_size_divisible_by"),
}
