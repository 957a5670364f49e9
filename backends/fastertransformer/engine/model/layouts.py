"""What a network's weights are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..cache.sizing import NOTHING, Entry
from ..cache.states import StateShape
from ..ops.linear import Linear, Norm
from .adapters import Matrix
from .blocks.attention import SelfAttention
from .blocks.feed_forward import FeedForward
from .blocks.state_mixers import StateMixer


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
        input_norm: before attention, or after it in a post-norm model; None: there is none.
        attention: self-attention; None: the layer has none.
        post_norm: the same for the MLP; None where there is none, or the MLP works on attention's input.
        feed_forward: the MLP; None: the layer has none.
        cross: attention to the encoder's output; None: there is no encoder.
        attention_output_norm, mlp_output_norm: of what the residual stream is added to; None: there is none.
        state_mixer: in attention's place, or beside it on the same input; None: there is none.
    """

    input_norm: Norm | None
    attention: SelfAttention | None
    post_norm: Norm | None
    feed_forward: FeedForward | None
    cross: CrossWeights | None = None
    attention_output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None
    state_mixer: StateMixer | None = None

    @property
    def step_bytes(self) -> int:
        """Bytes of the matrices that one token's widest product reads."""
        mixed = self.state_mixer.into.size_bytes if self.state_mixer else 0
        return self.feed_forward.step_bytes if self.feed_forward else mixed


@dataclass(frozen=True)
class Entrance:
    """What leads into a predictor of further tokens.

    Attributes:
        embedding_norm: of the embeddings of tokens.
        hidden_norm: of what the model has computed of the tokens before them.
        projection: 2 * hidden -> hidden, of both side by side.
    """

    embedding_norm: Norm
    hidden_norm: Norm
    projection: Linear


@dataclass(frozen=True)
class StackWeights:
    """This process's layers of a stack.

    Attributes:
        indices: of the layers among the whole stack's.
        layers: in their order.
        final_norm: after the last layer.
        position_bias: by head: ALiBi's slopes [heads], or the bias by bucket [heads, buckets]; None otherwise.
        entrance: of a predictor; None: it is none.
    """

    indices: range
    layers: tuple[LayerWeights, ...]
    final_norm: Norm | None
    position_bias: Tensor | None
    entrance: Entrance | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What the cache of each layer keeps of a token."""
        return tuple(layer.attention.entry if layer.attention else NOTHING for layer in self.layers)

    @property
    def states(self) -> tuple[StateShape | None, ...]:
        """What is kept of a row, by layer; None: nothing, or keys and values alone."""
        return tuple(layer.state_mixer.state if layer.state_mixer else None for layer in self.layers)


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
        matrices: those that adapters may change, by name.
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
    matrices: Mapping[str, Matrix] = field(default_factory=dict)
