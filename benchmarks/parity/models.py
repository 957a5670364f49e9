"""Models that ``benchmarks.parity.limits`` looks at: the demonstration checkpoint, and made-up ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.parity.damages import HEADS, HIDDEN, Family
from evaluation.parity.arguments import HUGGING_FACE
from evaluation.parity.references import HuggingFaceReference, open_reference

VOCAB, LOGIT_SPREAD, SHARPNESS = 2000, 3.0, 4.0
DEMO = Path(__file__).parents[2] / "examples" / "gpt3_demo" / "checkpoints"
_OUTPUTS = (
    "attention.dense.weight",
    "dense_4h_to_h.weight",
    "out_proj.weight",
    "fc_out.weight",
    ".o.weight",
    "wo.weight",
)


def _neox(layers: int) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": layers}
    more = {"intermediate_size": 4 * HIDDEN, "max_position_embeddings": 128, "hidden_act": "gelu_fast"}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, **sizes, **more))


def _gptj(layers: int) -> Any:
    from transformers import GPTJConfig, GPTJForCausalLM

    sizes = {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": layers, "rotary_dim": 16, "n_positions": 128}
    return GPTJForCausalLM(GPTJConfig(vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, **sizes))


def _t5(layers: int) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": HIDDEN, "num_heads": HEADS, "d_kv": HIDDEN // HEADS, "d_ff": 4 * HIDDEN, "num_layers": layers}
    more = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes, **more))


_T5_LAYER = "decoder.block.6.layer."
FAMILIES = {
    "demo": Family(
        *("GPT", 6, None, "model.layers.3.attention.query_key_value.weight"),
        "model.layers.3.mlp.dense_h_to_4h.weight",
        *("model.layers.2.post_attention_layernorm.weight", "model.final_layernorm.weight"),
    ),
    "gpt_neox": Family(
        *("GPT-NeoX", 24, _neox, "model.layers.12.attention.query_key_value.weight"),
        "model.layers.12.mlp.dense_h_to_4h.weight",
        *("model.layers.12.input_layernorm.weight", "model.final_layernorm.weight"),
    ),
    "gptj": Family(
        *("GPT-J", 16, _gptj, "model.layers.8.attention.query_key_value.weight"),
        "model.layers.8.mlp.dense_h_to_4h.weight",
        *("model.layers.8.input_layernorm.weight", "model.final_layernorm.weight"),
    ),
    "t5": Family(
        *("T5", 12, _t5, f"{_T5_LAYER}0.SelfAttention.qkv.weight"),
        f"{_T5_LAYER}2.DenseReluDense.wi.weight",
        f"{_T5_LAYER}0.layer_norm.weight",
        "decoder.final_layer_norm.weight",
    ),
}


def open_family(family: Family, directory: Path) -> tuple[Path, HuggingFaceReference]:
    """The checkpoint to convert, and what computes it."""
    if family.build is None:
        reference = open_reference(DEMO, HUGGING_FACE, directory / "scratch")[0]
        assert isinstance(reference, HuggingFaceReference)
        return DEMO, reference
    model = sharpened(family.build(family.layers), family.layers, family.model_type == "T5")
    model.save_pretrained(directory / "source")
    return directory / "source", HuggingFaceReference("transformers", model, family.model_type == "T5")


@torch.no_grad()
def sharpened(model: Any, layers: int, is_t5: bool) -> Any:
    """Make attention and logits as sharp as a trained model's: initial weights attend evenly and prefer nothing."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        parameter.normal_(0, parameter.shape[-1] ** -0.5)  # what goes through keeps its size
        if any(part in name for part in ("q_proj", "k_proj", "SelfAttention.q", "SelfAttention.k")):
            parameter *= SHARPNESS**0.5 / (HIDDEN // HEADS) ** (0.25 if is_t5 else 0)
        if "query_key_value" in name:  # of each head q, k, v
            parameter.view(HEADS, 3, -1, parameter.shape[-1])[:, :2] *= SHARPNESS**0.5
        if name.endswith(_OUTPUTS):  # GPT-2's way: so deep a sum keeps its size too
            parameter *= (2 * layers) ** -0.5
    head = model.get_output_embeddings()
    head.weight *= LOGIT_SPREAD
    return model.eval()
