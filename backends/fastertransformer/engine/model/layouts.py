"""What a network's weights are, and which tensors of the checkpoint become which of them.

The family's table in ft_format lists the tensors, with their shapes and the axes that ranks split. ``read_model`` says
once which tensors a network reads; a weights.Reader checks the files, counts the memory, or loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .config import ModelConfig, Stack
from .linear import Linear, Norm

if TYPE_CHECKING:
    from .weights import Reader

_GPT_NAMES = ("model.wte", "model.wpe", "model.lm_head.bias")
_T5_NAMES = ("shared.weight_T", "shared.ape", "shared.bias")


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
        input_norm: before attention, or after it in a post-norm model.
        qkv: hidden -> 3 * heads * head_size: all q, then all k, then all v.
        attention_out: heads * head_size -> hidden.
        post_norm: the same for the MLP; None where the MLP works on attention's input.
        mlp_in: hidden -> inter.
        mlp_gate: hidden -> inter; multiplied with mlp_in's output.
        mlp_out: inter -> hidden.
        cross: attention to the encoder's output; None: there is no encoder.
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
        layers: in their order.
        final_norm: after the last layer.
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
        like: an empty tensor on the device, of the type that is computed in.
        size_bytes: of all tensors.
        saved_bytes: how much larger they would be without int8.
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
    """Give the tokens that a tensor rank predicts; the ranks' numbers of tokens differ by one at most."""
    return range(vocab_size * rank // ranks, vocab_size * (rank + 1) // ranks)


def read_model(read: Reader, config: ModelConfig, partition: Partition, has_head: bool) -> ModelWeights:
    """Read a process's part of a checkpoint.

    Args:
        read: gives the tensors.
        config: of the whole model.
        partition: which part.
        has_head: whether there is a file for the head; a family without tied heads must have it.
    """
    is_t5 = config.encoder is not None
    table_name, positions_name, bias_name = _T5_NAMES if is_t5 else _GPT_NAMES
    predicts = partition.predicts and config.has_decoder
    has_head = has_head or not config.has_tied_head
    table, positions, norm, head = None, None, None, None
    if partition.embeds or (predicts and not has_head):
        table = read.tensor(table_name, dtype=read.head_type)
    if predicts:
        bias = read.tensor(bias_name, dtype=read.head_type) if bias_name in read else None
        head = read.head(config.head if has_head else None, table, bias)
    if partition.embeds:
        positions = read.tensor(positions_name) if positions_name in read else None
        norm = read.norm("model.pre_decoder_layernorm", config)
    embedding = table if partition.embeds and table is not None else read.empty((0, config.hidden_units))
    encoder = _t5_stack(read, config, "encoder", partition.encoder_layers) if is_t5 else None
    decoder = None
    if config.has_decoder:
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
        final_norm=read.norm("model.final_layernorm", config),
        layers=tuple(_gpt_layer(read, config, f"model.layers.{index}") for index in layers),
    )


def _gpt_layer(read: Reader, config: ModelConfig, layer: str) -> LayerWeights:
    input_norm = read.norm(f"{layer}.input_layernorm", config)
    assert input_norm is not None
    return LayerWeights(
        input_norm=input_norm,
        qkv=read.column_parallel(f"{layer}.attention.query_key_value"),
        attention_out=read.row_parallel(f"{layer}.attention.dense"),
        post_norm=read.norm(f"{layer}.post_attention_layernorm", config),
        mlp_in=read.column_parallel(f"{layer}.mlp.dense_h_to_4h"),
        mlp_gate=None,
        # A parallel GPT-NeoX has one bias for attention and MLP together.
        mlp_out=read.row_parallel(
            f"{layer}.mlp.dense_4h_to_h", f"{layer}.mlp.dense_4h_to_h.bias", f"{layer}.mlp.attention.bias.sum"
        ),
    )


def _t5_stack(read: Reader, config: ModelConfig, name: str, layers: range | None) -> StackWeights:
    is_decoder = name == "decoder"
    stack = config if is_decoder or config.encoder is None else config.encoder
    bias = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return StackWeights(
        position_bias=read.tensor(bias) if bias in read else None,
        final_norm=read.norm(f"{name}.final_layer_norm", stack),
        layers=tuple(
            _t5_layer(read, stack, f"{name}.block.{index}.layer", is_decoder)
            for index in (range(stack.num_layer) if layers is None else layers)
        ),
    )


def _t5_layer(read: Reader, stack: Stack, layer: str, is_decoder: bool) -> LayerWeights:
    own, last = f"{layer}.0.SelfAttention", f"{layer}.{2 if is_decoder else 1}"
    dense = f"{last}.DenseReluDense"
    input_norm = read.norm(f"{layer}.0.layer_norm", stack)
    assert input_norm is not None
    return LayerWeights(
        input_norm=input_norm,
        qkv=read.column_parallel(f"{own}.qkv")
        if is_decoder
        else read.column_parallel(f"{own}.q", f"{own}.k", f"{own}.v"),
        attention_out=read.row_parallel(f"{own}.o"),
        post_norm=read.norm(f"{last}.layer_norm", stack),
        mlp_in=read.column_parallel(f"{dense}.wi"),
        mlp_gate=read.column_parallel(f"{dense}.wi2") if f"{dense}.wi2.weight" in read else None,
        mlp_out=read.row_parallel(f"{dense}.wo"),
        cross=_t5_cross(read, stack, f"{layer}.1") if is_decoder else None,
        ia3=read.ia3(f"{own}.k", f"{own}.v", dense),
    )


def _t5_cross(read: Reader, stack: Stack, layer: str) -> CrossWeights:
    memory, norm = f"{layer}.EncDecAttention", read.norm(f"{layer}.layer_norm", stack)
    assert norm is not None
    return CrossWeights(
        norm=norm,
        query=read.column_parallel(f"{memory}.q"),
        key_value=read.column_parallel(f"{memory}.k", f"{memory}.v"),
        out=read.row_parallel(f"{memory}.o"),
        ia3=read.ia3(f"{memory}.k", f"{memory}.v"),
    )
