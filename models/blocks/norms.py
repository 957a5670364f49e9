"""The norms of a layer's residual stream, and the last one."""

from __future__ import annotations

from dataclasses import dataclass

from models.spelling import Spelling
from models.tensor import Tensor

RMS_NORM, LAYER_NORM = "rmsnorm", "layernorm"
"""A layer norm has a bias, an RMS norm has none."""
NAMES = {
    **{"input_norm": "input_layernorm", "post_attention_norm": "post_self_attn_layernorm"},
    **{"pre_mlp_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"},
}
SPELLINGS = (
    Spelling(
        ("input_norm",),
        (
            *("input_layernorm.{kind}", "self_attention.linear_qkv.layer_norm_{kind}"),
            "self_attention.layernorm_qkv.layer_norm_{kind}",
        ),
    ),
    Spelling(("post_attention_norm",), ("self_attention.linear_proj.post_layernorm.{kind}",)),
    Spelling(
        ("pre_mlp_norm",),
        (
            *("post_attention_layernorm.{kind}", "pre_mlp_layernorm.{kind}"),
            *("mlp.linear_fc1.layer_norm_{kind}", "layernorm_mlp.layer_norm_{kind}"),
        ),
    ),
    Spelling(("mlp_output_norm",), ("mlp.linear_fc2.post_layernorm.{kind}",)),
)
"""Megatron's: legacy and megatron-core's local specification, Transformer Engine's, and Gemma's behind the layers."""
_WIDTH = Tensor(("hidden_units",))


@dataclass(frozen=True)
class Norms:
    """One kind of norm, and where it stands.

    Attributes:
        eps: what is added to the variance.
        kind: RMS_NORM or LAYER_NORM.
        is_zero_centred: weights are stored less one.
        is_before: attention and feed-forward work on a normalised input.
        is_after: their output is normalised before it is added to the residual stream.
    """

    eps: float
    kind: str = RMS_NORM
    is_zero_centred: bool = False
    is_before: bool = True
    is_after: bool = False

    def roles(self, has_mixer: bool = True, has_feed_forward: bool = True) -> tuple[str, ...]:
        """Name those of a layer, in the order in which they are computed: around each of its halves that it has."""
        standing = [
            has and stands for has in (has_mixer, has_feed_forward) for stands in (self.is_before, self.is_after)
        ]
        return tuple(role for role, is_there in zip(NAMES, standing, strict=True) if is_there)

    def tensors(self, role: str) -> dict[str, Tensor]:
        """List the tensors of one norm, by role."""
        return {f"{role}.{kind}": _WIDTH for kind in (("weight", "bias") if self.kind == LAYER_NORM else ("weight",))}
