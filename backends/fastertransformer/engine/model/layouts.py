"""What a network's weights are, and which of FasterTransformer's shards hold them in each family.

Layout: FasterTransformer, ``src/fastertransformer/models/{multi_gpu_gpt,gptj,gptneox,t5}/*Weight.cc`` (readers) and
``examples/pytorch/{gpt,gptj,gptneox,t5}/utils/*convert.py`` (writers). Matrices are stored [in, out], a fused QKV as
[in, 3, out]. A family is said once, as what it reads: what weights.Reader does with that is to check the files, to
count the memory, or to load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .config import ModelConfig, Stack
from .linear import Linear, Norm

if TYPE_CHECKING:
    from .weights import Reader

_GPT_NAMES = ("model.wte", "model.wpe", "model.lm_head.weight", "model.lm_head.bias")
_T5_NAMES = ("shared.weight_T", "shared.ape", "lm_head.weight", "shared.bias")


@dataclass(frozen=True)
class CrossWeights:
    """A decoder layer's attention to the encoder's output.

    Attributes:
        norm: of the residual stream before it.
        query: hidden -> heads * head_size.
        key_value: encoder's hidden -> 2 * heads * head_size: all k, then all v.
        out: heads * head_size -> hidden.
        ia3: what k and v are multiplied with, [tasks, heads * head_size] each.
    """

    norm: Norm
    query: Linear
    key_value: Linear
    out: Linear
    ia3: tuple[Tensor, ...] | None


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer.

    Attributes:
        input_norm: before attention, or behind it where norms follow.
        qkv: hidden -> 3 * heads * head_size: all q, then all k, then all v.
        attention_out: heads * head_size -> hidden.
        post_norm: likewise of the MLP; None where it works on attention's input.
        mlp_in: hidden -> inter.
        mlp_gate: likewise; multiplied in.
        mlp_out: inter -> hidden.
        cross: where there is an encoder.
        ia3: what k, v and the MLP's inner layer are multiplied with, [tasks, ...] each.
    """

    input_norm: Norm
    qkv: Linear
    attention_out: Linear
    post_norm: Norm | None
    mlp_in: Linear
    mlp_gate: Linear | None
    mlp_out: Linear
    cross: CrossWeights | None = None
    ia3: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class StackWeights:
    """This process's layers of a stack.

    Attributes:
        layers: those.
        final_norm: behind the last one.
        position_bias: by head: ALiBi's slopes [heads], or the bias by bucket [heads, buckets]; None otherwise.
    """

    layers: tuple[LayerWeights, ...]
    final_norm: Norm | None
    position_bias: Tensor | None


@dataclass(frozen=True)
class ModelWeights:
    """The tensors of a model that this process holds; see Partition.

    Attributes:
        token_embedding: [vocab, hidden]; without rows where this process does not embed.
        position_embedding: [max_pos_seq_len, hidden]; None where there is none or this process does not embed.
        embedding_norm: behind the sum of the two.
        encoder, decoder: stacks; a GPT has the latter only, a T5 encoder alone the former only.
        head: hidden -> vocab; token_embedding's matrix where the checkpoint has no head. None where this process does
            not predict.
        like: an empty tensor on the device, in the format that is multiplied.
        size_bytes: of all of it.
        saved_bytes: how much more that would be without int8.
    """

    token_embedding: Tensor
    position_embedding: Tensor | None
    embedding_norm: Norm | None
    encoder: StackWeights | None
    decoder: StackWeights | None
    head: Linear | None
    like: Tensor
    size_bytes: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True)
class Partition:
    """Which part of the network a process holds.

    Attributes:
        layers: indices; of the decoder where there is an encoder too.
        rank: whose shard of each split tensor; None: all shards, joined.
        embeds: whether it has the embeddings.
        predicts: whether it has the head, or the tensor rank's part of its rows.
        encoder_layers: of the encoder; None: all.
    """

    layers: range
    rank: int | None = None
    embeds: bool = True
    predicts: bool = True
    encoder_layers: range | None = None


def vocabulary_part(vocab_size: int, rank: int, ranks: int) -> range:
    """Give the tokens that a tensor rank predicts: all have as many, or one more."""
    return range(vocab_size * rank // ranks, vocab_size * (rank + 1) // ranks)


def head_name(config: ModelConfig) -> str:
    """Give the head's file; a GPT or T5 without that file has a tied one."""
    return (_T5_NAMES if config.encoder else _GPT_NAMES)[2]


def read_model(read: Reader, config: ModelConfig, partition: Partition, has_head: bool) -> ModelWeights:
    """Read a process's partition of the checkpoint that config.ini calls for.

    Args:
        read: gives the tensors.
        config: of the whole model.
        partition: which part of it.
        has_head: whether there is a file for the head; a GPT-J or GPT-NeoX must have it.
    """
    width, is_t5, has_decoder = config.hidden_units, config.encoder is not None, config.family != "t5-encoder"
    table_name, positions_name, _, bias_name = _T5_NAMES if is_t5 else _GPT_NAMES
    predicts = partition.predicts and has_decoder
    has_head = has_head or config.family in ("gptj", "gptneox")
    has_head_bias = config.family == "gptj" or (is_t5 and config.has_biases)
    vocabulary, table, positions, norm, head = (config.vocab_size, width), None, None, None, None
    if partition.embeds or (predicts and not has_head):
        table = read.tensor(table_name, vocabulary, dtype=read.head_type)
    if predicts:
        bias = read.tensor(bias_name, vocabulary[:1], dtype=read.head_type) if has_head_bias else None
        head = read.head(head_name(config) if has_head else None, vocabulary, table, bias)
    if partition.embeds and config.positions == "learned":
        positions = read.tensor(positions_name, (config.max_pos_seq_len, width))
    if partition.embeds and config.has_embedding_norm:
        norm = read.norm("model.pre_decoder_layernorm", config)
    embedding = table if partition.embeds and table is not None else read.empty((0, width))
    encoder = _t5_stack(read, config, "encoder", partition.encoder_layers) if is_t5 else None
    decoder = None
    if has_decoder:
        decoder = (
            _t5_stack(read, config, "decoder", partition.layers)
            if is_t5
            else _gpt_stack(read, config, partition.layers)
        )
    sizes = read.size_bytes, read.saved_bytes
    return ModelWeights(embedding, positions, norm, encoder, decoder, head, read.empty((0, 0)), *sizes)


def _gpt_stack(read: Reader, config: ModelConfig, layers: range) -> StackWeights:
    return StackWeights(
        position_bias=read.slopes(config.head_num) if config.positions == "alibi" else None,
        final_norm=read.norm("model.final_layernorm", config) if config.has_final_norm else None,
        layers=tuple(_gpt_layer(read, config, f"model.layers.{index}") for index in layers),
    )


def _gpt_layer(read: Reader, config: ModelConfig, layer: str) -> LayerWeights:
    width, inter, is_gptj = config.hidden_units, config.inter_size, config.family == "gptj"
    # A parallel GPT-NeoX has one bias for attention and MLP together, of which each rank adds its part.
    has_sum = config.is_parallel and not is_gptj
    return LayerWeights(
        input_norm=read.norm(f"{layer}.input_layernorm", config),
        qkv=read.fan_out(width, (3, width), f"{layer}.attention.query_key_value", has_bias=not is_gptj),
        attention_out=read.fan_in(width, width, f"{layer}.attention.dense", has_bias=not config.is_parallel),
        post_norm=None if is_gptj else read.norm(f"{layer}.post_attention_layernorm", config),
        mlp_in=read.fan_out(width, (inter,), f"{layer}.mlp.dense_h_to_4h"),
        mlp_gate=None,
        mlp_out=read.fan_in(
            inter, width, f"{layer}.mlp.dense_4h_to_h", bias_sum=f"{layer}.mlp.attention.bias.sum" if has_sum else ""
        ),
    )


def _t5_stack(read: Reader, config: ModelConfig, name: str, layers: range | None) -> StackWeights:
    is_decoder = name == "decoder"
    stack = config if is_decoder or config.encoder is None else config.encoder
    bias = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return StackWeights(
        position_bias=read.tensor(bias, (stack.head_num, stack.buckets), split_axis=0) if stack.buckets else None,
        final_norm=read.norm(f"{name}.final_layer_norm", stack),
        layers=tuple(
            _t5_layer(read, stack, f"{name}.block.{index}.layer", is_decoder, config.ia3_num_tasks)
            for index in (range(stack.num_layer) if layers is None else layers)
        ),
    )


def _t5_layer(read: Reader, stack: Stack, layer: str, is_decoder: bool, tasks: int) -> LayerWeights:
    width, heads, inter = stack.hidden_units, stack.attention_width, stack.inter_size
    own, last = f"{layer}.0.SelfAttention", f"{layer}.{2 if is_decoder else 1}"
    dense = f"{last}.DenseReluDense"
    split = [f"{own}.q", f"{own}.k", f"{own}.v"]
    return LayerWeights(
        input_norm=read.norm(f"{layer}.0.layer_norm", stack),
        qkv=read.fan_out(width, (3, heads), f"{own}.qkv") if is_decoder else read.fan_out(width, (heads,), *split),
        attention_out=read.fan_in(heads, width, f"{own}.o"),
        post_norm=read.norm(f"{last}.layer_norm", stack),
        mlp_in=read.fan_out(width, (inter,), f"{dense}.wi"),
        mlp_gate=read.fan_out(width, (inter,), f"{dense}.wi2") if stack.is_gated else None,
        mlp_out=read.fan_in(inter, width, f"{dense}.wo"),
        cross=_t5_cross(read, stack, f"{layer}.1", tasks) if is_decoder else None,
        ia3=read.ia3(tasks, (f"{own}.k", heads), (f"{own}.v", heads), (dense, inter)),
    )


def _t5_cross(read: Reader, stack: Stack, layer: str, tasks: int) -> CrossWeights:
    width, heads, memory = stack.hidden_units, stack.attention_width, f"{layer}.EncDecAttention"
    return CrossWeights(
        norm=read.norm(f"{layer}.layer_norm", stack),
        query=read.fan_out(width, (heads,), f"{memory}.q"),
        key_value=read.fan_out(width, (heads,), f"{memory}.k", f"{memory}.v"),
        out=read.fan_in(heads, width, f"{memory}.o"),
        ia3=read.ia3(tasks, (f"{memory}.k", heads), (f"{memory}.v", heads)),
    )
