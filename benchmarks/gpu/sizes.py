"""The models that are measured on a GPU: their dimensions, and what follows from them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
from backends.fastertransformer.engine.arrays import Array
from benchmarks.engine.generate import Ask, tensors_of
from ft_format.config_ini import FILE_NAME as CONFIG_INI
from handover.errors import ConfigError
from models.described import NUMBER_TYPES
from models.directory import CONFIG_FILE

_POSITIONS = 2049  # the longest input of benchmarks.gpu.prefill, and one more
_ROTARY = 64  # numbers of each of GPT-J's heads that are turned

QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fbgemm_fp8"},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},
}
"""Weights of FP8 with a scale a row, or for blocks, and experts of 4 bits, as ``config.json`` says it."""
_MATRICES = ("", *QUANTIZATIONS, *(f"{each} activations" for each in QUANTIZATIONS if "fp8" in each))
KINDS = (*_MATRICES, *(f"{each} kv".strip() for each in _MATRICES))
"""What a model's numbers are: of the data type; FP8: matrices, activations that these multiply, and the KV cache; or
MXFP4: experts."""


@dataclass(frozen=True)
class Size:
    """A GPT with NeMo's published dimensions, or a GPT-J.

    Attributes:
        layers: of the stack.
        hidden: width of the residual stream.
        heads: of attention; they are as wide as the stream together.
        vocab: rows of the embedding.
        model_type: of config.pbtxt.
        positions: of the longest text.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    model_type: str = "GPT"
    positions: int = _POSITIONS

    def weight_bytes(self, item_bytes: int, is_int8: bool = False, kind: str = "") -> int:
        """Return the size of the matrices that every token needs: the layers', and the table that is the head."""
        head_bytes = self.vocab * self.hidden * (1 if is_int8 else item_bytes)
        return self._layers_numel * (1 if is_int8 or "fp8" in kind else item_bytes) + head_bytes

    def once_bytes(self, item_bytes: int, is_int8: bool = False) -> int:
        """Return the size of the matrices that a request needs once."""
        return 0

    def operations(self, batch: int, input_length: int, output_length: int) -> int:
        """Count the operations of the matrix products of a generation; the head is needed for output tokens only."""
        tokens = batch * (input_length + output_length - 1)
        return 2 * (self._layers_numel * tokens + self.vocab * self.hidden * batch * output_length)

    def prefill_operations(self, batch: int, length: int) -> int:
        """Count the operations up to the first token: of the products, and of attention to what each token may see."""
        return self.operations(batch, length, 1) + batch * self.layers * 2 * length**2 * self.hidden

    def write(self, directory: Path, data_type: str = "fp32", quantization: str = "") -> None:
        """Describe it as FasterTransformer's converters do, with weights of a type.

        Raises:
            ConfigError: FasterTransformer's layers have no quantized weights.
        """
        if quantization:
            raise ConfigError(f"{self.model_type} in {quantization}", "sizes of Llama's relatives have it")
        (directory / CONFIG_INI).write_text(f"{self._config_ini()}weight_data_type = {data_type}\n")

    def _config_ini(self) -> str:
        is_gpt = self.model_type == "GPT"
        own = f"max_pos_seq_len = {self.positions}\n" if is_gpt else f"rotary_embedding = {_ROTARY}\n"
        return (
            f"[{'gpt' if is_gpt else 'gptj'}]\nhead_num = {self.heads}\nsize_per_head = {self.hidden // self.heads}\n"
            f"inter_size = {4 * self.hidden}\nnum_layer = {self.layers}\nvocab_size = {self.vocab}\n"
            f"start_id = 0\nend_id = 0\n{own}"
        )

    def tensors(self, asks: Sequence[Ask]) -> dict[str, Array]:
        """Build one request of a row for each; no token ends it."""
        return tensors_of(asks, self.vocab)

    def peer(self) -> Any:
        """Make transformers' network of this shape, where torch makes tensors at the time."""
        import transformers

        sizes = {"vocab_size": self.vocab, "n_positions": self.positions, "n_embd": self.hidden}
        sizes |= {"n_layer": self.layers, "n_head": self.heads}
        if self.model_type == "GPT":
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        return transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes, rotary_dim=_ROTARY))

    @property
    def _layers_numel(self) -> int:
        return self.layers * 12 * self.hidden**2


@dataclass(frozen=True)
class T5Size(Size):
    """A T5 with as many layers in either stack.

    Attributes:
        head_size: of all stacks' heads.
        inter: width of the MLP's inner layer.
        is_gated: whether a second matrix gates it, as in T5 v1.1, whose head is a matrix of its own.
    """

    model_type: str = "T5"
    head_size: int = 128
    inter: int = 0
    is_gated: bool = False

    def once_bytes(self, item_bytes: int, is_int8: bool = False) -> int:
        """Return the size of the encoder's matrices and of those that make keys and values of its output."""
        return self._layers_numel * (1 if is_int8 else item_bytes)

    def operations(self, batch: int, input_length: int, output_length: int) -> int:
        """See Size; the decoder begins with one token."""
        head = self.vocab * self.hidden
        return 2 * batch * (self._layers_numel * (input_length + output_length) + head * output_length)

    def prefill_operations(self, batch: int, length: int) -> int:
        """See Size: the encoder, in which every token sees every other, and the decoder's first step."""
        return self.operations(batch, length, 1) + batch * self.layers * 4 * length**2 * self._attention_width

    def _config_ini(self) -> str:
        stack = (
            f"num_heads = {self.heads}\nd_kv = {self.head_size}\nd_ff = {self.inter}\nnum_layers = {self.layers}\n"
            f"d_model = {self.hidden}\nvocab_size = {self.vocab}\ndecoder_start_token_id = 0\neos_token_id = 1\n"
            f"feed_forward_proj = {'gated-gelu' if self.is_gated else 'relu'}\n"
            f"relative_attention_num_buckets_or_max_pos_seq_len = 32\ntie_word_embeddings = {int(not self.is_gated)}\n"
        )
        structure = f"[structure]\nt5_with_bias = 0\nuse_gated_activation = {int(self.is_gated)}\n"
        return f"[encoder]\n{stack}[decoder]\n{stack}{structure}"

    def tensors(self, asks: Sequence[Ask]) -> dict[str, Array]:
        """See Size."""
        return for_encoder(tensors_of(asks, self.vocab))

    def peer(self) -> Any:
        """See Size."""
        import transformers

        config = transformers.T5Config(
            vocab_size=self.vocab,
            d_model=self.hidden,
            d_kv=self.head_size,
            d_ff=self.inter,
            num_layers=self.layers,
            num_heads=self.heads,
            feed_forward_proj="gated-gelu" if self.is_gated else "relu",
            tie_word_embeddings=not self.is_gated,
            decoder_start_token_id=0,
        )
        return transformers.T5ForConditionalGeneration(config)

    @property
    def _attention_width(self) -> int:
        return self.heads * self.head_size

    @property
    def _layers_numel(self) -> int:
        """Parameters of the decoder without the keys and values of the encoder's output; the rest has as many."""
        mlp = (3 if self.is_gated else 2) * self.hidden * self.inter
        return self.layers * (6 * self.hidden * self._attention_width + mlp)


@dataclass(frozen=True)
class LlamaSize(Size):
    """A Llama, or a Qwen3.

    Attributes:
        kv_heads: heads of keys and values.
        head_size: of all heads.
        inter: width of the MLP's inner layer, whose input is multiplied by two matrices.
        qk_norm: whether queries and keys are normed (Qwen3).
        is_tied: whether the head is the embedding.
        rope_theta: base of the rotation.
    """

    model_type: str = "Llama"
    kv_heads: int = 8
    head_size: int = 128
    inter: int = 0
    qk_norm: bool = False
    is_tied: bool = False
    rope_theta: float = 500000.0
    positions: int = 131072

    def prefill_operations(self, batch: int, length: int) -> int:
        """See Size."""
        return self.operations(batch, length, 1) + batch * self.layers * 2 * length**2 * self.heads * self.head_size

    def write(self, directory: Path, data_type: str = "fp32", quantization: str = "") -> None:
        """Describe it as transformers does."""
        quantized = {"quantization_config": QUANTIZATIONS[quantization]} if quantization else {}
        (directory / CONFIG_FILE).write_text(json.dumps(self.config(data_type) | quantized, indent=1))

    def config(self, data_type: str) -> dict[str, Any]:
        """Return its ``config.json``."""
        kind = "Qwen3" if self.qk_norm else "Llama"
        return {
            "architectures": [f"{kind}ForCausalLM"],
            "model_type": kind.lower(),
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inter,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "tie_word_embeddings": self.is_tied,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": torch_name(data_type),
        }

    def peer(self) -> Any:
        """See Size."""
        import transformers

        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**{**self.config("fp32"), "torch_dtype": None})
        )

    @property
    def _layers_numel(self) -> int:
        attention = 2 * (self.heads + self.kv_heads) * self.head_size
        return self.layers * self.hidden * (attention + 3 * self.inter)


@dataclass(frozen=True)
class MixtureSize(LlamaSize):
    """A Qwen3 with experts in every layer, each of which has a middle of ``inter``.

    Sizes are of the experts that one token uses; several rows together read more of them.

    Attributes:
        experts: of a layer.
        used: by a token.
    """

    experts: int = 128
    used: int = 8

    def config(self, data_type: str) -> dict[str, Any]:
        """See LlamaSize."""
        experts = {"num_experts": self.experts, "num_experts_per_tok": self.used, "norm_topk_prob": True}
        kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        return {**super().config(data_type), **kind, **experts, "moe_intermediate_size": self.inter}

    @property
    def _layers_numel(self) -> int:
        attention = 2 * (self.heads + self.kv_heads) * self.head_size
        return self.layers * self.hidden * (attention + self.experts + 3 * self.inter * self.used)


@dataclass(frozen=True)
class GptOssSize(MixtureSize):
    """A GPT-OSS: sinks, windows in every other layer, biases."""

    def config(self, data_type: str) -> dict[str, Any]:
        """See LlamaSize."""
        kind = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": 128}
        said = super(MixtureSize, self).config(data_type) | kind
        return said | {"num_local_experts": self.experts, "num_experts_per_tok": self.used}

    def weight_bytes(self, item_bytes: int, is_int8: bool = False, kind: str = "") -> int:
        """See Size; numbers of MXFP4 take 17 bytes for 32."""
        experts = self.layers * self.hidden * 3 * self.inter * self.used * ("mxfp4" in kind)
        return super().weight_bytes(item_bytes, is_int8, kind) - experts * item_bytes + experts * 17 // 32


@dataclass(frozen=True)
class LatentSize(MixtureSize):
    """A DeepSeek V2 whose first layer is dense; heads are counted half as wide as their queries and values together.

    Attributes:
        dense_inter: width of the first layer's middle.
        shared: experts that every token uses.
        latent: width of the vector that keys and values are made from.
        plain, rotated: of a head's queries and keys.
        value: width of a head's values.
    """

    dense_inter: int = 0
    shared: int = 2
    latent: int = 512
    plain: int = 128
    rotated: int = 64
    value: int = 128

    def config(self, data_type: str) -> dict[str, Any]:
        """See LlamaSize."""
        kind = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": "greedy"}
        kind |= {"n_group": 1, "topk_group": 1}  # as the published one; vLLM asks for them
        experts = {"n_routed_experts": self.experts, "n_shared_experts": self.shared, "norm_topk_prob": False}
        sizes = {"kv_lora_rank": self.latent, "q_lora_rank": None, "intermediate_size": self.dense_inter}
        sizes |= {"qk_nope_head_dim": self.plain, "qk_rope_head_dim": self.rotated, "head_dim": self.rotated}
        return {
            **super().config(data_type),
            **kind,
            **experts,
            **sizes,
            "v_head_dim": self.value,
            "first_k_dense_replace": 1,
        }

    @property
    def _layers_numel(self) -> int:
        query, key_value = self.heads * (self.plain + self.rotated), self.latent + self.rotated
        attention = self.hidden * (query + key_value + self.heads * self.value)
        attention += self.latent * self.heads * (self.plain + self.value)
        experts = self.hidden * (self.experts + 3 * self.inter * (self.used + self.shared))
        return self.layers * attention + 3 * self.hidden * self.dense_inter + (self.layers - 1) * experts


@dataclass(frozen=True)
class DescribedSize(LlamaSize):
    """A dense decoder of any architecture that models/ describes.

    Attributes:
        own: keys of its ``config.json`` that a Llama's has not, or that are others.
    """

    own: Mapping[str, Any] = field(default_factory=dict)

    def config(self, data_type: str) -> dict[str, Any]:
        """See LlamaSize."""
        return {**super().config(data_type), **self.own}

    @property
    def _layers_numel(self) -> int:
        config = self.config("fp32")
        tensors = models.find(config["model_type"]).read(config).tensors()
        shapes = (tensor.shape for name, tensor in tensors.items() if "layers." in name)
        return sum(math.prod(shape) for shape in shapes if len(shape) > 1)


def torch_name(data_type: str) -> str:
    """Return transformers' name of a type of weights."""
    return next(name for name, each in NUMBER_TYPES.items() if each == data_type)


def for_encoder(tensors: dict[str, Array]) -> dict[str, Array]:
    """Call a request's tensors as FasterTransformer's T5 does."""
    names = {"input_lengths": "sequence_length", "request_output_len": "max_output_len"}
    return {names.get(name, name): array for name, array in tensors.items()}


_LITE: dict[str, Any] = {"rope_theta": 10000.0, "positions": 163840}
_QWEN3: dict[str, Any] = {"rope_theta": 1000000.0, "positions": 40960}
_NEMOTRON_H: dict[str, Any] = {
    **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "mlp_hidden_act": "relu2"},
    **{"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128},
    "hybrid_override_pattern": f"M-M-M-M*{3 * '-M-M-M-M-M*'}-M-M-M-M-M-",
}
_QWEN3_5: dict[str, Any] = {
    **{"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "full_attention_interval": 4},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
}
SIZES = {
    "124M": Size(12, 768, 12, 50304),
    "1.3B": Size(24, 2048, 16, 51200),
    "5B": Size(24, 4096, 32, 51200),
    "20B": Size(44, 6144, 48, 51200),
    "43B": Size(48, 8192, 64, 256000),
    "GPT-J 6B": Size(28, 4096, 16, 50400, "GPT-J"),
    "Llama 160M": LlamaSize(12, 768, 12, 32000, kv_heads=12, head_size=64, inter=3072, rope_theta=1e4, positions=2048),
    "Llama 3.1 8B": LlamaSize(32, 4096, 32, 128256, inter=14336),
    "Llama 3.1 70B": LlamaSize(80, 8192, 64, 128256, inter=28672),
    "Qwen3 0.6B": LlamaSize(28, 1024, 16, 151936, inter=3072, qk_norm=True, is_tied=True, **_QWEN3),
    "Qwen3 14B": LlamaSize(40, 5120, 40, 151936, inter=17408, qk_norm=True, **_QWEN3),
    "Qwen3 30B-A3B": MixtureSize(48, 2048, 32, 151936, kv_heads=4, inter=768, qk_norm=True, **_QWEN3),
    "GPT-OSS 20B": GptOssSize(
        *(24, 2880, 64, 201088), kv_heads=8, head_size=64, inter=2880, experts=32, used=4, rope_theta=1.5e5
    ),
    "DeepSeek V2 Lite": LatentSize(
        *(27, 2048, 16, 102400), kv_heads=16, head_size=160, inter=1408, experts=64, used=6, dense_inter=10944, **_LITE
    ),
    "Nemotron-H 8B": DescribedSize(52, 4096, 32, 131072, inter=21504, own=_NEMOTRON_H),
    "Qwen3.5 9B": DescribedSize(32, 4096, 16, 248320, kv_heads=4, head_size=256, inter=12288, own=_QWEN3_5),
    "T5 11B": T5Size(24, 1024, 128, 32128, inter=65536),
    "T5 v1.1 XXL": T5Size(24, 4096, 64, 32128, head_size=64, inter=10240, is_gated=True),
}


def find_size(name: str) -> Size:
    """Give the dimensions of a model by name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in SIZES:
        raise ConfigError(f"no model is called {name}", f"there are {', '.join(SIZES)}")
    return SIZES[name]
