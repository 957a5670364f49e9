"""What a network's weights are, and which tensors of the checkpoint become which of them.

The family's table in ft_format lists the tensors, with their shapes and the axes that ranks split. ``read_model`` and
the family's Layout say once which tensors a network reads; a weights.Reader checks the files, counts the memory, or
loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .config import ModelConfig
from .linear import Linear, Norm, join

if TYPE_CHECKING:
    from .weights import Reader


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
        qkv: hidden -> (heads + 2 * kv_heads) * head_size: all q, then all k, then all v.
        attention_out: heads * head_size -> hidden.
        post_norm: the same for the MLP; None where the MLP works on attention's input.
        mlp_in: hidden -> inter, which is activated.
        mlp_gate: hidden -> inter, which mlp_in's activated output is multiplied by; None: the MLP has no gate.
        mlp_out: inter -> hidden.
        cross: attention to the encoder's output; None: there is no encoder.
        ia3: what k, v and the MLP's inner layer are multiplied with, [tasks, ...] each.
        query_norm, key_norm: of each head's query and key, before they are rotated; None: there is none.
        attention_output_norm, mlp_output_norm: of what the residual stream is added to; None: there is none.
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
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    attention_output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None

    def __post_init__(self) -> None:
        """Prepare the products of a gated MLP."""
        if self.mlp_gate:
            join(self.mlp_in, self.mlp_gate)


@dataclass(frozen=True)
class StackWeights:
    """This process's layers of a stack.

    Attributes:
        indices: of the layers among the whole stack's.
        layers: in their order.
        final_norm: after the last layer.
        position_bias: by head: ALiBi's slopes [heads], or the bias by bucket [heads, buckets]; None otherwise.
    """

    indices: range
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


StackReader = Callable[["Reader", ModelConfig, range], StackWeights]
"""Reads some layers of one of a model's stacks."""


@dataclass(frozen=True)
class Layout:
    """Which tensors a family's networks are made of.

    Attributes:
        embedding: name of the table of tokens.
        decoder: reads layers of the decoder.
        encoder: reads layers of the encoder; None: there is none.
        positions: name of the table of positions; a model may lack it.
        head_bias: name of the head's bias; a model may lack it.
        embedding_norm: name of the norm behind the embedding; a model may lack it.
    """

    embedding: str
    decoder: StackReader
    encoder: StackReader | None = None
    positions: str = ""
    head_bias: str = ""
    embedding_norm: str = "model.pre_decoder_layernorm"


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
    layout = config.layout
    assert layout, "config.ini was not read"
    predicts = partition.predicts and config.has_decoder
    has_head = bool(config.head) and (has_head or not config.has_tied_head)
    table, positions, norm, head = None, None, None, None
    if partition.embeds or (predicts and not has_head):
        table = read.tensor(layout.embedding, dtype=read.head_type)
    if predicts:
        bias = read.tensor(layout.head_bias, dtype=read.head_type) if layout.head_bias in read else None
        head = read.head(config.head if has_head else None, table, bias)
    if partition.embeds:
        positions = read.tensor(layout.positions) if layout.positions in read else None
        norm = read.norm(layout.embedding_norm, config)
    embedding = table if partition.embeds and table is not None else read.empty((0, config.hidden_units))
    encoder = decoder = None
    if layout.encoder and config.encoder:
        indices = partition.encoder_layers
        encoder = layout.encoder(read, config, range(config.encoder.num_layer) if indices is None else indices)
    if config.has_decoder:
        decoder = layout.decoder(read, config, partition.layers)
    sizes = read.size_bytes, read.saved_bytes
    return ModelWeights(embedding, positions, norm, encoder, decoder, head, read.empty((0, 0)), *sizes)
