"""Write Hugging Face models of every family as FasterTransformer shards, without a line of the project's converters.

Each function lists FasterTransformer's tensors with the axis that ranks cut, after that family's converter
(``examples/pytorch/{gpt,gptj,gptneox,t5}/utils/huggingface_*_convert.py``); matrices are [in, out].
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Tensors = Iterator[tuple[str, Array, int | None]]
Ini = dict[str, dict[str, object]]


def write_family(model: Any, directory: Path, ranks: int = 1) -> Path:
    """Write ``directory/<ranks>-gpu`` in fp32 and return it."""
    directory = directory / f"{ranks}-gpu"
    directory.mkdir(parents=True)
    weights = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
    write, ini = _WRITERS[model.config.model_type]
    for name, array, axis in write(model.config, weights):
        if axis is None:
            np.ascontiguousarray(array).tofile(directory / f"{name}.bin")
            continue
        for rank, part in enumerate(np.split(array, ranks, axis=axis)):
            np.ascontiguousarray(part).tofile(directory / f"{name}.{rank}.bin")
    if model.config.model_type == "gpt_neox" and model.config.use_parallel_residual:
        for layer in range(model.config.num_hidden_layers):  # each rank adds it
            file = directory / f"model.layers.{layer}.mlp.attention.bias.sum.bin"
            (np.fromfile(file, np.float32) / ranks).astype(np.float32).tofile(file)
    write_ini(directory, ini(model.config))
    return directory


def write_ini(directory: Path, sections: Ini) -> None:
    lines = []
    for section, keys in sections.items():
        lines += [f"[{section}]", *(f"{key} = {value}" for key, value in keys.items())]
    (directory / "config.ini").write_text("\n".join(lines) + "\n")


def _norm(target: str, source: str, weights: dict[str, Array]) -> Tensors:
    for kind in ("weight", "bias"):
        if f"{source}.{kind}" in weights:
            yield f"{target}.{kind}", weights[f"{source}.{kind}"], None


def _out(target: str, source: str, weights: dict[str, Array]) -> Tensors:
    """A torch Linear whose outputs ranks share out."""
    yield f"{target}.weight", weights[f"{source}.weight"].T, 1
    if f"{source}.bias" in weights:
        yield f"{target}.bias", weights[f"{source}.bias"], 0


def _in(target: str, source: str, weights: dict[str, Array]) -> Tensors:
    """A torch Linear whose inputs ranks share out."""
    yield f"{target}.weight", weights[f"{source}.weight"].T, 0
    if f"{source}.bias" in weights:
        yield f"{target}.bias", weights[f"{source}.bias"], None


def _apart(target: str, sources: list[str], weights: dict[str, Array]) -> Tensors:
    """Three Linears q, k, v -> [in, 3, out]."""
    yield f"{target}.weight", np.stack([weights[f"{source}.weight"].T for source in sources], 1), 2
    if f"{sources[0]}.bias" in weights:
        yield f"{target}.bias", np.stack([weights[f"{source}.bias"] for source in sources]), 1


def _interleaved(target: str, source: str, heads: int, weights: dict[str, Array]) -> Tensors:
    """One Linear whose outputs are [heads, 3, head_size] -> [in, 3, out]."""
    weight, bias = weights[f"{source}.weight"], weights[f"{source}.bias"]
    width = weight.shape[1]
    yield f"{target}.weight", weight.reshape(heads, 3, -1, width).transpose(3, 1, 0, 2).reshape(width, 3, -1), 2
    yield f"{target}.bias", bias.reshape(heads, 3, -1).transpose(1, 0, 2).reshape(3, -1), 1


def _gptj(config: Any, weights: dict[str, Array]) -> Tensors:
    yield "model.wte", weights["transformer.wte.weight"], None
    yield from _norm("model.final_layernorm", "transformer.ln_f", weights)
    yield "model.lm_head.weight", weights["lm_head.weight"], None
    yield "model.lm_head.bias", weights["lm_head.bias"], None
    for index in range(config.n_layer):
        to, of = f"model.layers.{index}", f"transformer.h.{index}"
        yield from _norm(f"{to}.input_layernorm", f"{of}.ln_1", weights)
        parts = [f"{of}.attn.{part}_proj" for part in "qkv"]
        yield from _apart(f"{to}.attention.query_key_value", parts, weights)
        yield from _in(f"{to}.attention.dense", f"{of}.attn.out_proj", weights)
        yield from _out(f"{to}.mlp.dense_h_to_4h", f"{of}.mlp.fc_in", weights)
        yield from _in(f"{to}.mlp.dense_4h_to_h", f"{of}.mlp.fc_out", weights)


def _gptj_ini(config: Any) -> Ini:
    keys: dict[str, object] = {
        "model_name": "gptj",
        "head_num": config.n_head,
        "size_per_head": config.n_embd // config.n_head,
        "inter_size": 4 * config.n_embd,
        "num_layer": config.n_layer,
        "rotary_embedding": config.rotary_dim,
        "vocab_size": config.vocab_size,
        "start_id": config.bos_token_id,
        "end_id": config.eos_token_id,
        "weight_data_type": "fp32",
        "layernorm_eps": config.layer_norm_epsilon,
    }
    return {"gptj": keys}


def _gptneox(config: Any, weights: dict[str, Array]) -> Tensors:
    yield "model.wte", weights["gpt_neox.embed_in.weight"], None
    yield from _norm("model.final_layernorm", "gpt_neox.final_layer_norm", weights)
    yield "model.lm_head.weight", weights["lm_head.weight"], None
    for index in range(config.num_hidden_layers):
        to, of = f"model.layers.{index}", f"gpt_neox.layers.{index}"
        yield from _norm(f"{to}.input_layernorm", f"{of}.input_layernorm", weights)
        yield from _norm(f"{to}.post_attention_layernorm", f"{of}.post_attention_layernorm", weights)
        qkv = f"{of}.attention.query_key_value"
        yield from _interleaved(f"{to}.attention.query_key_value", qkv, config.num_attention_heads, weights)
        yield from _in(f"{to}.attention.dense", f"{of}.attention.dense", weights)
        yield from _out(f"{to}.mlp.dense_h_to_4h", f"{of}.mlp.dense_h_to_4h", weights)
        yield from _in(f"{to}.mlp.dense_4h_to_h", f"{of}.mlp.dense_4h_to_h", weights)
        if config.use_parallel_residual:
            both = weights[f"{of}.attention.dense.bias"] + weights[f"{of}.mlp.dense_4h_to_h.bias"]
            yield f"{to}.mlp.attention.bias.sum", both, None


def _gptneox_ini(config: Any) -> Ini:
    size = config.hidden_size // config.num_attention_heads
    keys: dict[str, object] = {
        "model_name": "gptneox",
        "head_num": config.num_attention_heads,
        "size_per_head": size,
        "inter_size": config.intermediate_size,
        "num_layer": config.num_hidden_layers,
        "rotary_embedding": int(size * config.rope_parameters["partial_rotary_factor"]),
        "vocab_size": config.vocab_size,
        "start_id": config.bos_token_id,
        "end_id": config.eos_token_id,
        "use_gptj_residual": int(config.use_parallel_residual),
        "weight_data_type": "fp32",
    }
    return {"gptneox": keys}


def _llama(config: Any, weights: dict[str, Array]) -> Tensors:
    """void-main's layout, of a model with as many key heads as heads."""
    yield "model.wte.weight", weights["model.embed_tokens.weight"], None
    yield from _norm("model.final_layernorm", "model.norm", weights)
    yield "model.lm_head.weight", weights["lm_head.weight"], None
    for index in range(config.num_hidden_layers):
        to, of = f"model.layers.{index}", f"model.layers.{index}"
        yield from _norm(f"{to}.input_layernorm", f"{of}.input_layernorm", weights)
        yield from _norm(f"{to}.post_attention_layernorm", f"{of}.post_attention_layernorm", weights)
        parts = [f"{of}.self_attn.{part}_proj" for part in "qkv"]
        yield from _apart(f"{to}.attention.query_key_value", parts, weights)
        yield from _in(f"{to}.attention.dense", f"{of}.self_attn.o_proj", weights)
        for name in ("gate_proj", "up_proj"):
            yield from _out(f"{to}.mlp.{name}", f"{of}.mlp.{name}", weights)
        yield from _in(f"{to}.mlp.down_proj", f"{of}.mlp.down_proj", weights)


def _llama_ini(config: Any) -> Ini:
    """The keys of its published example, which has no layernorm_eps."""
    size = config.hidden_size // config.num_attention_heads
    keys: dict[str, object] = {
        "model_name": "llama",
        "head_num": config.num_attention_heads,
        "size_per_head": size,
        "inter_size": config.intermediate_size,
        "num_layer": config.num_hidden_layers,
        "rotary_embedding": size,
        "vocab_size": config.vocab_size,
        "start_id": config.bos_token_id,
        "end_id": config.eos_token_id,
        "weight_data_type": "fp32",
    }
    return {"llama": keys}


def _bloom(config: Any, weights: dict[str, Array]) -> Tensors:
    yield "model.wte", weights["transformer.word_embeddings.weight"], None
    yield from _norm("model.pre_decoder_layernorm", "transformer.word_embeddings_layernorm", weights)
    yield from _norm("model.final_layernorm", "transformer.ln_f", weights)
    for index in range(config.n_layer):
        to, of = f"model.layers.{index}", f"transformer.h.{index}"
        yield from _norm(f"{to}.input_layernorm", f"{of}.input_layernorm", weights)
        yield from _norm(f"{to}.post_attention_layernorm", f"{of}.post_attention_layernorm", weights)
        qkv = f"{of}.self_attention.query_key_value"
        yield from _interleaved(f"{to}.attention.query_key_value", qkv, config.n_head, weights)
        yield from _in(f"{to}.attention.dense", f"{of}.self_attention.dense", weights)
        yield from _out(f"{to}.mlp.dense_h_to_4h", f"{of}.mlp.dense_h_to_4h", weights)
        yield from _in(f"{to}.mlp.dense_4h_to_h", f"{of}.mlp.dense_4h_to_h", weights)


def _bloom_ini(config: Any) -> Ini:
    keys: dict[str, object] = {
        "model_name": "gpt",
        "num_layer": config.n_layer,
        "head_num": config.n_head,
        "inter_size": 4 * config.hidden_size,
        "size_per_head": config.hidden_size // config.n_head,
        "vocab_size": config.vocab_size,
        "layernorm_eps": config.layer_norm_epsilon,
        "start_id": config.bos_token_id,
        "end_id": config.eos_token_id,
        "weight_data_type": "fp32",
        "layernorm_type": "pre_layernorm",
        "activation_type": "Gelu",
        "has_positional_encoding": False,
        "has_pre_decoder_layernorm": True,
        "has_post_decoder_layernorm": True,
        "use_attention_linear_bias": True,
    }
    return {"gpt": keys}


def _fairseq(prefix: str, final_norm: str, layers: int, weights: dict[str, Array]) -> Tensors:
    """What OPT and XGLM have in common."""
    yield from _norm("model.final_layernorm", f"{prefix}.{final_norm}", weights)
    for index in range(layers):
        to, of = f"model.layers.{index}", f"{prefix}.layers.{index}"
        yield from _norm(f"{to}.input_layernorm", f"{of}.self_attn_layer_norm", weights)
        yield from _norm(f"{to}.post_attention_layernorm", f"{of}.final_layer_norm", weights)
        parts = [f"{of}.self_attn.{part}_proj" for part in "qkv"]
        yield from _apart(f"{to}.attention.query_key_value", parts, weights)
        yield from _in(f"{to}.attention.dense", f"{of}.self_attn.out_proj", weights)
        yield from _out(f"{to}.mlp.dense_h_to_4h", f"{of}.fc1", weights)
        yield from _in(f"{to}.mlp.dense_4h_to_h", f"{of}.fc2", weights)


def _opt(config: Any, weights: dict[str, Array]) -> Tensors:
    yield "model.wte", weights["model.decoder.embed_tokens.weight"], None
    yield "model.wpe", weights["model.decoder.embed_positions.weight"][2:], None
    yield from _fairseq("model.decoder", "final_layer_norm", config.num_hidden_layers, weights)


def _opt_ini(config: Any) -> Ini:
    keys: dict[str, object] = {
        "model_name": "opt",
        "head_num": config.num_attention_heads,
        "size_per_head": config.hidden_size // config.num_attention_heads,
        "inter_size": config.ffn_dim,
        "max_pos_seq_len": config.max_position_embeddings,
        "num_layer": config.num_hidden_layers,
        "layernorm_eps": 1e-5,
        "layernorm_type": "pre_layernorm" if config.do_layer_norm_before else "post_layernorm",
        "activation_type": "Relu",
        "has_post_decoder_layernorm": int(config.do_layer_norm_before),
        "vocab_size": config.vocab_size,
        "start_id": config.bos_token_id,
        "end_id": config.eos_token_id,
        "weight_data_type": "fp32",
    }
    return {"gpt": keys}


def _xglm(config: Any, weights: dict[str, Array]) -> Tensors:
    yield "model.wte", weights["model.embed_tokens.weight"] * np.float32(config.d_model**0.5), None
    yield "model.wpe", _sinusoids(config.max_position_embeddings, config.d_model), None
    yield "model.lm_head.weight", weights["lm_head.weight"], None
    yield from _fairseq("model", "layer_norm", config.num_layers, weights)


def _sinusoids(rows: int, width: int) -> Array:
    """Positions from 2 on, sines then cosines, as fairseq makes them."""
    frequencies = np.exp(np.arange(width // 2) * -(np.log(10000) / (width // 2 - 1)))
    angles = (np.arange(rows) + 2)[:, None] * frequencies
    sinusoids: Array = np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)
    return sinusoids


def _xglm_ini(config: Any) -> Ini:
    keys: dict[str, object] = {
        "model_name": "xglm",
        "head_num": config.attention_heads,
        "size_per_head": config.d_model // config.attention_heads,
        "inter_size": config.ffn_dim,
        "max_pos_seq_len": config.max_position_embeddings,
        "num_layer": config.num_layers,
        "layernorm_eps": 1e-5,
        "vocab_size": config.vocab_size,
        "start_id": config.bos_token_id,
        "end_id": config.eos_token_id,
        "weight_data_type": "fp32",
    }
    return {"gpt": keys}


def _t5(config: Any, weights: dict[str, Array]) -> Tensors:
    yield "shared.weight_T", weights["shared.weight"], None
    if "lm_head.weight" in weights:
        yield "lm_head.weight", weights["lm_head.weight"], None
    for side, layers in (("encoder", config.num_layers), ("decoder", config.num_decoder_layers)):
        if f"{side}.final_layer_norm.weight" not in weights:
            continue
        yield from _norm(f"{side}.final_layer_norm", f"{side}.final_layer_norm", weights)
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield bias, weights[bias].T, 0
        for index in range(layers):
            yield from _t5_block(f"{side}.block.{index}", side == "decoder", weights)


def _t5_block(block: str, is_decoder: bool, weights: dict[str, Array]) -> Tensors:
    own, cross, mlp = f"{block}.layer.0.SelfAttention", f"{block}.layer.1.EncDecAttention", f"{block}.layer.1"
    if is_decoder:
        yield from _apart(f"{own}.qkv", [f"{own}.{part}" for part in "qkv"], weights)
        mlp = f"{block}.layer.2"
    for attention in (own, cross)[is_decoder : 1 + is_decoder]:
        for part in "qkv":
            yield from _out(f"{attention}.{part}", f"{attention}.{part}", weights)
    for attention in (own, cross)[: 1 + is_decoder]:
        yield from _in(f"{attention}.o", f"{attention}.o", weights)
    for index in range(2 + is_decoder):
        yield from _norm(f"{block}.layer.{index}.layer_norm", f"{block}.layer.{index}.layer_norm", weights)
    for to, of in (("wi", "wi"), ("wi", "wi_0"), ("wi2", "wi_1")):
        if f"{mlp}.DenseReluDense.{of}.weight" in weights:
            yield from _out(f"{mlp}.DenseReluDense.{to}", f"{mlp}.DenseReluDense.{of}", weights)
    yield from _in(f"{mlp}.DenseReluDense.wo", f"{mlp}.DenseReluDense.wo", weights)


def _t5_ini(config: Any) -> Ini:
    common: dict[str, object] = {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "d_kv": config.d_kv,
        "d_ff": config.d_ff,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets_or_max_pos_seq_len": config.relative_attention_num_buckets,
        "feed_forward_proj": config.feed_forward_proj,
        "weight_data_type": "fp32",
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": config.scale_decoder_outputs,
    }
    structure = {"t5_with_bias": "false", "use_gated_activation": int(config.is_gated_act)}
    return {
        "encoder": {**common, "num_layers": config.num_layers},
        "decoder": {**common, "num_layers": config.num_decoder_layers},
        "structure": {**structure, "position_embedding_type": "relative"},
    }


_WRITERS: dict[str, Any] = {
    "gptj": (_gptj, _gptj_ini),
    "gpt_neox": (_gptneox, _gptneox_ini),
    "bloom": (_bloom, _bloom_ini),
    "llama": (_llama, _llama_ini),
    "opt": (_opt, _opt_ini),
    "xglm": (_xglm, _xglm_ini),
    "t5": (_t5, _t5_ini),
}
