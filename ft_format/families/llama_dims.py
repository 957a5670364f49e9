"""What a decoder of the Llama family is: its dimensions, and what of it the community's FasterTransformer computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ft_format.layout import Dims

RMS_NORM, LAYER_NORM = "rmsnorm", "layernorm"
"""Values of ``layernorm_type``; a layer norm has a bias, an RMS norm has none."""
NORMS = (RMS_NORM, LAYER_NORM)
ACTIVATIONS = ("silu", "gelu", "exact_gelu", "relu", "squared_relu")
"""Values of ``activation_type``; "gelu" is its tanh form, as everywhere in FasterTransformer."""
PLAIN_ROPE, LINEAR_ROPE, LLAMA3_ROPE = "default", "linear", "llama3"
"""Values of ``rope_type``: angles as they are, positions divided, and the frequencies of Llama 3.1."""
ROPE_TYPES = (PLAIN_ROPE, LINEAR_ROPE, LLAMA3_ROPE)
ALL_LAYERS = "1"
"""The ``attention_window_layers`` of a model whose every layer has the window."""
MOST_EXPERTS = 4096
"""Largest number of experts of a layer that is read."""
_MOST_LISTED = 1 << 18
_HEAD_SIZES = (32, 48, 64, 80, 96, 128, 144, 160, 192, 224, 256)  # of its grouped-query kernels


@dataclass(frozen=True)
class LlamaDims(Dims):
    """Dimensions and structure of Llama and of its relatives; the defaults are Llama's.

    Attributes:
        head_num, kv_head_num: heads of the queries, and of the keys and values; the second divides the first.
        kv_head_copies: how many equal heads of keys and values follow one another, in files for more ranks than heads.
        size_per_head: width of each; heads times width need not be hidden_units.
        hidden_units: width of the residual stream.
        inter_size: width of the feed-forward's middle; of one expert where there are several.
        num_layer: transformer blocks.
        vocab_size: rows of the embedding, with the training's padding.
        max_pos_seq_len: the longest text that it was trained for.
        rotary_embedding: width of a head that is rotated by position, its halves against each other.
        layernorm_eps: epsilon of every norm.
        model_variant: the name of the architecture in transformers, as qwen2; empty: the source has none.
        has_untied_head: the output projection is not the embedding. Its tensor is there either way.
        rope_theta: base of the rotation.
        rope_type: one of ROPE_TYPES.
        rope_scaling_factor: what positions are divided by (linear), or long waves (llama3).
        rope_low_freq_factor, rope_high_freq_factor, rope_original_max_position: of llama3 alone.
        layernorm_type: rmsnorm or layernorm.
        has_zero_centred_norms: every norm's weights are stored less one.
        activation_type: one of ACTIVATIONS.
        is_gated: the feed-forward is activation(gate) * up; else activation(up), and there is no gate.
        has_qkv_bias, has_dense_bias, has_mlp_bias: biases of attention's inputs, its output, and the feed-forward.
        qk_norm: queries and keys are normalised head by head, before they are rotated.
        has_output_norms: norms behind attention and behind the feed-forward too, before the residual is added.
        embedding_scale: what embeddings are multiplied by.
        attention_scalar: scores are divided by its root; 0: by that of size_per_head.
        attn_logit_softcap, final_logit_softcap: c of c * tanh(x / c), for scores and for logits; 0: there is none.
        attention_window: tokens that a token sees, itself among them; 0: all before it.
        attention_window_layers: which layers have the window: 1 or 0 for each, repeated to the last layer.
        expert_num, experts_per_token: feed-forwards of a layer and those that a token uses; 0: there is one.
    """

    head_num: int
    kv_head_num: int
    size_per_head: int
    hidden_units: int
    inter_size: int
    num_layer: int
    vocab_size: int
    max_pos_seq_len: int
    rotary_embedding: int
    layernorm_eps: float
    model_variant: str = ""
    has_untied_head: bool = True
    rope_theta: float = 10000.0
    rope_type: str = PLAIN_ROPE
    rope_scaling_factor: float = 1.0
    rope_low_freq_factor: float = 0.0
    rope_high_freq_factor: float = 0.0
    rope_original_max_position: int = 0
    layernorm_type: str = RMS_NORM
    has_zero_centred_norms: bool = False
    activation_type: str = "silu"
    is_gated: bool = True
    has_qkv_bias: bool = False
    has_dense_bias: bool = False
    has_mlp_bias: bool = False
    qk_norm: bool = False
    has_output_norms: bool = False
    embedding_scale: float = 1.0
    attention_scalar: float = 0.0
    attn_logit_softcap: float = 0.0
    final_logit_softcap: float = 0.0
    attention_window: int = 0
    attention_window_layers: str = ALL_LAYERS
    expert_num: int = 0
    experts_per_token: int = 0
    kv_head_copies: int = 1

    def __post_init__(self) -> None:
        """Compare the numbers with the largest that are read: each expert of a layer is three tensors to list."""
        super().__post_init__()
        if self.expert_num > MOST_EXPERTS or self.expert_num * self.num_layer > _MOST_LISTED:
            raise self.error(f"expert_num is {self.expert_num:,}, which no model has", f"the most is {MOST_EXPERTS:,}")

    def for_ranks(self, tensor_para_size: int) -> LlamaDims:
        """Give each rank a head of keys and values, where there are more ranks than heads."""
        copies = max(1, tensor_para_size // self.kv_head_num)
        return replace(self, kv_head_num=self.kv_head_num * copies, kv_head_copies=self.kv_head_copies * copies)

    def without_copies(self) -> LlamaDims:
        """Give the dimensions of the model itself."""
        return replace(self, kv_head_num=self.kv_head_num // self.kv_head_copies, kv_head_copies=1)

    @property
    def heads_per_group(self) -> int:
        """Heads that share one key and value."""
        return self.head_num // self.kv_head_num

    @property
    def qkv_head_num(self) -> int:
        """Heads of queries, keys and values together."""
        return self.head_num + 2 * self.kv_head_num

    def has_window(self, layer: int) -> bool:
        """Whether a layer's attention has the window."""
        layers = self.attention_window_layers
        return bool(self.attention_window) and layers[layer % len(layers)] == "1"


def beyond_fastertransformer(dims: LlamaDims) -> tuple[str, ...]:
    """List what the community's FasterTransformer computes otherwise, one line each; empty: it computes the model.

    It is that of the branches with grouped queries; what reads neither kv_head_num nor rope_theta computes less.
    """
    of_model: dict[str, tuple[object, bool, str]] = {
        "hidden_units": (
            dims.hidden_units,
            dims.hidden_units != dims.head_num * dims.size_per_head,
            "its width is head_num * size_per_head",
        ),
        "size_per_head": (dims.size_per_head, dims.size_per_head not in _HEAD_SIZES, f"its kernels have {_HEAD_SIZES}"),
        "rope_type": (dims.rope_type, dims.rope_type == LLAMA3_ROPE, "it divides all positions by one factor"),
        "layernorm_type": (dims.layernorm_type, dims.layernorm_type != RMS_NORM, "it has RMS norm without a bias"),
        "has_zero_centred_norms": (1, dims.has_zero_centred_norms, "it multiplies by the weights as they are"),
        "activation_type": (dims.activation_type, dims.activation_type != "silu", "it has SiLU"),
        "is_gated": (0, not dims.is_gated, "its feed-forward has a gate"),
        "has_qkv_bias": (1, dims.has_qkv_bias, "it has no biases"),
        "has_dense_bias": (1, dims.has_dense_bias, "it has no biases"),
        "has_mlp_bias": (1, dims.has_mlp_bias, "it has no biases"),
        "qk_norm": (1, dims.qk_norm, "it does not normalise queries and keys"),
        "has_output_norms": (1, dims.has_output_norms, "it has norms before attention and feed-forward alone"),
        "embedding_scale": (dims.embedding_scale, dims.embedding_scale != 1, "it does not scale embeddings"),
        "attention_scalar": (
            dims.attention_scalar,
            dims.attention_scalar not in (0, dims.size_per_head),
            "it divides scores by the root of size_per_head",
        ),
        "attn_logit_softcap": (dims.attn_logit_softcap, dims.attn_logit_softcap != 0, "it does not cap scores"),
        "final_logit_softcap": (dims.final_logit_softcap, dims.final_logit_softcap != 0, "it does not cap logits"),
        "attention_window": (
            dims.attention_window,
            0 < dims.attention_window < dims.max_pos_seq_len,
            "every token sees all before it",
        ),
        "expert_num": (dims.expert_num, dims.expert_num != 0, "its feed-forward is one"),
    }
    return tuple(f"{key} = {value}  ({reason})" for key, (value, is_so, reason) in of_model.items() if is_so)
