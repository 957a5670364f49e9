"""Read FasterTransformer's ``config.ini``: which family of networks, and its dimensions.

Format: FasterTransformer, ``src/fastertransformer/triton_backend/{multi_gpu_gpt,gptj,gptneox,t5,t5-encoder}``: the
constructors that take a model_dir, which give most architecture keys a default. A constant that FasterTransformer
compiles in (GPT-J's and GPT-NeoX's layernorm_eps, T5's layer_norm_epsilon) may be said by a key of that name here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from ft_format.config_ini import ConfigIni
from ft_format.values import COUNT, FLAG, INDEX, Values, fraction, one_of, whole

from ..errors import ConfigIniError

DATA_TYPES = ("fp32", "fp16", "bf16")
MODEL_TYPES = {"GPT": "gpt", "GPT-J": "gptj", "GPT-NeoX": "gptneox", "T5": "t5", "T5-Encoder": "t5-encoder"}
NO_POSITION_LIMIT = 16384  # FasterTransformer's FT_SEQ_LEN_MAX

# FasterTransformer's names (activation_types.h) in lower case: function of the inner layer, whether a second matrix
# gates it.
_GATED = {"geglu": "gelu", "reglu": "relu", "siglu": "silu"}
_ACTIVATIONS = {name: (name, False) for name in _GATED.values()}
_ACTIVATIONS |= {gated: (name, True) for plain, name in _GATED.items() for gated in (plain, f"gated-{name}")}


class PromptType(IntEnum):
    """FasterTransformer's numbers for kinds of prompts; see prompts.py."""

    NONE = 0
    SOFT = 1
    PREFIX = 2
    TUNED = 3


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Dimensions and kind of a stack of transformer layers.

    Attributes:
        head_num: attention heads.
        size_per_head: width of one head.
        inter_size: width of the MLP's inner layer.
        num_layer: transformer layers.
        model_width: of the residual stream; 0: the heads' width together.
        layernorm_eps: added to the variance.
        is_rms: whether norms divide by the root mean square only.
        has_biases: whether T5's norms and linear layers have biases.
        is_pre_norm: whether the norm precedes attention and MLP; else it follows their sum with the residual stream.
        is_parallel: whether attention and MLP both work on the layer's input.
        activation: of the MLP: gelu (by tanh), relu or silu.
        is_gated: whether a second product with the MLP's input is multiplied in.
        positions: learned (a table that is added), rotary, alibi, relative (a bias by bucketed distance) or none.
        rotary_dim: how many numbers of each head are rotated.
        rotates_pairs: whether neighbours are rotated with each other (GPT-J), else the two halves (GPT-NeoX).
        buckets: of relative positions.
        attention_scale: what q k is multiplied with.
    """

    head_num: int
    size_per_head: int
    inter_size: int
    num_layer: int
    model_width: int = 0
    layernorm_eps: float = 1e-6
    is_rms: bool = False
    has_biases: bool = True
    is_pre_norm: bool = True
    is_parallel: bool = False
    activation: str = "gelu"
    is_gated: bool = False
    positions: str = "learned"
    rotary_dim: int = 0
    rotates_pairs: bool = False
    buckets: int = 0

    @property
    def hidden_units(self) -> int:
        """Width of the residual stream."""
        return self.model_width or self.attention_width

    @property
    def attention_width(self) -> int:
        """Width of all heads together."""
        return self.head_num * self.size_per_head

    @property
    def attention_scale(self) -> float:
        """What q k is multiplied with; a T5 without biases has it in its weights."""
        return 1.0 if self.is_rms else float(self.size_per_head**-0.5)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Stack):
    """A whole network: its decoder, the one stack that a GPT has, and what surrounds it.

    Attributes:
        family: gpt, gptj, gptneox, t5 or t5-encoder. In the last, what is said of the decoder is the encoder's.
        encoder: of t5 and t5-encoder.
        vocab_size: rows of the embedding, padding included.
        max_pos_seq_len: the longest input plus output, in tokens: rows of the position embedding where there is one.
        start_id: token that an empty input starts from.
        end_id: token that ends a generation where the request names none.
        has_embedding_norm: whether a norm follows the embedding (BLOOM).
        has_final_norm: whether a norm precedes the head.
        scales_head: whether hidden states are multiplied with hidden_units ** -0.5 before the head (T5, tied).
        weight_data_type: of the shards on disk: fp32, fp16 or bf16.
        tensor_para_size: how many ranks the shards were written for; None where config.ini does not say.
        prompt_learning_type: which kind its tasks' prompts are.
        prompt_learning_start_id: tokens from here on stand for a task's prompt.
        prompt_tasks: name and prompt length of each.
        ia3_num_tasks: rows of T5's IA3 vectors; 0: it has none.
    """

    vocab_size: int
    max_pos_seq_len: int
    start_id: int
    end_id: int
    family: str = "gpt"
    encoder: Stack | None = None
    has_embedding_norm: bool = False
    has_final_norm: bool = True
    scales_head: bool = False
    weight_data_type: str = "fp32"
    tensor_para_size: int | None = None
    prompt_learning_type: PromptType = PromptType.NONE
    prompt_learning_start_id: int = 0
    prompt_tasks: tuple[tuple[str, int], ...] = ()
    ia3_num_tasks: int = 0

    @property
    def has_prefixes(self) -> bool:
        """Whether its tasks are prefix prompts that FasterTransformer uses; see prefixes.py."""
        return self.family in ("gptj", "gptneox") and self.prompt_learning_type == PromptType.PREFIX


def read_config(directory: Path, model_type: str = "GPT") -> ModelConfig:
    """Read ``directory/config.ini``.

    Args:
        directory: of the shards.
        model_type: config.pbtxt's, one of MODEL_TYPES.

    Raises:
        ConfigIniError: the file, a section or a key is missing, a value is not legal, or the keys describe a network
            that this engine does not have.
    """
    family = {name.lower(): family for name, family in MODEL_TYPES.items()}.get(model_type.lower())
    if family is None:
        raise ConfigIniError(f"model_type = {model_type} is none of {', '.join(MODEL_TYPES)}")
    ini = ConfigIni.read(directory, ConfigIniError)
    config = _READERS[family](ini, family)
    for section in ini.values():
        section.warn_of_near_misses()
    return config


_ACTIVATION = one_of(_ACTIVATIONS)
_DATA_TYPE = one_of({name: name for name in DATA_TYPES})
_PROMPT_TYPE = one_of({str(kind.value): kind for kind in PromptType})
_EPSILON = fraction()
_NORM = one_of({"pre_layernorm": True, "post_layernorm": False})


def _common(ini: ConfigIni, section: Values, first_prompt_id: int) -> dict[str, Any]:
    """Read what all families call alike."""
    tasks = [ini[f"task_{index}"] for index in range(section.get("num_tasks", INDEX, 0))]
    return {
        "vocab_size": section.get("vocab_size", COUNT),
        "weight_data_type": section.get("weight_data_type", _DATA_TYPE, "fp32"),
        "tensor_para_size": section.find("tensor_para_size", COUNT),
        "prompt_learning_type": section.get("prompt_learning_type", _PROMPT_TYPE, PromptType.NONE),
        "prompt_learning_start_id": section.get("prompt_learning_start_id", INDEX, 0) or first_prompt_id,
        "prompt_tasks": tuple((task.get("task_name", str), task.get("prompt_length", INDEX, 0)) for task in tasks),
    }


def _gpt_like(ini: ConfigIni, section: Values) -> dict[str, Any]:
    sizes = {key: section.get(key, COUNT) for key in ("head_num", "size_per_head", "inter_size", "num_layer")}
    ids = {key: section.get(key, INDEX) for key in ("start_id", "end_id")}
    return {**sizes, **ids, **_common(ini, section, ids["end_id"] + 1)}


def _read_gpt(ini: ConfigIni, family: str) -> ModelConfig:
    """GPT, and by their keys OPT, BLOOM and XGLM."""
    gpt = ini["gpt"]
    gpt.refuse("has_adapters", gpt.get("has_adapters", FLAG, False))
    has_alibi = gpt.get("use_attention_linear_bias", FLAG, False)
    has_table = gpt.get("has_positional_encoding", FLAG, True)
    gpt.refuse("use_attention_linear_bias", has_alibi and has_table)
    activation, is_gated = gpt.get("activation_type", _ACTIVATION, _ACTIVATIONS["gelu"])
    gpt.refuse("activation_type", is_gated)
    return ModelConfig(
        **_gpt_like(ini, gpt),
        family=family,
        max_pos_seq_len=gpt.get("max_pos_seq_len", COUNT, None if has_table else NO_POSITION_LIMIT),
        layernorm_eps=gpt.get("layernorm_eps", _EPSILON, 1e-6),
        is_pre_norm=gpt.get("layernorm_type", _NORM, True),
        activation=activation,
        positions="alibi" if has_alibi else "learned" if has_table else "none",
        has_embedding_norm=gpt.get("has_pre_decoder_layernorm", FLAG, False),
        has_final_norm=gpt.get("has_post_decoder_layernorm", FLAG, True),
    )


def _read_rotary(ini: ConfigIni, family: str) -> ModelConfig:
    """GPT-J and GPT-NeoX."""
    section, is_gptj = ini[family], family == "gptj"
    keys, rotary_dim = _gpt_like(ini, section), section.get("rotary_embedding", whole(2))
    section.refuse("rotary_embedding", rotary_dim % 2 == 1 or rotary_dim > keys["size_per_head"])
    return ModelConfig(
        **keys,
        family=family,
        max_pos_seq_len=section.get("max_pos_seq_len", COUNT, NO_POSITION_LIMIT),
        layernorm_eps=section.get("layernorm_eps", _EPSILON, 1e-6 if is_gptj else 1e-5),
        is_parallel=is_gptj or section.get("use_gptj_residual", FLAG, True),
        positions="rotary",
        rotary_dim=rotary_dim,
        rotates_pairs=is_gptj,
    )


def _t5_stack(ini: ConfigIni, section: Values) -> dict[str, Any]:
    structure = ini["structure"]
    section.refuse("adapter_inter_size", section.get("adapter_inter_size", INDEX, 0) > 0)
    has_biases = structure.get("t5_with_bias", FLAG, False)
    is_relative = structure.get("position_embedding_type", str, "relative") == "relative"
    rows = section.get("relative_attention_num_buckets_or_max_pos_seq_len", COUNT)
    sizes = {"head_num": "num_heads", "size_per_head": "d_kv", "inter_size": "d_ff"}
    sizes |= {"num_layer": "num_layers", "model_width": "d_model"}
    return {
        **{name: section.get(key, COUNT) for name, key in sizes.items()},
        "layernorm_eps": section.get("layer_norm_epsilon", _EPSILON, 1e-6),
        "is_rms": not has_biases,
        "has_biases": has_biases,
        "activation": ini["encoder"].get("feed_forward_proj", _ACTIVATION)[0],
        "is_gated": structure.get("use_gated_activation", FLAG, False),
        "positions": "relative" if is_relative else "learned",
        "buckets": rows if is_relative else 0,
    }


def _read_t5(ini: ConfigIni, family: str) -> ModelConfig:
    """T5, T5 v1.1, mT5, UL2 and Megatron's T5, or the encoder of one."""
    encoder = ini["encoder"]
    main, default_id = (ini["decoder"], None) if family == "t5" else (encoder, 0)
    stack = _t5_stack(ini, main)
    rows = main.get("relative_attention_num_buckets_or_max_pos_seq_len", COUNT)
    is_tied = main.get("tie_word_embeddings", FLAG, True)
    return ModelConfig(
        **stack,
        **_common(ini, encoder, encoder.get("vocab_size", COUNT) + 1),
        family=family,
        encoder=Stack(**_t5_stack(ini, encoder)),
        max_pos_seq_len=rows if stack["positions"] == "learned" else NO_POSITION_LIMIT,
        start_id=main.get("decoder_start_token_id", INDEX, default_id),
        end_id=main.get("eos_token_id", INDEX, default_id),
        scales_head=is_tied and not stack["has_biases"],
        ia3_num_tasks=ini["structure"].get("ia3_num_tasks", INDEX, 0),
    )


_READERS: dict[str, Callable[[ConfigIni, str], ModelConfig]] = {
    "gpt": _read_gpt,
    "gptj": _read_rotary,
    "gptneox": _read_rotary,
    "t5": _read_t5,
    "t5-encoder": _read_t5,
}
