"""Tiny T5s whose weights are the same everywhere: as transformers has them, and arranged as NeMo saves them.

The arrangement is written from NeMo's sources and ``hf_t5-v1_1_to_nemo.py``, not from the tables under test. It starts
from *plain* weights: transformers' names, each projection apart, with ``.bias`` beside ``.weight`` where there is one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

VOCAB, WIDTH, HEADS, SIZE, INTER, BUCKETS = 48, 24, 4, 8, 20, 8
ENCODER_IDS = np.array([[7, 3, 22, 41, 5, 0, 9, 12, 30, 11, 2], [1, 1, 40, 8, 33, 6, 29, 17, 4, 3, 44]])
DECODER_IDS = np.array([[0, 14, 25, 3, 8, 19], [0, 47, 2, 2, 31, 6]])

VOCABULARY = {"vocab.txt": "\n".join(["[PAD]", "[unused1]", "[CLS]", "[SEP]", "a"]).encode()}
"""Tokenizer of a NeMo archive: BERT's, of few words."""

Plain = dict[str, torch.Tensor]


def huggingface_t5(is_multilingual: bool = False, is_untied: bool = False, **changes: Any) -> Any:
    """Build a model in fp32 with every weight filled; heads * size differs from the width, as in real T5s."""
    import transformers

    config_class = transformers.MT5Config if is_multilingual else transformers.T5Config
    model_class = transformers.MT5ForConditionalGeneration if is_multilingual else None
    dims = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": SIZE, "d_ff": INTER, "num_heads": HEADS}
    layers = {"num_layers": 2, "num_decoder_layers": 3, "relative_attention_num_buckets": BUCKETS}
    config = config_class(**{**dims, **layers, "decoder_start_token_id": 0, **changes})
    model = (model_class or transformers.T5ForConditionalGeneration)(config).eval()
    if is_untied:
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(config.vocab_size, WIDTH))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(filling(name, tuple(parameter.shape)))
    return model


def filling(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Normal numbers that depend on the name alone (numpy's legacy generator is frozen); norms lie around 1."""
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape) * 0.3
    return torch.from_numpy((values + 1 if "norm" in name else values).astype(np.float32))


def logits_of(model: Any) -> np.ndarray:
    """What transformers computes for the fixed ids."""
    encoder, decoder = torch.from_numpy(ENCODER_IDS), torch.from_numpy(DECODER_IDS)
    with torch.no_grad():
        return np.asarray(model(input_ids=encoder, decoder_input_ids=decoder).logits.numpy())


def plain_from_huggingface(model: Any) -> Plain:
    """Each weight once, under transformers' names."""
    return {name: value.detach() for name, value in model.named_parameters()}


def plain_from_nemo(state: Mapping[str, torch.Tensor], heads: int) -> Plain:
    """Take the fused projections of a NeMo state dict (head by head, one rank) apart again."""
    plain: Plain = {}
    for key, value in state.items():
        if key.startswith("enc_dec_model.decoder_embedding."):
            continue
        name = _huggingface_name(key)
        parts = {"qkv": "qkv", "kv": "kv"}.get(name.rpartition(".")[0].rpartition(".")[2])
        if parts is None:
            plain[name] = value
            continue
        by_head = value.reshape(heads, len(parts), -1, *value.shape[1:])
        for index, part in enumerate(parts):
            plain[name.replace(f".{parts}.", f".{part}.")] = by_head[:, index].reshape(-1, *value.shape[1:])
    return plain


_OUTER = {
    "encoder_embedding.word_embeddings.weight": "shared.weight",
    "encoder_embedding.position_embeddings.weight": "positions.weight",
    "tokens_head.bias": "lm_head.bias",
}
_INNER = {
    "encoder": {
        "input_layernorm": "layer.0.layer_norm",
        "self_attention.query_key_value": "layer.0.SelfAttention.qkv",
        "self_attention.dense": "layer.0.SelfAttention.o",
        "post_attention_layernorm": "layer.1.layer_norm",
        "mlp.dense_h_to_4h": "layer.1.DenseReluDense.wi",
        "mlp.dense_4h_to_h": "layer.1.DenseReluDense.wo",
    },
    "decoder": {
        "input_layernorm": "layer.0.layer_norm",
        "self_attention.query_key_value": "layer.0.SelfAttention.qkv",
        "self_attention.dense": "layer.0.SelfAttention.o",
        "post_attention_layernorm": "layer.1.layer_norm",
        "inter_attention.query": "layer.1.EncDecAttention.q",
        "inter_attention.key_value": "layer.1.EncDecAttention.kv",
        "inter_attention.dense": "layer.1.EncDecAttention.o",
        "post_inter_attention_layernorm": "layer.2.layer_norm",
        "mlp.dense_h_to_4h": "layer.2.DenseReluDense.wi",
        "mlp.dense_4h_to_h": "layer.2.DenseReluDense.wo",
    },
}


def _huggingface_name(key: str) -> str:
    key = key.removeprefix("enc_dec_model.")
    if key in _OUTER:
        return _OUTER[key]
    key = key.removeprefix("enc_dec_model.")
    side, _, rest = key.partition(".model.")
    name, _, kind = rest.rpartition(".")
    if name == "final_layernorm":
        return f"{side}.final_layer_norm.{kind}"
    _, layer, name = name.split(".", 2)
    return f"{side}.block.{layer}.{_INNER[side][name]}.{kind}"


@dataclass(frozen=True)
class Saving:
    """How NeMo trained and saved a model.

    Attributes:
        tensor, pipeline: parallelism; half of the pipeline's stages are the encoder's.
        is_legacy: fused projections ordered by q, k, v.
        has_fused_gate: the "fast-" activations' one projection.
        has_norm_less_one: LayerNorm1P.
        has_wrapper: the half-precision wrapper's name stands in the keys.
    """

    tensor: int = 1
    pipeline: int = 1
    is_legacy: bool = False
    has_fused_gate: bool = False
    has_norm_less_one: bool = False
    has_wrapper: bool = False


def nemo_states(plain: Plain, heads: int, saving: Saving) -> dict[str, dict[str, torch.Tensor]]:
    """Arrange plain weights as NeMo's files: path within the checkpoint -> state dict."""
    states = {}
    for rank in range(saving.tensor):
        cut = {name: _cut(name, value, rank, saving.tensor) for name, value in plain.items()}
        for stage in range(saving.pipeline):
            state = _stage(cut, stage, heads // saving.tensor, saving)
            if saving.has_wrapper:
                state = {key.replace("enc_dec_model.", "enc_dec_model.module.", 1): v for key, v in state.items()}
            folder = f"tp_rank_{rank:02d}_pp_rank_{stage:03d}/" if saving.pipeline > 1 else ""
            folder = folder or (f"mp_rank_{rank:02d}/" if saving.tensor > 1 else "")
            states[f"{folder}model_weights.ckpt"] = state
    return states


def _cut(name: str, value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """One tensor-parallel rank's part: rows of column-parallel linears, columns of row-parallel ones."""
    part = name.split(".")[-2]
    if "norm" in name or part in ("relative_attention_bias", "positions") or (part in "o wo" and "bias" in name):
        return value
    return value.chunk(ranks, dim=1 if part in ("o", "wo") else 0)[rank].clone()


def _stage(plain: Plain, stage: int, heads: int, saving: Saving) -> dict[str, torch.Tensor]:
    """One pipeline stage's state dict, layers counted from 0."""
    if saving.pipeline == 1:
        state = {**_side(plain, "encoder", 0, 1, heads, saving), **_side(plain, "decoder", 0, 1, heads, saving)}
    else:
        half = saving.pipeline // 2
        state = _side(plain, ("encoder", "decoder")[stage // half], stage % half, half, heads, saving)
    if stage == saving.pipeline - 1:
        for kind in ("weight", "bias"):
            if f"lm_head.{kind}" in plain:
                state[f"enc_dec_model.tokens_head.{kind}"] = plain[f"lm_head.{kind}"]
        if saving.pipeline > 1 and "lm_head.weight" not in plain:
            state["enc_dec_model.word_embeddings.weight"] = plain["shared.weight"]
    return state


def _side(plain: Plain, side: str, stage: int, stages: int, heads: int, saving: Saving) -> dict[str, torch.Tensor]:
    """What one of a side's stages holds of it."""
    state: dict[str, torch.Tensor] = {}
    if stage == 0:
        state[f"enc_dec_model.{side}_embedding.word_embeddings.weight"] = plain["shared.weight"]
        if "positions.weight" in plain:
            state[f"enc_dec_model.{side}_embedding.position_embeddings.weight"] = plain["positions.weight"]
    relative = plain.get(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
    if relative is not None:  # later stages are born with zeros
        key = f"enc_dec_model.{side}_relative_position_embedding.relative_position_embedding.weight"
        state[key] = torch.zeros_like(relative) if stage else relative
    state |= _layers(plain, side, stage, stages, heads, saving)
    for kind in ("weight", "bias"):
        if stage == stages - 1 and f"{side}.final_layer_norm.{kind}" in plain:
            key = f"enc_dec_model.enc_dec_model.{side}.model.final_layernorm.{kind}"
            state[key] = plain[f"{side}.final_layer_norm.{kind}"] - _off(f"final_norm.{kind}", saving)
    return state


def _off(name: str, saving: Saving) -> float:
    return 1.0 if saving.has_norm_less_one and "norm.weight" in name else 0.0


def _layers(plain: Plain, side: str, stage: int, stages: int, heads: int, saving: Saving) -> dict[str, torch.Tensor]:
    total = 1 + max(int(name.split(".")[2]) for name in plain if name.startswith(f"{side}.block."))
    each = total // stages
    state: dict[str, torch.Tensor] = {}
    for local in range(each):
        source = f"{side}.block.{stage * each + local}."
        target = f"enc_dec_model.enc_dec_model.{side}.model.layers.{local}."
        for key, name in _INNER[side].items():
            for kind in ("weight", "bias"):
                values = _values(plain, f"{source}{name}.{kind}", heads, saving)
                for suffix, value in values.items():
                    state[f"{target}{key}{suffix}.{kind}"] = value - _off(f"{name}.{kind}", saving)
    return state


def _values(plain: Plain, name: str, heads: int, saving: Saving) -> dict[str, torch.Tensor]:
    """What NeMo keeps in place of one name: nothing, the tensor, a fusion, or the two halves of a gate."""
    prefix, part, kind = name.rsplit(".", 2)
    if part in ("qkv", "kv"):
        pieces = [plain.get(f"{prefix}.{each}.{kind}") for each in part]
        if any(piece is None for piece in pieces):
            return {}
        axis = 0 if saving.is_legacy else 1
        stacked = torch.stack([piece.reshape(heads, -1, *piece.shape[1:]) for piece in pieces], axis)
        return {"": stacked.reshape(-1, *stacked.shape[3:])}
    if part == "wi" and f"{prefix}.wi_0.{kind}" in plain:
        gate, up = plain[f"{prefix}.wi_0.{kind}"], plain[f"{prefix}.wi_1.{kind}"]
        return {"": torch.cat([gate, up])} if saving.has_fused_gate else {"": gate, "_2": up}
    return {"": plain[name]} if name in plain else {}


def relative_config(saving: Saving, activation: str, is_flat: bool = False, **changes: Any) -> dict[str, Any]:
    """A T5 of Hugging Face's kind, as NeMo configures it."""
    side = {
        "hidden_size": WIDTH,
        "ffn_hidden_size": INTER,
        "num_attention_heads": HEADS,
        "kv_channels": SIZE,
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": BUCKETS,
        "relative_attention_max_distance": 128,
        "layernorm_epsilon": 1e-6,
        "normalization": "rmsnorm",
        "bias": False,
        "normalize_attention_scores": False,
        "activation": f"fast-{activation}" if saving.has_fused_gate else activation,
        **changes,
    }
    config: dict[str, Any] = {
        "target": "nemo.collections.nlp.models.language_modeling.megatron_t5_model.MegatronT5Model",
        "tensor_model_parallel_size": saving.tensor,
        "pipeline_model_parallel_size": saving.pipeline,
        "max_position_embeddings": 512,
        "tokens_head_bias": False,
        "tokenizer": {"library": "megatron", "type": "BertWordPieceCase", "vocab_file": "nemo:vocab.txt"},
    }
    if is_flat:
        return {**config, **side, "num_layers": 2}
    return {**config, "encoder": {**side, "num_layers": 2}, "decoder": {**side, "num_layers": 4}}
