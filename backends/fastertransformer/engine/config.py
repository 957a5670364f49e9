"""Read FasterTransformer's ``config.ini``: which family of networks, and its dimensions.

Format: FasterTransformer, ``src/fastertransformer/triton_backend/{multi_gpu_gpt,gptj,gptneox,t5,t5-encoder}``: the
constructors that take a model_dir, which give most architecture keys a default. A constant that FasterTransformer
compiles in (GPT-J's and GPT-NeoX's layernorm_eps, T5's layer_norm_epsilon) may be said by a key of that name here.
"""

from __future__ import annotations

import configparser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigIniError

FILE_NAME = "config.ini"
DATA_TYPES = ("fp32", "fp16", "bf16")
MODEL_TYPES = {"GPT": "gpt", "GPT-J": "gptj", "GPT-NeoX": "gptneox", "T5": "t5", "T5-Encoder": "t5-encoder"}
NO_POSITION_LIMIT = 16384  # FasterTransformer's FT_SEQ_LEN_MAX
PROMPT_TYPES = ("no_prompt", "soft_prompt", "prefix_prompt", "p_prompt_tuning")

# FasterTransformer's names (activation_types.h) in lower case: function of the inner layer, whether a second matrix
# gates it.
_ACTIVATIONS = {
    "gelu": ("gelu", False),
    "relu": ("relu", False),
    "silu": ("silu", False),
    "geglu": ("gelu", True),
    "gated-gelu": ("gelu", True),
    "reglu": ("relu", True),
    "gated-relu": ("relu", True),
    "siglu": ("silu", True),
    "gated-silu": ("silu", True),
}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


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
        prompt_learning_type: one of PROMPT_TYPES.
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
    prompt_learning_type: str = PROMPT_TYPES[0]
    prompt_learning_start_id: int = 0
    prompt_tasks: tuple[tuple[str, int], ...] = ()
    ia3_num_tasks: int = 0

    @property
    def has_prefixes(self) -> bool:
        """Whether its tasks are prefix prompts that FasterTransformer uses; see prefixes.py."""
        return self.family in ("gptj", "gptneox") and self.prompt_learning_type == PROMPT_TYPES[2]


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
    return _READERS[family](_Ini(directory / FILE_NAME), family)


class _Ini:
    """One config.ini; each method names file, section and key where something is wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parser = configparser.ConfigParser(inline_comment_prefixes=(";", "#"), interpolation=None, strict=False)
        try:
            with path.open(encoding="utf-8") as file:
                self._parser.read_file(file)
        except (OSError, UnicodeDecodeError, configparser.Error) as error:
            raise ConfigIniError(f"cannot read {path}: {error}") from error

    def needs(self, *sections: str) -> None:
        for section in sections:
            if not self._parser.has_section(section):
                raise ConfigIniError(f"{self._path} has no section [{section}]; it has {self._parser.sections()}")

    def text(self, section: str, key: str, default: str | None = None) -> str:
        value = self._parser.get(section, key, fallback=default)
        if value is None:
            raise ConfigIniError(f"{self._path}: [{section}] has no {key}")
        return value.strip()

    def integer(self, section: str, key: str, least: int = 1, default: int | None = None) -> int:
        text = self.text(section, key, None if default is None else str(default))
        try:
            value = int(text)
        except ValueError:
            raise ConfigIniError(f"{self._path}: {key} = {text} is not a whole number") from None
        if value < least:
            raise ConfigIniError(f"{self._path}: {key} = {value} is less than {least}")
        return value

    def flag(self, section: str, key: str, default: bool) -> bool:
        text = self.text(section, key, str(default)).lower()
        if text not in _TRUE + _FALSE:
            raise ConfigIniError(f"{self._path}: {key} = {text} is none of {', '.join(_TRUE + _FALSE)}")
        return text in _TRUE

    def epsilon(self, section: str, key: str, default: float) -> float:
        text = self.text(section, key, str(default))
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0.0 < value < 1.0:
            raise ConfigIniError(f"{self._path}: {key} = {text} is not a number between 0 and 1")
        return value

    def choice(self, section: str, key: str, default: str | None, legal: tuple[str, ...]) -> str:
        value = self.text(section, key, default)
        if value not in legal:
            raise ConfigIniError(f"{self._path}: {key} = {value} is none of {', '.join(legal)}")
        return value

    def activation(self, section: str, key: str, default: str | None = None) -> tuple[str, bool]:
        text = self.text(section, key, default)
        if text.lower() not in _ACTIVATIONS:
            raise ConfigIniError(f"{self._path}: {key} = {text} is none of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[text.lower()]

    def refuse(self, section: str, key: str, is_wrong: bool) -> None:
        if is_wrong:
            what = f"[{section}] {key} = {self.text(section, key)}"
            raise ConfigIniError(f"{self._path} describes a network that this engine does not serve: {what}")

    def prompts(self, section: str, default_start: int) -> dict[str, object]:
        """Read the keys of prompt learning, which have the same names in all families."""
        kind = self.integer(section, "prompt_learning_type", 0, default=0)
        self.refuse(section, "prompt_learning_type", kind >= len(PROMPT_TYPES))
        tasks = [f"task_{index}" for index in range(self.integer(section, "num_tasks", 0, default=0))]
        return {
            "prompt_learning_type": PROMPT_TYPES[kind],
            "prompt_learning_start_id": self.integer(section, "prompt_learning_start_id", 0, default=default_start),
            "prompt_tasks": tuple(
                (self.text(task, "task_name"), self.integer(task, "prompt_length", 0, default=0)) for task in tasks
            ),
        }

    def common(self, section: str) -> dict[str, object]:
        """Read what all families call alike."""
        ranks = (
            self.integer(section, "tensor_para_size") if self._parser.has_option(section, "tensor_para_size") else None
        )
        return {
            "vocab_size": self.integer(section, "vocab_size"),
            "weight_data_type": self.choice(section, "weight_data_type", "fp32", DATA_TYPES),
            "tensor_para_size": ranks,
        }


def _gpt_like(ini: _Ini, section: str) -> dict[str, object]:
    end_id = ini.integer(section, "end_id", 0)
    sizes = ("head_num", "size_per_head", "inter_size", "num_layer")
    return {
        **{key: ini.integer(section, key) for key in sizes},
        **ini.common(section),
        **ini.prompts(section, end_id + 1),
        "start_id": ini.integer(section, "start_id", 0),
        "end_id": end_id,
    }


def _read_gpt(ini: _Ini, family: str) -> ModelConfig:
    """GPT, and by their keys OPT, BLOOM and XGLM."""
    ini.needs("gpt")
    ini.refuse("gpt", "has_adapters", ini.flag("gpt", "has_adapters", False))
    has_alibi = ini.flag("gpt", "use_attention_linear_bias", False)
    has_table = ini.flag("gpt", "has_positional_encoding", True)
    ini.refuse("gpt", "use_attention_linear_bias", has_alibi and has_table)
    activation, is_gated = ini.activation("gpt", "activation_type", "Gelu")
    ini.refuse("gpt", "activation_type", is_gated)
    norm = ini.choice("gpt", "layernorm_type", "pre_layernorm", ("pre_layernorm", "post_layernorm"))
    return ModelConfig(
        **_gpt_like(ini, "gpt"),  # type: ignore[arg-type]
        family=family,
        max_pos_seq_len=ini.integer("gpt", "max_pos_seq_len", default=None if has_table else NO_POSITION_LIMIT),
        layernorm_eps=ini.epsilon("gpt", "layernorm_eps", 1e-6),
        is_pre_norm=norm == "pre_layernorm",
        activation=activation,
        positions="alibi" if has_alibi else "learned" if has_table else "none",
        has_embedding_norm=ini.flag("gpt", "has_pre_decoder_layernorm", False),
        has_final_norm=ini.flag("gpt", "has_post_decoder_layernorm", True),
    )


def _read_rotary(ini: _Ini, family: str) -> ModelConfig:
    """GPT-J and GPT-NeoX."""
    ini.needs(family)
    is_gptj = family == "gptj"
    keys = _gpt_like(ini, family)
    rotary_dim = ini.integer(family, "rotary_embedding", 2)
    ini.refuse(family, "rotary_embedding", rotary_dim % 2 == 1 or rotary_dim > ini.integer(family, "size_per_head"))
    return ModelConfig(
        **keys,  # type: ignore[arg-type]
        family=family,
        max_pos_seq_len=ini.integer(family, "max_pos_seq_len", default=NO_POSITION_LIMIT),
        layernorm_eps=ini.epsilon(family, "layernorm_eps", 1e-6 if is_gptj else 1e-5),
        is_parallel=is_gptj or ini.flag(family, "use_gptj_residual", True),
        positions="rotary",
        rotary_dim=rotary_dim,
        rotates_pairs=is_gptj,
    )


def _t5_stack(ini: _Ini, section: str) -> dict[str, object]:
    adapter_size = ini.integer(section, "adapter_inter_size", 0, default=0)
    ini.refuse(section, "adapter_inter_size", adapter_size > 0)
    has_biases = ini.flag("structure", "t5_with_bias", False)
    is_relative = ini.text("structure", "position_embedding_type", "relative") == "relative"
    return {
        "head_num": ini.integer(section, "num_heads"),
        "size_per_head": ini.integer(section, "d_kv"),
        "inter_size": ini.integer(section, "d_ff"),
        "num_layer": ini.integer(section, "num_layers"),
        "model_width": ini.integer(section, "d_model"),
        "layernorm_eps": ini.epsilon(section, "layer_norm_epsilon", 1e-6),
        "is_rms": not has_biases,
        "has_biases": has_biases,
        "activation": ini.activation("encoder", "feed_forward_proj")[0],
        "is_gated": ini.flag("structure", "use_gated_activation", False),
        "positions": "relative" if is_relative else "learned",
        "buckets": ini.integer(section, "relative_attention_num_buckets_or_max_pos_seq_len") if is_relative else 0,
    }


def _read_t5(ini: _Ini, family: str) -> ModelConfig:
    """T5, T5 v1.1, mT5, UL2 and Megatron's T5, or the encoder of one."""
    main = "decoder" if family == "t5" else "encoder"
    ini.needs("encoder", main, "structure")
    stack = _t5_stack(ini, main)
    rows = ini.integer(main, "relative_attention_num_buckets_or_max_pos_seq_len")
    keys = ini.common("encoder")
    is_tied = ini.flag("decoder", "tie_word_embeddings", True)
    return ModelConfig(
        **stack,  # type: ignore[arg-type]
        **keys,  # type: ignore[arg-type]
        **ini.prompts("encoder", ini.integer("encoder", "vocab_size") + 1),  # type: ignore[arg-type]
        family=family,
        encoder=Stack(**_t5_stack(ini, "encoder")),  # type: ignore[arg-type]
        max_pos_seq_len=rows if stack["positions"] == "learned" else NO_POSITION_LIMIT,
        start_id=ini.integer(main, "decoder_start_token_id", 0, default=None if family == "t5" else 0),
        end_id=ini.integer(main, "eos_token_id", 0, default=None if family == "t5" else 0),
        scales_head=is_tied and not stack["has_biases"],
        ia3_num_tasks=ini.integer("structure", "ia3_num_tasks", 0, default=0),
    )


_READERS: dict[str, Callable[[_Ini, str], ModelConfig]] = {
    "gpt": _read_gpt,
    "gptj": _read_rotary,
    "gptneox": _read_rotary,
    "t5": _read_t5,
    "t5-encoder": _read_t5,
}
