"""Read the demonstration checkpoints as Hugging Face models, independently of the rest of the project."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPT2TokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Weights = dict[str, torch.Tensor]
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def load(path: Path) -> tuple[PreTrainedModel, GPT2TokenizerFast]:
    """Read a demonstration checkpoint in fp32: NeMo's archive, or Megatron-LM's directory (both with GPT-2 BPE)."""
    return load_megatron(path) if path.is_dir() else load_nemo(path)


def merge(model: PreTrainedModel, adapter: Path) -> None:
    """Add a LoRA adapter, as PEFT saves one, to a model's weights."""
    config, tensors = json.loads((adapter / "adapter_config.json").read_text()), load_file(adapter / ADAPTER_WEIGHTS)
    for name, down in tensors.items():
        module, is_down, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
        if is_down:
            product = tensors[name.replace("lora_A", "lora_B")].float() @ down.float()
            model.get_submodule(module).weight.data += config["lora_alpha"] / config["r"] * product


def load_nemo(path: Path) -> tuple[PreTrainedModel, GPT2TokenizerFast]:
    """Read a legacy GPT or a megatron-core Llama (one partition, GPT-2 BPE, tied embeddings) in fp32."""
    with tarfile.open(path) as tar:
        files = {member.name.removeprefix("./"): tar.extractfile(member) for member in tar if member.isfile()}
        content = {name: stream.read() for name, stream in files.items() if stream}
    config = yaml.safe_load(content["model_config.yaml"])
    source = torch.load(io.BytesIO(content["model_weights.ckpt"]), map_location="cpu", weights_only=True)
    source = {
        name.removeprefix("model.").removeprefix("language_model."): tensor.float() for name, tensor in source.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        for key, name in (("vocab_file", "vocab.json"), ("merge_file", "merges.txt")):
            (Path(folder) / name).write_bytes(content[config["tokenizer"][key].removeprefix("nemo:")])
        tokenizer = GPT2TokenizerFast.from_pretrained(folder)

    build = build_llama if config["mcore_gpt"] else build_gpt
    return filled(path, *build(config, source, tokenizer.eos_token_id)), tokenizer


def load_megatron(path: Path) -> tuple[PreTrainedModel, GPT2TokenizerFast]:
    """Read a mixture that Megatron-LM saved as torch_dist (tied embeddings) in fp32."""
    folder = path / f"iter_{int((path / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    arguments = vars(torch.load(folder / "common.pt", weights_only=False)["args"])
    reader = dcp.FileSystemReader(folder)
    saved: Any = reader.read_metadata().state_dict_metadata
    source = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in saved.items()}
    dcp.load(source, storage_reader=reader, no_dist=True)
    tokenizer = GPT2TokenizerFast.from_pretrained(path)
    source = {name: tensor.float() for name, tensor in source.items()}
    return filled(path, *build_mixture(arguments, source, tokenizer.eos_token_id)), tokenizer


def filled(path: Path, model: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    """Put all weights into a model."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # that one is tied
        raise SystemExit(f"{path}: missing {missing}, unexpected {unexpected}")
    return model.eval()


def build_gpt(config: dict[str, Any], source: Weights, end_id: int) -> tuple[PreTrainedModel, Weights]:
    """Build an empty GPT-2 of a legacy GPT's dimensions, and rename its weights."""
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
            bos_token_id=end_id,
            eos_token_id=end_id,
        )
    )
    return model, rename_gpt(source, config["num_attention_heads"])


def build_llama(config: dict[str, Any], source: Weights, end_id: int) -> tuple[PreTrainedModel, Weights]:
    """Build an empty Llama of a megatron-core model's dimensions, and rename its weights."""
    model = LlamaForCausalLM(
        LlamaConfig(
            **common_keys(config, source, end_id),
            intermediate_size=config["ffn_hidden_size"],
            rms_norm_eps=config["layernorm_epsilon"],
        )
    )
    return model, rename_llama(
        source, config["num_query_groups"], config["hidden_size"] // config["num_attention_heads"]
    )


def build_mixture(config: dict[str, Any], source: Weights, end_id: int) -> tuple[PreTrainedModel, Weights]:
    """Build an empty mixture of Qwen3 of a Megatron-LM model's arguments, and rename its weights."""
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **common_keys(config, source, end_id),
            moe_intermediate_size=config["moe_ffn_hidden_size"],
            num_experts=config["num_experts"],
            num_experts_per_tok=config["moe_router_topk"],
            norm_topk_prob=True,  # Megatron-LM's softmax is over the chosen
            head_dim=config["kv_channels"],
            rms_norm_eps=config["norm_epsilon"],
        )
    )
    return model, rename_mixture(source, config["num_query_groups"], config["kv_channels"])


def common_keys(config: dict[str, Any], source: Weights, end_id: int) -> dict[str, Any]:
    """Return the keys of Llama's configuration and of its relatives' that Megatron has for both."""
    return {
        "vocab_size": source["embedding.word_embeddings.weight"].shape[0],
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_query_groups"],
        "max_position_embeddings": config["max_position_embeddings"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rotary_base"]},
        "tie_word_embeddings": True,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
    }


def rename_gpt(source: Weights, heads: int) -> Weights:
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


def rename_llama(source: Weights, groups: int, size: int) -> Weights:
    """Map megatron-core's keys to Hugging Face's; linear_qkv is cut by group, linear_fc1 into gate and up."""
    names = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    }
    result = {
        "model.embed_tokens.weight": source["embedding.word_embeddings.weight"],
        "model.norm.weight": source["decoder.final_layernorm.weight"],
    }
    for key, tensor in source.items():
        if not key.startswith("decoder.layers."):
            continue
        layer, _, name = key.removeprefix("decoder.layers.").partition(".")
        prefix = f"model.layers.{layer}."
        if name == "self_attention.linear_qkv.weight":
            result |= {f"{prefix}{side}": part for side, part in cut_qkv(tensor, groups, size)}
        elif name == "mlp.linear_fc1.weight":
            result[f"{prefix}mlp.gate_proj.weight"], result[f"{prefix}mlp.up_proj.weight"] = tensor.chunk(2)
        else:
            result[prefix + names[name]] = tensor
    return result


def rename_mixture(source: Weights, groups: int, size: int) -> Weights:
    """Map Megatron-LM's keys, whose tensors have a first axis of layers, to Hugging Face's."""
    names = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.experts.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.experts.linear_fc2.weight": "mlp.experts.down_proj",
    }
    result = {
        "model.embed_tokens.weight": source["embedding.word_embeddings.weight"],
        "model.norm.weight": source["decoder.final_layernorm.weight"],
    }
    for key, layers in source.items():
        name = key.removeprefix("decoder.layers.")
        for layer, tensor in enumerate(layers if name != key else ()):
            prefix = f"model.layers.{layer}."
            if name == "self_attention.linear_qkv.weight":
                result |= {f"{prefix}{side}": part for side, part in cut_qkv(tensor, groups, size)}
            else:
                result[prefix + names[name]] = tensor
    return result


def cut_qkv(tensor: torch.Tensor, groups: int, size: int) -> list[tuple[str, torch.Tensor]]:
    """Cut rows [groups, (queries of a group, key, value), size] into three matrices, with Hugging Face's keys."""
    rows = tensor.unflatten(0, (groups, -1, size))
    parts = rows.split((rows.shape[1] - 2, 1, 1), dim=1)
    return [(f"self_attn.{side}_proj.weight", part.flatten(0, 2)) for side, part in zip("qkv", parts, strict=True)]
