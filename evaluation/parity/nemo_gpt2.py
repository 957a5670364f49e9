"""A NeMo GPT as Hugging Face's GPT-2, with a mapping of tensors that is independent of the conversion's tables.

The conversion's reader gives the tensors (its training shards joined); which is which, how a fused QKV is laid out and
what the configuration says of norms and activation is stated here a second time, so that an error there shows.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
import yaml

from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tensor_values import read_whole
from export_scripts.weights.schema import LazyTensor

_CONFIG = "model_config.yaml"
_PREFIXES = ("model.language_model.", "model.")
# NeMo's legacy keys, and megatron-core's with the norms where Transformer Engine puts them or of their own.
_NAMES = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "encoder.final_layernorm": "transformer.ln_f",
    "decoder.final_layernorm": "transformer.ln_f",
    "output_layer.weight": "lm_head.weight",
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv.layer_norm": "ln_1",
    "self_attention.query_key_value": "attn.c_attn",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.dense": "attn.c_proj",
    "self_attention.linear_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1.layer_norm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
    "mlp.linear_fc2": "mlp.c_proj",
}
_KEY = re.compile(r"(?:(?:en|de)coder\.layers\.(?P<layer>\d+)\.)?(?P<name>.+?)[._](?P<kind>weight|bias)")
_STRANGE = ("megatron_legacy", "headscale", "num_query_groups", "apply_residual_connection_post_layernorm")


class UnfitError(Exception):
    """The checkpoint has no GPT-2 equivalent, or the mapping is unknown."""


def as_gpt2(source: Source) -> Any:
    """Make Hugging Face's model of a checkpoint, in fp32.

    Raises:
        UnfitError: it is no GPT of NeMo's, or has what GPT-2 has not.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    if _CONFIG not in source.archive or source.archive.is_compressed:
        raise UnfitError(f"it is no uncompressed checkpoint with a {_CONFIG}")
    config: dict[str, Any] = yaml.safe_load(source.archive.read_bytes(_CONFIG))
    strange = [key for key in _STRANGE if config.get(key)]
    if strange or config.get("position_embedding_type", "learned_absolute") != "learned_absolute":
        raise UnfitError(f"GPT-2 has no {', '.join(strange) or config.get('position_embedding_type')}")
    state = _state(source, int(config["num_attention_heads"]), "1p" in str(config.get("normalization")))
    is_fused = config.get("bias_activation_fusion", True) or config.get("openai_gelu")
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(state["transformer.wte.weight"]),
            n_positions=len(state["transformer.wpe.weight"]),
            n_embd=config["hidden_size"],
            n_layer=config["num_layers"],
            n_head=config["num_attention_heads"],
            n_inner=config["ffn_hidden_size"],
            activation_function="gelu_new" if is_fused else "gelu",  # NeMo's fused kernel is the tanh form
            layer_norm_epsilon=config.get("layernorm_epsilon", 1e-5),
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings="lm_head.weight" not in state,
        )
    )
    missing, unexpected = model.load_state_dict(state, strict=False)
    lacking = set(missing) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    if lacking or unexpected:
        raise UnfitError(f"its tensors are not GPT-2's: {', '.join([*sorted(lacking), *unexpected][:3])}")
    model.train(False)
    return model


def _state(source: Source, heads: int, is_less_one: bool) -> dict[str, torch.Tensor]:
    state = {}
    for key, lazy in source.tensors.items():
        if source.source_map.is_ignored(key):
            continue
        name, kind = _name(key)
        tensor = _read(lazy)
        if ".ln_" in name and kind == "weight" and is_less_one:
            tensor = tensor + 1  # LayerNorm1P
        if name.endswith("c_attn"):  # rows [heads, 3, size] -> [3, heads, size]
            tensor = tensor.reshape(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
        is_product = ".attn." in name or ".mlp." in name
        state[f"{name}.{kind}"] = tensor.T.contiguous() if is_product and tensor.dim() == 2 else tensor
    for required in ("transformer.wte.weight", "transformer.wpe.weight"):
        if required not in state:
            raise UnfitError(f"there is no {required}")
    return state


def _name(key: str) -> tuple[str, str]:
    plain = next((key.removeprefix(prefix) for prefix in _PREFIXES if key.startswith(prefix)), key)
    found = _KEY.fullmatch(plain)
    whole = _NAMES.get(plain)
    if whole:
        return whole.removesuffix(".weight"), "weight"
    name = _NAMES.get(found["name"]) or _NAMES.get(plain.rpartition(".")[0]) if found else None
    if not found or not name:
        raise UnfitError(f"nothing says what {key} is")
    return (name if found["layer"] is None else f"transformer.h.{found['layer']}.{name}"), found["kind"]


def _read(lazy: LazyTensor) -> torch.Tensor:
    return torch.from_numpy(np.array(read_whole(lazy)))
