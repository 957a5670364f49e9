"""The tensors that the OpenAI API needs beyond FasterTransformer's, as config.pbtxt declares them.

Written out here, not imported: clients know them by these names, types and shapes.
"""

INPUTS = {
    **dict.fromkeys(("frequency_penalty", "output_presence_penalty", "min_p"), ("TYPE_FP32", ["1"])),
    **dict.fromkeys(("logit_bias_ids", "stop_token_ids"), ("TYPE_INT32", ["-1"])),
    "max_speculative_tokens": ("TYPE_INT32", ["1"]),
    "logit_bias_values": ("TYPE_FP32", ["-1"]),
    **dict.fromkeys(("ignore_eos", "is_return_raw_log_probs"), ("TYPE_BOOL", ["1"])),
    **dict.fromkeys(("num_top_log_probs", "num_context_top_log_probs"), ("TYPE_UINT32", ["1"])),
    **dict.fromkeys(("guided_decoding_guide_type", "guided_decoding_guide", "lora_name"), ("TYPE_STRING", ["1"])),
}
OUTPUTS = {
    "finish_reason": ("TYPE_INT32", ["-1"]),
    "output_raw_log_probs": ("TYPE_FP32", ["-1", "-1"]),
    "output_top_log_probs": ("TYPE_FP32", ["-1", "-1", "-1"]),
    "output_top_ids": ("TYPE_UINT32", ["-1", "-1", "-1"]),
    "context_top_log_probs": ("TYPE_FP32", ["-1", "-1"]),
    "context_top_ids": ("TYPE_UINT32", ["-1", "-1"]),
}
