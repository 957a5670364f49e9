"""Hugging Face's T5 and mT5, as FasterTransformer's T5.

Keys: transformers, ``modeling_t5.py`` and ``modeling_mt5.py``. FasterTransformer's names are those of transformers but
for the embedding, the decoder's fused q, k, v and the two halves of a gated feed-forward.
"""

from __future__ import annotations

from export_scripts.weights.layouts import transposed, unchanged
from export_scripts.weights.schema import Rule, Rules, SourceMap, Sources
from export_scripts.weights.t5_layouts import output, projection, projection_in_block


def _attention(name: str) -> dict[Sources, Rules]:
    return {f"{name}.{part}.weight": Rule(f"{name}.{part}.weight", projection) for part in "qkv"}


def _feed_forward(name: str) -> dict[Sources, Rules]:
    return {
        f"{name}.wi.weight": Rule(f"{name}.wi.weight", transposed),
        f"{name}.wi_0.weight": Rule(f"{name}.wi.weight", transposed),
        f"{name}.wi_1.weight": Rule(f"{name}.wi2.weight", transposed),
        f"{name}.wo.weight": Rule(f"{name}.wo.weight", transposed),
    }


def _same(name: str) -> dict[Sources, Rules]:
    return {name: Rule(name, unchanged)}


def _side(side: str, feed_forward_layer: int) -> dict[Sources, Rules]:
    block, attention = side + ".block.{layer}.", side + ".block.{layer}.layer.0.SelfAttention"
    relative = f"{attention}.relative_attention_bias.weight"
    norms = [f"{block}layer.{layer}.layer_norm.weight" for layer in range(feed_forward_layer + 1)]
    rules: dict[Sources, Rules] = {
        relative: Rule(relative, transposed),
        f"{attention}.o.weight": Rule(f"{attention}.o.weight", output),
        **_feed_forward(f"{block}layer.{feed_forward_layer}.DenseReluDense"),
    }
    for name in (*norms, f"{side}.final_layer_norm.weight"):
        rules |= _same(name)
    return rules


_SELF, _CROSS = "decoder.block.{layer}.layer.0.SelfAttention", "decoder.block.{layer}.layer.1.EncDecAttention"
_BLOCKS: dict[Sources, Rules] = {
    **_side("encoder", feed_forward_layer=1),
    **_attention("encoder.block.{layer}.layer.0.SelfAttention"),
    **_side("decoder", feed_forward_layer=2),
    tuple(f"{_SELF}.{part}.weight" for part in "qkv"): Rule(f"{_SELF}.qkv.weight", projection_in_block, concat_axis=1),
    **_attention(_CROSS),
    f"{_CROSS}.o.weight": Rule(f"{_CROSS}.o.weight", output),
}
_IGNORED = {
    "encoder.embed_tokens.weight": "a copy of shared.weight",
    "decoder.embed_tokens.weight": "a copy of shared.weight",
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": "of the first T5 files; no model uses it",
}
_EMBEDDING = Rule("shared.weight_T", unchanged)
_HEAD = Rule("lm_head.weight", unchanged)

TIED = SourceMap(
    name="Hugging Face T5 with tied embeddings",
    rules={"shared.weight": (_EMBEDDING, _HEAD), **_BLOCKS},
    ignored=_IGNORED,
)
UNTIED = SourceMap(
    name="Hugging Face T5 with an output projection of its own",
    rules={"shared.weight": _EMBEDDING, "lm_head.weight": _HEAD, **_BLOCKS},
    ignored=_IGNORED,
)
