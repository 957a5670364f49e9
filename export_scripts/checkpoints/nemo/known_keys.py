"""Every key of NeMo 1's configurations that is known, beside megatron-core's fields (``core_fields.py``).

Sources: NeMo 1.0 to 2.1, the keys of ``megatron_gpt_config.yaml``, ``megatron_t5_config.yaml``,
``megatron_model_base_config.yaml`` and the fine-tuning configurations, and those that ``megatron_base_model.py``,
``megatron_gpt_model.py`` (``mcore_model_customize``), ``megatron_lm_encoder_decoder_model.py`` and
``megatron_t5_model.py`` read. What a model honours beside these stands in ``gpt_config.py`` and ``t5_config.py``.
"""

from __future__ import annotations

from export_scripts.checkpoints.nemo.core_fields import CORE_KNOWN, CORE_LIMITS
from export_scripts.checkpoints.nemo.core_without_effect import WITHOUT_EFFECT
from export_scripts.checkpoints.nemo.limits import Limit, is_off, is_one_of

_OTHER_LAYERS = ("megatron_falcon_gpt", "megatron_gpt_hyena")
"""Names by which NeMo chooses layers that are no GPT's (``megatron_gpt_model.py``, ``get_specs``)."""
NEMO1_LIMITS: dict[str, Limit] = {
    **CORE_LIMITS,
    "apply_embedding_scaling": Limit(is_off, "it does not scale embeddings"),
    "scale_positional_embedding": Limit(is_off, "it does not scale the rotation"),
    "drop_layers": Limit(is_off, "every layer is computed"),
    "hyena": Limit(is_off, "it has attention"),
    "retro": Limit(is_off, "it looks nothing up"),
    "megatron_lm_head_scale": Limit(is_off, "it does not scale logits"),
    "name": Limit(lambda value: value not in _OTHER_LAYERS, "its layers are a GPT's"),
}
"""Keys of NeMo 1's GPT."""

_SECTIONS = {
    *("data", "optim", "tokenizer", "trainer", "exp_manager", "nsys_profile", "memory_profile", "inference", "peft"),
    *("megatron_timer_kwargs", "mcore_customization_config"),
}
_WITHOUT_EFFECT = {
    *("mcore_gpt", "mcore_t5", "target", "nemo_version", "hidden_steps", "override_vocab_size"),
    *("encoder_seq_length", "max_position_embeddings", "seq_length", "pre_process", "post_process"),
    *("rotary_percentage", "openai_gelu", "onnx_safe", "bias_gelu_fusion", "tokens_head_bias"),
    *("micro_batch_size", "global_batch_size", "rampup_batch_size", "seed", "precision", "megatron_amp_O2"),
    *("native_amp_init_scale", "native_amp_growth_interval", "hysteresis", "fp8_e4m3", "fp8_hybrid", "fp8_params"),
    *("reduce_amax", "transformer_engine", "use_emha", "use_flash_attention", "get_attention_mask_from_fusion"),
    *("activations_checkpoint_granularity", "activations_checkpoint_method", "activations_checkpoint_num_layers"),
    *("activations_checkpoint_layers_per_pipeline", "activations_checkpoint_recurrent"),
    *("num_micro_batches_with_partial_activation_checkpoints", "contiguous_micro_batch", "cp_partition_mode"),
    *("use_scaled_init_method", "dropout", "embedding_dropout", "do_layer_norm_weight_decay", "label_smoothing"),
    *("grad_allreduce_chunk_size_mb", "grad_div_ar_fusion", "gradient_as_bucket_view", "async_grad_allreduce"),
    *("contiguous_grad_bucket", "fp32_grad_accum", "distributed_adam_bucket_merge_size", "with_fp32_embedding_grads"),
    *("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size", "use_tp_pp_dp_mapping"),
    *("ub_tp_comm_overlap", "ub_tp_comm_overlap_cfg", "ub_tp_comm_bootstrap_backend", "sync_batch_comm", "sharp"),
    *("nccl_communicator_config_path", "fsdp", "fsdp_grad_reduce_dtype", "fsdp_sharded_checkpoint"),
    *("fsdp_sharding_strategy", "fsdp_use_orig_params", "apex_transformer_log_level", "enable_megatron_timers"),
    *("gc_interval", "log_token_counts", "dist_ckpt_format", "dist_ckpt_assume_constant_structure"),
    *("dist_ckpt_load_on_device", "dist_ckpt_load_strictness", "dist_ckpt_parallel_dist_opt"),
    *("dist_ckpt_parallel_load", "dist_ckpt_parallel_save", "dist_ckpt_parallel_save_within_dp"),
    *("dist_ckpt_torch_dist_multiproc", "resume_from_checkpoint", "restore_from_path", "restore_from_ckpt"),
    *("restore_from_ckpt_name", "restore_path", "language_model_path", "hparams_file", "save_nemo_on_validation_end"),
    *("reset_lr", "reset_lr_steps", "lr", "weight_decay", "start_weight_decay", "end_weight_decay", "skip_train"),
    *("ignore_dummy_data", "use_loss_mask", "answer_only_loss", "metric", "report_validation_metric"),
    *("report_validation_accuracy", "validation_drop_last", "validation_global_batch_size", "validation_metric"),
    *("validation_micro_batch_size", "validation_param_sync_overlap", "skip_fp8_attention_checkpoint_load"),
}
# Of both: NeMo 1 has words of its own for these.
_HONOURED = {"bias", "qkv_bias", "megatron_legacy"}
GPT_KNOWN = frozenset({*CORE_KNOWN, *NEMO1_LIMITS, *_SECTIONS, *_WITHOUT_EFFECT, *_HONOURED})
"""Keys of NeMo 1's GPT, beside those of the limits in ``gpt_config.py``."""

T5_KNOWN = frozenset(
    {*_SECTIONS, *_WITHOUT_EFFECT, "bias", "megatron_legacy", "normalize_attention_scores"}
    | {name for names in WITHOUT_EFFECT.values() for name in names}
    | {"encoder", "decoder", "encoder_arch", "decoder_arch", "share_decoder_tokens_head_embeddings"}
    | {"num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "layernorm_epsilon"}
    | {"name", "relative_attention_num_buckets", "bias_activation_fusion", "virtual_prompt_style", "task_templates"}
    # What only rotation or experts read, which a T5 is refused with.
    | {"rotary_base", "rotary_percentage", "seq_len_interpolation_factor", "moe_frequency", "moe_dropout"}
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
