"""What a network is: the dimensions and kinds of its stacks; families/ reads them from ``config.ini``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

from ft_format.layout import StoredTensor
from models.blocks.delta_rule import DeltaRule
from models.blocks.mamba import Mamba
from models.blocks.multipliers import Multipliers
from models.decoder import Decoder

from .layouts import StackWeights

NO_POSITION_LIMIT = 16384  # FasterTransformer's FT_SEQ_LEN_MAX


class Rope(NamedTuple):
    """The rotation of a layer.

    Attributes:
        frequencies: angles from one position to the next, of each pair of numbers; empty: nothing is rotated.
        factor: what the rotated numbers are multiplied by.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0


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
        inter_size: width of the MLP's inner layer; of what a token uses together, where there are experts.
        num_layer: transformer layers.
        model_width: of the residual stream; 0: the heads' width together.
        layernorm_eps: added to the variance.
        is_rms: whether norms divide by the root mean square only.
        has_zero_centred_norms: whether the norms' weights are stored less one.
        scales_attention: whether q k is divided by the root of a head's width; else the weights have that in them (T5
            without biases).
        attention_scalar: what scores are divided by the root of in place of a head's width; 0: the width.
        attention_multiplier: of scores, in place of a root; 0: there is none.
        attn_softcap: c of c * tanh(score / c); 0: scores are not capped.
        windows: of each layer, tokens that a token sees, itself among them; 0: all before it. Empty: none has one.
        chunks: of each layer, see AttentionSpec; empty: none has any.
        temperature: of queries in layers that do not rotate, and its floor, see models' Attention; 0: they have none.
        residual_multiplier: of what attention and MLP add to the residual stream.
        is_pre_norm: whether the norm precedes attention and MLP; else it follows their sum with the residual stream.
        is_parallel: whether attention and MLP both work on the layer's input.
        activation: of the MLP, one of linear.ACTIVATIONS.
        is_gated: whether a second product with the MLP's input is multiplied in.
        positions: learned (a table that is added), rotary, alibi, relative (a bias by bucketed distance) or none.
        rotary_dim: how many numbers of each head are rotated, where ``ropes`` do not say it.
        norms_heads_together: whether norms of queries and keys are of all heads of a token together, else of each.
        rotates_pairs: whether neighbours are rotated with each other (GPT-J), else the two halves (GPT-NeoX).
        has_output_gate: whether what a head gives is multiplied by a sigmoid, made behind its query.
        ropes: of each layer; empty: angles of waves whose lengths have a base of 10000.
        mamba, delta: blocks that keep states, of which some layers are made; None: none is.
        multipliers: numbers within its layers.
    """

    head_num: int
    size_per_head: int
    inter_size: int
    num_layer: int
    kv_head_num: int = 0
    model_width: int = 0
    layernorm_eps: float = 1e-6
    is_rms: bool = False
    has_zero_centred_norms: bool = False
    scales_attention: bool = True
    attention_scalar: float = 0.0
    attention_multiplier: float = 0.0
    attn_softcap: float = 0.0
    windows: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    temperature: tuple[float, int] = (0.0, 0)
    residual_multiplier: float = 1.0
    is_pre_norm: bool = True
    is_parallel: bool = False
    activation: str = "gelu"
    is_gated: bool = False
    positions: str = "learned"
    rotary_dim: int = 0
    norms_heads_together: bool = False
    rotates_pairs: bool = False
    has_output_gate: bool = False
    ropes: tuple[Rope, ...] = ()
    mamba: Mamba | None = None
    delta: DeltaRule | None = None
    multipliers: Multipliers = Multipliers()

    @property
    def hidden_units(self) -> int:
        """Width of the residual stream."""
        return self.model_width or self.head_num * self.size_per_head

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_head_num or self.head_num

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys and values."""
        return self.head_num // self.kv_heads

    @property
    def keeps_states(self) -> bool:
        """Whether rows have states beside keys and values."""
        return self.mamba is not None or self.delta is not None

    @property
    def attention_work(self) -> tuple[int, int]:
        """Multiplications of a token in a layer's attention: with its matrices, and with a cell that the token sees."""
        heads = self.head_num * self.size_per_head
        return self.hidden_units * (2 * heads + 2 * self.kv_heads * self.size_per_head), 2 * heads

    @property
    def attention_scale(self) -> float:
        """What q k is multiplied with."""
        root = float((self.attention_scalar or self.size_per_head) ** -0.5)
        scale = (self.attention_multiplier or root) * self.multipliers.key  # a rotation leaves a factor as it is
        return scale if self.scales_attention else 1.0

    def window_of(self, layer: int) -> int:
        """Return the window of a layer's attention; 0: there is none."""
        return self.windows[layer] if self.windows else 0

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotation of a layer, where it has one of its own."""
        return self.ropes[layer] if self.ropes else None

    @property
    def reach(self) -> int:
        """Tokens that a token sees at most, in any layer, itself among them; 0: in some layer it sees all before it."""
        seen = [max(each) for each in zip_longest(self.windows, self.chunks, fillvalue=0)]
        return max(seen, default=0) if all(seen) else 0


StackReader = Callable[[Any, Any, range], StackWeights]
"""Reads some layers of one of a model's stacks: by a Reader, of a ModelConfig."""


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


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Stack):
    """A whole network: its decoder, the one stack that a GPT has, and what surrounds it.

    Attributes:
        family: the name of its family in ft_format. In t5-encoder, what is said of the decoder is the encoder's.
        layout: which tensors the network reads; None: only dimensions are needed.
        tensors: every tensor of the checkpoint by name, by the family's table in ft_format, or in models.
        decoder: of a Hugging Face directory, whose files have a head of keys or values that several ranks copy once;
            None: the checkpoint is FasterTransformer's shards.
        head: name of the output projection among them; empty: it is the embedding.
        has_tied_head: whether the embedding takes the head's place where that has no file.
        has_decoder: whether tokens are generated; else the encoder's output is the answer.
        encoder: of t5 and t5-encoder.
        vocab_size: rows of the embedding, padding included.
        max_pos_seq_len: the longest input plus output, in tokens: rows of the position embedding where there is one.
        start_id: token that an empty input starts from.
        end_id: token that ends a generation where the request names none.
        embedding_scale: what the tokens' embeddings are multiplied by; embeddings that a request brings are not.
        logits_divisor: what logits are divided by.
        final_softcap: c of c * tanh(logit / c); 0: logits are not capped.
        scales_head: whether hidden states are multiplied with hidden_units ** -0.5 before the head (T5, tied).
        weight_data_type: of the shards on disk: fp32, fp16 or bf16.
        tensor_para_size: how many ranks the shards were written for; None where config.ini does not say.
        prompt_learning_type: which kind its tasks' prompts are.
        prompt_learning_start_id: tokens from here on stand for a task's prompt.
        uses_prefixes: whether prefix prompts are used; FasterTransformer's GPT opens their files and ignores them.
        prompt_tasks: name and prompt length of each.
        ia3_num_tasks: rows of T5's IA3 vectors; 0: it has none.
        has_expert_parallel: whether each rank has some experts whole; else a slice of every one's middle.
        is_part: whether its directory has tensors of more than this network.
    """

    vocab_size: int
    max_pos_seq_len: int
    start_id: int
    end_id: int
    family: str = "gpt"
    layout: Layout | None = field(default=None, repr=False, compare=False)
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict, repr=False, compare=False)
    decoder: Decoder | None = field(default=None, repr=False, compare=False)
    head: str = "model.lm_head.weight"
    has_tied_head: bool = True
    has_decoder: bool = True
    encoder: Stack | None = None
    embedding_scale: float = 1.0
    logits_divisor: float = 1.0
    final_softcap: float = 0.0
    scales_head: bool = False
    weight_data_type: str = "fp32"
    tensor_para_size: int | None = None
    prompt_learning_type: PromptType = PromptType.NONE
    prompt_learning_start_id: int = 0
    uses_prefixes: bool = False
    prompt_tasks: tuple[tuple[str, int], ...] = ()
    ia3_num_tasks: int = 0
    has_expert_parallel: bool = False
    is_part: bool = False

    @property
    def attention_work(self) -> tuple[int, int]:
        """See Stack; latent attention's in the absorbed form."""
        if not (self.decoder and self.decoder.latent):
            return super().attention_work
        latent, size_of = self.decoder.latent, self.decoder.axis_size
        products = sum(prod(each.sized(size_of).shape) for each in latent.tensors().values())
        return products, self.head_num * (latent.kv_width + latent.kv_rank)

    @property
    def has_experts(self) -> bool:
        """Whether some layers are mixtures of experts."""
        return self.decoder is not None and any("mixture" in layer.blocks for layer in self.decoder.layers)

    @property
    def has_prefixes(self) -> bool:
        """Whether its tasks are prefix prompts that FasterTransformer uses; see prefixes.py."""
        return self.uses_prefixes and self.prompt_learning_type == PromptType.PREFIX
