"""Which shards each family has: FasterTransformer's file names and shapes, and the place of each in the network.

Layout: FasterTransformer, ``src/fastertransformer/models/{multi_gpu_gpt,gptj,gptneox,t5}/*Weight.cc`` (readers) and
``examples/pytorch/{gpt,gptj,gptneox,t5}/utils/*convert.py`` (writers). Matrices are stored [in, out], a fused QKV as
[in, 3, out]. A structure here mirrors one of weights.py, with files in place of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

from .config import ModelConfig, Stack


@dataclass(frozen=True)
class ShardedTensor:
    """One tensor of the checkpoint.

    Attributes:
        name: file name up to ``.{rank}.bin`` or ``.bin``.
        shape: of the full tensor.
        split_axis: axis along which the ranks cut it; None where it is written once.
    """

    name: str
    shape: tuple[int, ...]
    split_axis: int | None = None

    def local_shape(self, tensor_para_size: int) -> tuple[int, ...]:
        """Shape of one rank's shard."""
        return tuple(
            size // tensor_para_size if axis == self.split_axis else size for axis, size in enumerate(self.shape)
        )

    def files(self, tensor_para_size: int) -> tuple[str, ...]:
        """File names, by rank."""
        if self.split_axis is None:
            return (f"{self.name}.bin",)
        return tuple(f"{self.name}.{rank}.bin" for rank in range(tensor_para_size))


@dataclass(frozen=True)
class NormFiles:
    """A norm's weight and bias; no bias where it is a root mean square only."""

    weight: ShardedTensor
    bias: ShardedTensor | None


@dataclass(frozen=True)
class LinearFiles:
    """A matrix and its bias.

    Attributes:
        weights: several stand side by side: their outputs follow each other.
        biases: one a weight, or none.
        is_sum: whether each rank adds the bias, so that a file has one rank's part of it.
    """

    weights: tuple[ShardedTensor, ...]
    biases: tuple[ShardedTensor, ...] = ()
    is_sum: bool = False


@dataclass(frozen=True)
class CrossFiles:
    """Attention to an encoder's output."""

    norm: NormFiles
    query: LinearFiles
    key_value: LinearFiles
    out: LinearFiles
    ia3: tuple[ShardedTensor, ...] | None


@dataclass(frozen=True)
class LayerFiles:
    """One layer; see weights.LayerWeights."""

    input_norm: NormFiles
    qkv: LinearFiles
    attention_out: LinearFiles
    post_norm: NormFiles | None
    mlp_in: LinearFiles
    mlp_gate: LinearFiles | None
    mlp_out: LinearFiles
    cross: CrossFiles | None = None
    ia3: tuple[ShardedTensor, ...] | None = None


@dataclass(frozen=True)
class StackFiles:
    """A stack of layers, and what follows it."""

    layers: tuple[LayerFiles, ...]
    final_norm: NormFiles | None
    relative_bias: ShardedTensor | None = None


@dataclass(frozen=True)
class ModelFiles:
    """A whole checkpoint; see weights.ModelWeights. No head: the embedding is tied to it."""

    token_embedding: ShardedTensor
    position_embedding: ShardedTensor | None
    embedding_norm: NormFiles | None
    encoder: StackFiles | None
    decoder: StackFiles | None
    head: ShardedTensor | None
    head_bias: ShardedTensor | None


def every_tensor(files: object) -> Iterator[ShardedTensor]:
    """List the tensors of a structure."""
    if isinstance(files, ShardedTensor):
        yield files
    elif isinstance(files, tuple):
        for part in files:
            yield from every_tensor(part)
    elif is_dataclass(files):
        for field in fields(files):
            yield from every_tensor(getattr(files, field.name))


def head_name(config: ModelConfig) -> str:
    """Give the head's file; a GPT or T5 without that file has a tied one."""
    return "lm_head.weight" if config.encoder else "model.lm_head.weight"


def model_files(config: ModelConfig, has_head: bool) -> ModelFiles:
    """List the checkpoint that config.ini calls for.

    Args:
        config: of the model.
        has_head: whether there is a file for the head.
    """
    return _t5_files(config, has_head) if config.encoder else _gpt_files(config, has_head)


def _norm(name: str, width: int, has_bias: bool = True) -> NormFiles:
    bias = ShardedTensor(f"{name}.bias", (width,)) if has_bias else None
    return NormFiles(ShardedTensor(f"{name}.weight", (width,)), bias)


def _fan_out(name: str, width: int, *outputs: int, has_bias: bool = True) -> LinearFiles:
    """A matrix of which each rank has some of the outputs: [width, *outputs]."""
    weight = ShardedTensor(f"{name}.weight", (width, *outputs), split_axis=len(outputs))
    bias = ShardedTensor(f"{name}.bias", outputs, split_axis=len(outputs) - 1)
    return LinearFiles((weight,), (bias,) if has_bias else ())


def _fan_in(name: str, inputs: int, width: int, bias: str | None = "", is_sum: bool = False) -> LinearFiles:
    """A matrix of which each rank has some of the inputs; its bias, by that name or the usual one, is written once."""
    biases = () if bias is None else (ShardedTensor(bias or f"{name}.bias", (width,)),)
    return LinearFiles((ShardedTensor(f"{name}.weight", (inputs, width), split_axis=0),), biases, is_sum)


def _gpt_files(config: ModelConfig, has_head: bool) -> ModelFiles:
    width = config.hidden_units
    is_gptj, is_parallel = config.family == "gptj", config.is_parallel

    def layer(prefix: str) -> LayerFiles:
        # A parallel GPT-NeoX has one bias for attention and MLP together, which each rank adds.
        has_sum = config.family == "gptneox" and is_parallel
        return LayerFiles(
            input_norm=_norm(f"{prefix}.input_layernorm", width),
            qkv=_fan_out(f"{prefix}.attention.query_key_value", width, 3, width, has_bias=not is_gptj),
            attention_out=_fan_in(f"{prefix}.attention.dense", width, width, None if is_parallel else ""),
            post_norm=None if is_gptj else _norm(f"{prefix}.post_attention_layernorm", width),
            mlp_in=_fan_out(f"{prefix}.mlp.dense_h_to_4h", width, config.inter_size),
            mlp_gate=None,
            mlp_out=_fan_in(
                f"{prefix}.mlp.dense_4h_to_h",
                config.inter_size,
                width,
                f"{prefix}.mlp.attention.bias.sum" if has_sum else "",
                has_sum,
            ),
        )

    has_table = config.positions == "learned"
    return ModelFiles(
        token_embedding=ShardedTensor("model.wte", (config.vocab_size, width)),
        position_embedding=ShardedTensor("model.wpe", (config.max_pos_seq_len, width)) if has_table else None,
        embedding_norm=_norm("model.pre_decoder_layernorm", width) if config.has_embedding_norm else None,
        encoder=None,
        decoder=StackFiles(
            tuple(layer(f"model.layers.{index}") for index in range(config.num_layer)),
            _norm("model.final_layernorm", width) if config.has_final_norm else None,
        ),
        head=ShardedTensor(head_name(config), (config.vocab_size, width)) if has_head else None,
        head_bias=ShardedTensor("model.lm_head.bias", (config.vocab_size,)) if is_gptj else None,
    )


def _t5_files(config: ModelConfig, has_head: bool) -> ModelFiles:
    assert config.encoder
    width, has_biases = config.hidden_units, config.has_biases
    has_decoder = config.family == "t5"
    has_table = config.positions == "learned"
    return ModelFiles(
        token_embedding=ShardedTensor("shared.weight_T", (config.vocab_size, width)),
        position_embedding=ShardedTensor("shared.ape", (config.max_pos_seq_len, width)) if has_table else None,
        embedding_norm=None,
        encoder=_t5_stack(config.encoder, "encoder", config.ia3_num_tasks),
        decoder=_t5_stack(config, "decoder", config.ia3_num_tasks) if has_decoder else None,
        head=ShardedTensor(head_name(config), (config.vocab_size, width)) if has_head and has_decoder else None,
        head_bias=ShardedTensor("shared.bias", (config.vocab_size,)) if has_decoder and has_biases else None,
    )


def _t5_stack(stack: Stack, name: str, ia3_num_tasks: int) -> StackFiles:
    width, heads, has_biases = stack.hidden_units, stack.attention_width, stack.has_biases
    is_decoder = name == "decoder"

    def attention(prefix: str, *projections: str) -> LinearFiles:
        parts = [_fan_out(f"{prefix}.{each}", width, heads, has_bias=has_biases) for each in projections]
        return LinearFiles(
            tuple(part.weights[0] for part in parts), tuple(bias for part in parts for bias in part.biases)
        )

    def out(prefix: str, inputs: int) -> LinearFiles:
        return _fan_in(prefix, inputs, width, "" if has_biases else None)

    def ia3(*vectors: tuple[str, int]) -> tuple[ShardedTensor, ...] | None:
        return tuple(ShardedTensor(f"{each}.ia3.weight", (ia3_num_tasks, size), 1) for each, size in vectors) or None

    def layer(prefix: str) -> LayerFiles:
        own, cross, mlp = f"{prefix}.layer.0", f"{prefix}.layer.1", f"{prefix}.layer.{2 if is_decoder else 1}"
        dense, memory = f"{mlp}.DenseReluDense", f"{cross}.EncDecAttention"
        fused = _fan_out(f"{own}.SelfAttention.qkv", width, 3, heads, has_bias=has_biases)
        return LayerFiles(
            input_norm=_norm(f"{own}.layer_norm", width, has_biases),
            qkv=fused if is_decoder else attention(f"{own}.SelfAttention", "q", "k", "v"),
            attention_out=out(f"{own}.SelfAttention.o", heads),
            post_norm=_norm(f"{mlp}.layer_norm", width, has_biases),
            mlp_in=_fan_out(f"{dense}.wi", width, stack.inter_size, has_bias=has_biases),
            mlp_gate=_fan_out(f"{dense}.wi2", width, stack.inter_size, has_bias=has_biases) if stack.is_gated else None,
            mlp_out=out(f"{dense}.wo", stack.inter_size),
            cross=CrossFiles(
                norm=_norm(f"{cross}.layer_norm", width, has_biases),
                query=attention(memory, "q"),
                key_value=attention(memory, "k", "v"),
                out=out(f"{memory}.o", heads),
                ia3=ia3((f"{memory}.k", heads), (f"{memory}.v", heads)) if ia3_num_tasks else None,
            )
            if is_decoder
            else None,
            ia3=ia3((f"{own}.SelfAttention.k", heads), (f"{own}.SelfAttention.v", heads), (dense, stack.inter_size))
            if ia3_num_tasks
            else None,
        )

    bias = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return StackFiles(
        tuple(layer(f"{name}.block.{index}") for index in range(stack.num_layer)),
        _norm(f"{name}.final_layer_norm", width, has_biases),
        ShardedTensor(bias, (stack.head_num, stack.buckets), split_axis=0) if stack.buckets else None,
    )
