"""Predictors of further tokens: each is a layer of the last one's kind behind it, and what leads into and out of it.

A predictor's layer works on ``projection`` of the next token's embedding and of what the last layer gave, each
normalised. Embedding and head are the model's own; files of DeepSeek's repeat them in each predictor.
"""

from __future__ import annotations

from models.spelling import Spelling
from models.tensor import Tensor

NAMES = {
    **{"predictor.embedding": "embed_tokens", "predictor.embedding_norm": "enorm", "predictor.hidden_norm": "hnorm"},
    **{"predictor.projection": "eh_proj", "predictor.norm": "shared_head.norm", "predictor.head": "shared_head.head"},
}
"""Below the name of the layer that would be the next."""
_VOCABULARY, _WIDTH = Tensor(("vocab_size", "hidden_units"), 0), Tensor(("hidden_units",))
COPIES = {"embedding": "predictor.embedding.weight", "head": "predictor.head.weight"}
"""What of a predictor is the model's, by the role of that."""
NORMS = {f"predictor.{role}.weight": _WIDTH for role in ("embedding_norm", "hidden_norm", "norm")}
TENSORS = {
    **dict.fromkeys(COPIES.values(), _VOCABULARY),
    **NORMS,
    "predictor.projection.weight": Tensor(("hidden_units", (2, "hidden_units")), 0),
}
"""What a predictor has beside its layer, by role."""
SPELLINGS = (
    Spelling(("predictor.embedding_norm",), ("enorm.{kind}",)),
    Spelling(("predictor.hidden_norm",), ("hnorm.{kind}",)),
    Spelling(("predictor.projection",), ("eh_proj.{kind}",)),
    Spelling(("predictor.norm",), ("final_layernorm.{kind}",)),
)
"""megatron-core's, below ``mtp.layers.<n>``."""
LAYERS = ("transformer_layer", "mtp_model_layer")
"""Where megatron-core has a predictor's layer: on disk, and in memory and rank files."""
