"""Read FasterTransformer's ``config.ini``: which family of networks, and its dimensions.

Format: FasterTransformer, ``src/fastertransformer/triton_backend/{multi_gpu_gpt,gptj,gptneox,t5,t5-encoder}``: the
constructors that take a model_dir, which give most architecture keys a default. A constant that FasterTransformer
compiles in (GPT-J's and GPT-NeoX's layernorm_eps, T5's layer_norm_epsilon) may be said by a key of that name here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from ft_format.config_ini import ConfigIni
from ft_format.families import BY_MODEL_TYPE, MODEL_TYPES, llama
from ft_format.families.family import DATA_TYPE, Family, read_tasks
from ft_format.families.gpt import GptDims
from ft_format.families.t5 import T5Dims
from ft_format.layout import StoredTensor, stored
from ft_format.values import COUNT, INDEX, Values, one_of

from ..errors import ConfigIniError

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
        kv_head_num: heads of keys and values, which divides head_num; 0: as head_num. See ``kv_heads``.
        size_per_head: width of one head.
        inter_size: width of the MLP's inner layer.
        num_layer: transformer layers.
        model_width: of the residual stream; 0: the heads' width together.
        layernorm_eps: added to the variance.
        is_rms: whether norms divide by the root mean square only.
        scales_attention: whether q k is divided by the root of a head's width; else the weights have that in them (T5
            without biases).
        is_pre_norm: whether the norm precedes attention and MLP; else it follows their sum with the residual stream.
        is_parallel: whether attention and MLP both work on the layer's input.
        activation: of the MLP: gelu (by tanh), relu or silu.
        is_gated: whether a second product with the MLP's input is multiplied in.
        positions: learned (a table that is added), rotary, alibi, relative (a bias by bucketed distance) or none.
        rotary_dim: how many numbers of each head are rotated.
        rotates_pairs: whether neighbours are rotated with each other (GPT-J), else the two halves (GPT-NeoX).
    """

    head_num: int
    size_per_head: int
    inter_size: int
    num_layer: int
    kv_head_num: int = 0
    model_width: int = 0
    layernorm_eps: float = 1e-6
    is_rms: bool = False
    scales_attention: bool = True
    is_pre_norm: bool = True
    is_parallel: bool = False
    activation: str = "gelu"
    is_gated: bool = False
    positions: str = "learned"
    rotary_dim: int = 0
    rotates_pairs: bool = False

    @property
    def hidden_units(self) -> int:
        """Width of the residual stream."""
        return self.model_width or self.head_num * self.size_per_head

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_head_num or self.head_num

    @property
    def attention_scale(self) -> float:
        """What q k is multiplied with."""
        return float(self.size_per_head**-0.5) if self.scales_attention else 1.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Stack):
    """A whole network: its decoder, the one stack that a GPT has, and what surrounds it.

    Attributes:
        family: gpt, gptj, gptneox, t5 or t5-encoder. In the last, what is said of the decoder is the encoder's.
        tensors: every tensor of the checkpoint by name, by the family's table in ft_format.
        head: name of the output projection among them.
        has_tied_head: whether the embedding takes the head's place where that has no file.
        has_decoder: whether tokens are generated; else the encoder's output is the answer.
        encoder: of t5 and t5-encoder.
        vocab_size: rows of the embedding, padding included.
        max_pos_seq_len: the longest input plus output, in tokens: rows of the position embedding where there is one.
        start_id: token that an empty input starts from.
        end_id: token that ends a generation where the request names none.
        scales_head: whether hidden states are multiplied with hidden_units ** -0.5 before the head (T5, tied).
        weight_data_type: of the shards on disk: fp32, fp16 or bf16.
        tensor_para_size: how many ranks the shards were written for; None where config.ini does not say.
        prompt_learning_type: which kind its tasks' prompts are.
        prompt_learning_start_id: tokens from here on stand for a task's prompt.
        uses_prefixes: whether prefix prompts are used; FasterTransformer's GPT opens their files and ignores them.
        prompt_tasks: name and prompt length of each.
        ia3_num_tasks: rows of T5's IA3 vectors; 0: it has none.
    """

    vocab_size: int
    max_pos_seq_len: int
    start_id: int
    end_id: int
    family: str = "gpt"
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict, repr=False, compare=False)
    head: str = "model.lm_head.weight"
    has_tied_head: bool = True
    has_decoder: bool = True
    encoder: Stack | None = None
    scales_head: bool = False
    weight_data_type: str = "fp32"
    tensor_para_size: int | None = None
    prompt_learning_type: PromptType = PromptType.NONE
    prompt_learning_start_id: int = 0
    uses_prefixes: bool = False
    prompt_tasks: tuple[tuple[str, int], ...] = ()
    ia3_num_tasks: int = 0

    @property
    def has_prefixes(self) -> bool:
        """Whether its tasks are prefix prompts that FasterTransformer uses; see prefixes.py."""
        return self.uses_prefixes and self.prompt_learning_type == PromptType.PREFIX


def read_config(directory: Path, model_type: str = "GPT") -> ModelConfig:
    """Read ``directory/config.ini``.

    Args:
        directory: of the shards.
        model_type: config.pbtxt's, one of MODEL_TYPES.

    Raises:
        ConfigIniError: the file, a section or a key is missing, a value is not legal, or the keys describe a network
            that this engine does not have.
    """
    family = BY_MODEL_TYPE.get(model_type.lower())
    if family is None:
        raise ConfigIniError(f"model_type = {model_type} is none of {', '.join(MODEL_TYPES)}")
    if family.name == llama.FAMILY.name:
        raise ConfigIniError(
            f"model_type = {model_type}: this engine does not serve the Llama family",
            "serve it by FasterTransformer's own backend: deployment.engine=fastertransformer",
        )
    ini = ConfigIni.read(directory, ConfigIniError)
    dims = family.read(ini, has=lambda name: True)  # whether the head has a file, weights.py looks up
    config = _READERS[type(dims)](ini, family, dims)
    for section in ini.values():
        section.warn_of_near_misses()
    return config


_ACTIVATION = one_of(_ACTIVATIONS)
_PROMPT_TYPE = one_of({str(kind.value): kind for kind in PromptType})
_NORM = one_of({"pre_layernorm": True, "post_layernorm": False})


def _common(ini: ConfigIni, family: Family, dims: GptDims | T5Dims, first_prompt_id: int) -> dict[str, Any]:
    """Read the keys that all families have; virtual tokens begin at first_prompt_id if the file does not say where."""
    section = ini[family.main]
    return {
        "family": family.name,
        "tensors": stored(family.schema(dims), dims),
        "head": family.head,
        "has_tied_head": family.has_tied_head,
        "vocab_size": dims.vocab_size,
        "layernorm_eps": dims.layernorm_eps,
        "weight_data_type": section.get("weight_data_type", DATA_TYPE, "fp32"),
        "tensor_para_size": section.find("tensor_para_size", COUNT),
        "prompt_learning_type": section.get("prompt_learning_type", _PROMPT_TYPE, PromptType.NONE),
        "prompt_learning_start_id": section.get("prompt_learning_start_id", INDEX, 0) or first_prompt_id,
        "prompt_tasks": tuple(read_tasks(ini, family).items()),
        "uses_prefixes": family.uses_prefixes,
    }


def _read_decoder(ini: ConfigIni, family: Family, dims: GptDims) -> ModelConfig:
    """GPT, and by their keys OPT, BLOOM and XGLM; GPT-J and GPT-NeoX, which have a rotary embedding."""
    section = ini[family.main]
    section.refuse("has_adapters", dims.adapter_inter_size > 0)
    has_alibi, has_table = dims.use_attention_linear_bias, dims.has_positional_encoding
    section.refuse("use_attention_linear_bias", has_alibi and has_table)
    activation, is_gated = section.get("activation_type", _ACTIVATION, _ACTIVATIONS["gelu"])
    section.refuse("activation_type", is_gated)
    start_id, end_id = (section.get(key, INDEX) for key in family.id_keys)
    return ModelConfig(
        **_common(ini, family, dims, end_id + 1),
        start_id=start_id,
        end_id=end_id,
        head_num=dims.head_num,
        size_per_head=dims.size_per_head,
        inter_size=dims.inter_size,
        num_layer=dims.num_layer,
        max_pos_seq_len=dims.max_pos_seq_len or NO_POSITION_LIMIT,
        is_pre_norm=section.get("layernorm_type", _NORM, True),
        is_parallel=dims.use_gptj_residual,
        activation=activation,
        positions=dims.positions,
        rotary_dim=dims.rotary_embedding,
        rotates_pairs=family.rotates_pairs,
    )


def _t5_stack(section: Values, dims: T5Dims, num_layer: int, activation: str) -> dict[str, Any]:
    section.refuse("adapter_inter_size", section.get("adapter_inter_size", INDEX, 0) > 0)
    return {
        "head_num": dims.head_num,
        "size_per_head": dims.size_per_head,
        "inter_size": dims.inter_size,
        "num_layer": num_layer,
        "model_width": dims.d_model,
        "is_rms": not dims.has_bias,
        "scales_attention": dims.has_bias,
        "activation": activation,
        "is_gated": dims.is_gated,
        "positions": "relative" if dims.has_relative_positions else "learned",
    }


def _read_t5(ini: ConfigIni, family: Family, dims: T5Dims) -> ModelConfig:
    """T5, T5 v1.1, mT5, UL2 and Megatron's T5, or the encoder of one."""
    encoder, main = ini["encoder"], family.section(ini)
    has_decoder = "decoder" in family.sections
    default_id = None if has_decoder else 0
    activation = encoder.get("feed_forward_proj", _ACTIVATION)[0]
    num_layer = dims.decoder_layer_num if has_decoder else dims.encoder_layer_num
    return ModelConfig(
        **_common(ini, family, dims, dims.vocab_size + 1),
        **_t5_stack(main, dims, num_layer, activation),
        has_decoder=has_decoder,
        encoder=Stack(**_t5_stack(encoder, dims, dims.encoder_layer_num, activation), layernorm_eps=dims.layernorm_eps),
        max_pos_seq_len=NO_POSITION_LIMIT if dims.has_relative_positions else dims.position_num,
        start_id=main.get("decoder_start_token_id", INDEX, default_id),
        end_id=main.get("eos_token_id", INDEX, default_id),
        scales_head=dims.has_scaled_logits,
        ia3_num_tasks=dims.ia3_num_tasks,
    )


_READERS: dict[type, Callable[[ConfigIni, Family, Any], ModelConfig]] = {GptDims: _read_decoder, T5Dims: _read_t5}
