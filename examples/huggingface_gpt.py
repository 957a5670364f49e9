"""Read a legacy NeMo GPT archive as a Hugging Face model, independently of the rest of the project."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast


def load_nemo(path: Path) -> tuple[GPT2LMHeadModel, GPT2TokenizerFast]:
    """Read a legacy NeMo GPT (one partition, GPT-2 BPE, tied embeddings) as a Hugging Face model in fp32."""
    with tarfile.open(path) as tar:
        files = {member.name.removeprefix("./"): tar.extractfile(member) for member in tar if member.isfile()}
        content = {name: stream.read() for name, stream in files.items() if stream}
    config = yaml.safe_load(content["model_config.yaml"])
    source = torch.load(io.BytesIO(content["model_weights.ckpt"]), map_location="cpu", weights_only=True)
    source = {name.removeprefix("model.language_model."): tensor.float() for name, tensor in source.items()}
    with tempfile.TemporaryDirectory() as folder:
        for key, name in (("vocab_file", "vocab.json"), ("merge_file", "merges.txt")):
            (Path(folder) / name).write_bytes(content[config["tokenizer"][key].removeprefix("nemo:")])
        tokenizer = GPT2TokenizerFast.from_pretrained(folder)

    model = GPT2LMHeadModel(
        GPT2Config(
            # NeMo pads the vocabulary; the padding stays, as it does in FasterTransformer's shards.
            vocab_size=source["embedding.word_embeddings.weight"].shape[0],
            n_positions=config["max_position_embeddings"],
            n_embd=config["hidden_size"],
            n_layer=config["num_layers"],
            n_head=config["num_attention_heads"],
            n_inner=config["ffn_hidden_size"],
            activation_function="gelu_new",  # the tanh form, which NeMo's fused bias and GELU computes
            layer_norm_epsilon=config["layernorm_epsilon"],
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    missing, unexpected = model.load_state_dict(rename_weights(source, config["num_attention_heads"]), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # that one is tied
        raise SystemExit(f"{path}: missing {missing}, unexpected {unexpected}")
    return model.eval(), tokenizer


def rename_weights(source: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """Map NeMo's legacy keys to Hugging Face's; GPT2's Conv1D keeps its matrices transposed."""
    names = {
        "input_layernorm": "ln_1",
        "self_attention.query_key_value": "attn.c_attn",
        "self_attention.dense": "attn.c_proj",
        "post_attention_layernorm": "ln_2",
        "mlp.dense_h_to_4h": "mlp.c_fc",
        "mlp.dense_4h_to_h": "mlp.c_proj",
    }
    result = {
        "transformer.wte.weight": source["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": source["embedding.position_embeddings.weight"],
        "transformer.ln_f.weight": source["encoder.final_layernorm.weight"],
        "transformer.ln_f.bias": source["encoder.final_layernorm.bias"],
    }
    for key, tensor in source.items():
        if not key.startswith("encoder.layers."):
            continue
        layer, _, rest = key.removeprefix("encoder.layers.").partition(".")
        name, _, kind = rest.rpartition(".")
        if name == "self_attention.query_key_value":  # rows [heads, 3, size] -> [3, heads, size]
            tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        result[f"transformer.h.{layer}.{names[name]}.{kind}"] = tensor.T.contiguous() if tensor.dim() == 2 else tensor
    return result
