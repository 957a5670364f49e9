"""Models of every family with random weights, made by transformers: the oracle of benchmarks.gpu.truth."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .truth_predictors import PREDICTING, add_predictor, weaken_layers

_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = range(ord("a"), ord("z") + 1)


@dataclass(frozen=True)
class Shape:
    """The size of the models.

    Attributes:
        layers: blocks, of each stack.
        hidden: width; heads are hidden / 8 wide, and those of keys and values of Llama's relatives are two.
        vocab: rows of the embedding.
        window: tokens that a token sees in layers with a window.
        positions: of the longest text.
    """

    layers: int
    hidden: int
    vocab: int
    window: int
    positions: int


def _gpt2(shape: Shape, **more: Any) -> dict[str, Any]:
    own = {"n_embd": shape.hidden, "n_layer": shape.layers, "n_head": 8, "n_positions": shape.positions}
    return own | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | more


def _llama(shape: Shape, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "intermediate_size": 2 * shape.hidden}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": shape.positions}
    return sizes | heads | _SPECIAL | more


def _phi3(shape: Shape) -> dict[str, Any]:
    """Half of a head rotates, by angles and with a factor of longrope; every text is within the original length."""
    waves = shape.hidden // 32
    factors = {"short_factor": [1 + place / waves for place in range(waves)], "long_factor": [4.0] * waves}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **factors}
    longest = {"max_position_embeddings": 4 * shape.positions, "original_max_position_embeddings": shape.positions}
    return _llama(shape, rope_parameters=rope) | longest


def _nemotron_h(shape: Shape) -> dict[str, Any]:
    """Mamba 2, attention and feed-forwards by turns, a block a layer."""
    kinds = ["linear_attention", "mlp", "full_attention"]
    sizes = {"mamba_num_heads": 16, "mamba_head_dim": shape.hidden // 8, "n_groups": 2, "ssm_state_size": 64}
    own = {"layers_block_type": [kinds[layer % 3] for layer in range(shape.layers + 2)], "head_dim": shape.hidden // 8}
    plain = {name: value for name, value in _llama(shape).items() if name != "num_hidden_layers"}
    return plain | sizes | own


def _falcon_h1(shape: Shape) -> dict[str, Any]:
    """Mamba 2 beside attention in each layer, with numbers that multiply what goes in and out."""
    sizes = {"mamba_n_heads": 16, "mamba_d_head": shape.hidden // 8, "mamba_d_ssm": 2 * shape.hidden}
    groups = {"mamba_n_groups": 2, "mamba_d_state": 64, "head_dim": shape.hidden // 8}
    inner = {"ssm_multipliers": [0.7, 0.9, 0.8, 0.6, 0.9], "mlp_multipliers": [0.9, 0.7]}
    outer = {"key_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "lm_head_multiplier": 0.9}
    return _llama(shape) | sizes | groups | inner | outer | {"attention_out_multiplier": 0.9}


def _delta(shape: Shape, **more: Any) -> dict[str, Any]:
    """The gated delta rule, and attention in every second layer."""
    size = shape.hidden // 8
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "full_attention_interval": 2, "head_dim": size}
    return _llama(shape) | heads | {"linear_key_head_dim": size, "linear_value_head_dim": size} | more


def _deepseek(shape: Shape, **more: Any) -> dict[str, Any]:
    """Latent attention in layers that are all dense: a router's near-ties are another matter."""
    size, scaling = shape.hidden // 8, {"mscale": 1.0, "mscale_all_dim": 1.0}
    rope = _YARN | scaling | {"original_max_position_embeddings": shape.positions // 4}
    latent = {"kv_lora_rank": 4 * size, "qk_nope_head_dim": size, "qk_rope_head_dim": size // 2, "v_head_dim": size}
    dense = {"first_k_dense_replace": shape.layers, "num_key_value_heads": 8, "num_experts_per_tok": 2}
    return _llama(shape, rope_parameters=rope, **latent) | dense | {"num_nextn_predict_layers": 0} | more


def _opt(shape: Shape) -> dict[str, Any]:
    sizes = {"hidden_size": shape.hidden, "word_embed_proj_dim": shape.hidden, "ffn_dim": 4 * shape.hidden}
    heads = {"num_hidden_layers": shape.layers, "num_attention_heads": 8, "max_position_embeddings": shape.positions}
    return sizes | heads | _SPECIAL


def _xglm(shape: Shape) -> dict[str, Any]:
    sizes = {"d_model": shape.hidden, "ffn_dim": 4 * shape.hidden, "num_layers": shape.layers, "attention_heads": 8}
    return sizes | _SPECIAL | {"max_position_embeddings": shape.positions, "decoder_start_token_id": 2}


def _t5(shape: Shape, **more: Any) -> dict[str, Any]:
    sizes = {"d_model": shape.hidden, "d_kv": shape.hidden // 8, "d_ff": 2 * shape.hidden, "num_heads": 8}
    ids = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return sizes | ids | {"num_layers": shape.layers, "num_decoder_layers": shape.layers} | more


def _experts(shape: Shape, count: str = "num_experts", **more: Any) -> dict[str, Any]:
    """Sixteen experts, of which a token uses four, and head norms where the class has them."""
    own = {count: 16, "num_experts_per_tok": 4, "moe_intermediate_size": shape.hidden // 2}
    return _llama(shape, head_dim=shape.hidden // 8, **{**own, **more})


_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True}


def _gpt_oss(shape: Shape) -> dict[str, Any]:
    """Every second layer has a window."""
    rope = {**_YARN, "original_max_position_embeddings": shape.positions // 4, "truncate": False}
    experts = {"num_local_experts": 16, "num_experts_per_tok": 4}
    return _llama(shape, head_dim=shape.hidden // 8, sliding_window=shape.window, rope_parameters=rope, **experts)


def _llama4(shape: Shape) -> dict[str, Any]:
    """Every second layer has experts, every second one does not rotate and attends to all; the others have chunks."""
    experts = {"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    layers = {
        "no_rope_layer_interval": 2,
        "attention_chunk_size": shape.window,
        "floor_scale": 64,
        "attn_scale": 0.1,
    }
    return _llama(shape, head_dim=shape.hidden // 8, intermediate_size_mlp=2 * shape.hidden, **experts, **layers)


# Name: class of the configuration, model_type of config.pbtxt, and its keys.
_FAMILIES: dict[str, tuple[str, str, Callable[[Shape], dict[str, Any]]]] = {
    "gpt2": ("GPT2", "GPT", _gpt2),
    "gpt_bigcode": ("GPTBigCode", "GPT", lambda s: _gpt2(s, multi_query=True)),
    "opt": ("OPT", "GPT", _opt),
    "xglm": ("XGLM", "GPT", _xglm),
    "bloom": ("Bloom", "GPT", lambda s: {"hidden_size": s.hidden, "n_layer": s.layers, "n_head": 8}),
    "gptj": ("GPTJ", "GPT-J", lambda s: _gpt2(s, rotary_dim=s.hidden // 16)),
    "gptneox": ("GPTNeoX", "GPT-NeoX", lambda s: {k: v for k, v in _llama(s).items() if k != "num_key_value_heads"}),
    "llama": (
        "Llama",
        "Llama",
        lambda s: _llama(s, rope_parameters=_LLAMA3 | {"original_max_position_embeddings": s.positions // 8}),
    ),
    "llama_yarn": (
        "Llama",
        "Llama",
        lambda s: _llama(s, rope_parameters=_YARN | {"original_max_position_embeddings": s.positions // 4}),
    ),
    "mistral": ("Mistral", "Llama", lambda s: _llama(s, head_dim=s.hidden // 16, sliding_window=s.window)),
    "starcoder2": ("Starcoder2", "Llama", lambda s: _llama(s, sliding_window=2 * s.window)),
    "qwen2": ("Qwen2", "Llama", _llama),
    "qwen3": ("Qwen3", "Llama", lambda s: _llama(s, head_dim=s.hidden // 8)),
    "gemma": ("Gemma", "Llama", lambda s: _llama(s, head_dim=s.hidden // 8)),
    "gemma2": (
        "Gemma2",
        "Llama",
        lambda s: _llama(s, head_dim=s.hidden // 8, sliding_window=s.window, query_pre_attn_scalar=96),
    ),
    "gemma3_text": (
        "Gemma3Text",
        "Llama",
        lambda s: _llama(s, head_dim=s.hidden // 8, sliding_window=s.window, query_pre_attn_scalar=96),
    ),
    "olmo2": ("Olmo2", "Llama", _llama),
    "exaone4": (
        "Exaone4",
        "Llama",
        lambda s: _llama(s, head_dim=s.hidden // 8, sliding_window=s.window, sliding_window_pattern=3),
    ),
    "smollm3": ("SmolLM3", "Llama", lambda s: _llama(s, no_rope_layer_interval=3)),
    "granite": (
        "Granite",
        "Llama",
        lambda s: (
            _llama(s, embedding_multiplier=12.0, attention_multiplier=0.1, residual_multiplier=0.5)
            | {"logits_scaling": 2.0}
        ),
    ),
    "nemotron": ("Nemotron", "Llama", _llama),
    "phi3": ("Phi3", "Llama", _phi3),
    "deepseek_v3": ("DeepseekV3", "Llama", lambda s: _deepseek(s, q_lora_rank=3 * s.hidden // 4)),
    "deepseek_v2": ("DeepseekV2", "Llama", lambda s: _deepseek(s, q_lora_rank=None, v_head_dim=s.hidden // 16)),
    "nemotron_h": ("NemotronH", "Llama", _nemotron_h),
    "falcon_h1": ("FalconH1", "Llama", _falcon_h1),
    "qwen3_5": ("Qwen3_5Text", "Llama", _delta),
    "qwen3_next": (
        "Qwen3Next",
        "Llama",
        lambda s: _delta(
            s,
            **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": s.hidden // 2},
            shared_expert_intermediate_size=s.hidden // 2,
        ),
    ),
    "mixtral": ("Mixtral", "Llama", lambda s: _experts(s, "num_local_experts", num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3Moe", "Llama", lambda s: _experts(s, norm_topk_prob=True)),
    "gpt_oss": ("GptOss", "Llama", _gpt_oss),
    "llama4": ("Llama4Text", "Llama", _llama4),
    "olmoe": ("Olmoe", "Llama", lambda s: _llama(s, num_experts=16, num_experts_per_tok=4)),
    "glm4_moe": (
        "Glm4Moe",
        "Llama",
        lambda s: _experts(s, "n_routed_experts", num_nextn_predict_layers=0, **_GROUPS),
    ),
    "deepseek_v3_mtp": ("DeepseekV3", "Llama", lambda s: _deepseek(s, q_lora_rank=None, num_nextn_predict_layers=1)),
    "glm4_moe_mtp": (
        "Glm4Moe",
        "Llama",
        lambda s: _experts(s, "n_routed_experts", num_nextn_predict_layers=1, **_GROUPS),
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        "Llama",
        lambda s: _llama(s, moe_num_experts=16, moe_k=4, moe_intermediate_size=s.hidden // 2),
    ),
    "t5": ("T5", "T5", lambda s: _t5(s, feed_forward_proj="relu")),
    "t5_gated": ("T5", "T5", lambda s: _t5(s, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
}
FAMILIES = tuple(_FAMILIES)


def model_type_of(name: str) -> str:
    """Give config.pbtxt's model_type of a family."""
    return _FAMILIES[name][1]


def save_model(name: str, shape: Shape, directory: Path) -> Any:
    """Make a family's model in fp32, save it with a tokenizer, and return it."""
    import transformers

    kind, _, keys = _FAMILIES[name]
    torch.manual_seed(len(name) + shape.hidden)
    scale = {} if kind == "T5" else {"initializer_range": 0.04 * (1024 / shape.hidden) ** 0.5}
    config = getattr(transformers, f"{kind}Config")(vocab_size=shape.vocab, **scale, **keys(shape))
    has_encoder = config.is_encoder_decoder
    auto = transformers.AutoModelForSeq2SeqLM if has_encoder else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    if has_encoder and not config.tie_word_embeddings:  # else one token had all of the probability
        model.lm_head.weight.data /= shape.hidden**0.5 / 2
    _draw_the_rest(model, config)
    if name.endswith(PREDICTING):
        weaken_layers(model)
    model.save_pretrained(directory)
    if name.endswith(PREDICTING):
        add_predictor(config, directory)
    return model


def _draw_the_rest(model: Any, config: Any) -> None:
    """Draw what some releases of transformers leave at zero, so that nothing ties; raise gates to a limit they have."""
    for name, numbers in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("correction_bias"):
            numbers.data.normal_(std=0.1)
        elif name.endswith((".gate.weight", ".router.weight")):
            numbers.data.normal_(std=config.initializer_range)
        elif config.model_type == "gpt_oss" and name.endswith("gate_up_proj"):
            numbers.data *= 3  # one in thirty is beyond 7, which not every release reads from the configuration


def write_vocabulary(vocab: int, directory: Path) -> None:
    """Write a byte-level vocabulary beside shards: the 256 bytes, and behind them texts of letters and digits."""
    rest = [byte for byte in range(256) if byte not in _PRINTED]
    names = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + place) for place, byte in enumerate(rest)}
    texts = [names[byte] for byte in range(256)] + [_text_of(token) for token in range(256, vocab)]
    (directory / "vocab.json").write_text(json.dumps({text: token for token, text in enumerate(texts)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")


def _text_of(token: int) -> str:
    """Give the text of a token of several letters; those of every second one are letters alone."""
    letters = ""
    rest = token
    while rest:
        rest, letter = divmod(rest, 26)
        letters += chr(_LETTERS[letter])
    return f"q{letters}" if token % 2 else f"q{letters}7"


def tokens_of_letters(vocab: int) -> Tensor:
    """Say of each token whether it is of the letters a to z alone, bool [V]."""
    token = torch.arange(vocab)
    is_letter = (token >= _LETTERS.start) & (token < _LETTERS.stop)
    return is_letter | ((token >= 256) & (token % 2 == 1))


def in_format(model: Any, dtype: torch.dtype, directory: Path) -> Any:
    """Save a model, and load it as transformers does with a type: what is computed of positions stays fp32."""
    model.save_pretrained(directory)
    return type(model).from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def with_rounded_cache(model: Any) -> Any:
    """Let a model's attention round keys and values to FP8, by the least power of two that fits a head's numbers."""
    source: Any = sys.modules[type(model).__module__]
    attend = source.eager_attention_forward

    def rounded(x: Tensor) -> Tensor:
        largest = x.double().abs().amax(-1, keepdim=True).clamp_min(2.0**-100)  # of a head that is zero, any
        power = torch.exp2((largest / 448).log2().ceil())
        return ((x.double() / power).to(torch.float8_e4m3fn).double() * power).to(x.dtype)

    def attend_rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> Any:
        if getattr(module.config, "rounds_cache", False):  # others of its class may share the function
            key, value = rounded(key), rounded(value)
        return attend(module, query, key, value, *others, **more)

    source.eager_attention_forward = attend_rounded
    model.config.rounds_cache = True
    return model


_EXACT = "kv_b_proj"
"""Last word of the names of matrices that the engine keeps as they are."""


def meant_by_fp8(directory: Path, beside: Path) -> Any:
    """Load what a directory of FP8 means: each number times its scale, in fp32."""
    import transformers

    shutil.copytree(directory, beside)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (beside / "config.json").write_text(json.dumps(config))
    for path in beside.glob("*.safetensors"):
        tensors = load_file(path)
        found = {name: each.float() for name, each in tensors.items() if not name.endswith(tuple(_FP8_ENDS))}
        for name, end in ((name, end) for name in found for end in _FP8_ENDS if name + end in tensors):
            rows, columns = ((each or size) for each, size in zip(_FP8_ENDS[end], found[name].shape, strict=True))
            scales = tensors[name + end].float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            found[name] *= scales[: found[name].shape[0], : found[name].shape[1]]
        save_file(found, path, {"format": "pt"})
    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(beside, **given).eval()


def meant_by_mxfp4(directory: Path) -> Any:
    """Load what a directory of MXFP4 means to transformers, in fp32."""
    import transformers

    how = transformers.Mxfp4Config(dequantize=True)  # type: ignore[no-untyped-call]
    given = {"dtype": torch.bfloat16, "quantization_config": how}
    read = transformers.AutoModelForCausalLM.from_pretrained(directory, **given)
    # A model of its own: what is saved of the one that was read is MXFP4 again, in part.
    config = copy.deepcopy(read.config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    return model.eval()


_FP8_ENDS = {"_scale": (1, 0), "_scale_inv": (128, 128)}
"""Ends of the names of scales, and rows and columns that share one; 0: all."""
_ROW_PARALLEL = ("c_proj", "out_proj", "o_proj", "dense", "dense_4h_to_h", "fc2", "fc_out", "down_proj", "wo", "o")
"""Last word of the names of matrices whose inputs the ranks share, in transformers' classes."""


def rounded_to_int8(model: Any, ranks: int = 1) -> Any:
    """Copy a model as fp16, and its layers' matrices and its head as int8 with a scale for each output channel.

    Each rank has scales of its own for its part of a matrix. Numbers are fp32 again in the copy.
    """
    from transformers.pytorch_utils import Conv1D

    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # an embedding that is tied to it is not rounded
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and not name.endswith(_EXACT):
            inputs = 0 if isinstance(module, Conv1D) else 1
            is_cut = name.rpartition(".")[2] in _ROW_PARALLEL
            parts = module.weight.data.chunk(ranks if is_cut else 1, inputs)
            module.weight.data = torch.cat([_rounded(part, inputs) for part in parts], inputs)
    return model


def _rounded(weight: torch.Tensor, inputs: int) -> torch.Tensor:
    scale = (weight.abs().amax(inputs, keepdim=True) / 127).clamp(min=1e-30)
    return (weight / scale).round() * scale
