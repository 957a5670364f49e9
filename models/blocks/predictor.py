"""Predictors of further tokens: each is a layer of the last one's kind behind it, and what leads into and out of it.

A predictor's layer works on ``projection`` of the next token's embedding and of what the last layer gave, each
normalised. Embedding and head are the model's own; files of DeepSeek's repeat them in each predictor, and those of
Qwen3-Next have one predictor beside the layers, which transformers' class passes over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from models.config_json import ConfigJson
from models.keys import Fields, Keys
from models.spelling import Spelling
from models.tensor import Tensor

NAMES = {
    **{"predictor.embedding": "embed_tokens", "predictor.embedding_norm": "enorm", "predictor.hidden_norm": "hnorm"},
    **{
        "predictor.layer": "",
        "predictor.projection": "eh_proj",
        "predictor.norm": "shared_head.norm",
        "predictor.head": "shared_head.head",
    },
}
"""Below the name of the layer that would be the next."""
BESIDE = {
    **{"predictor.layer": "mtp.layers.{predictor}", "predictor.projection": "mtp.fc", "predictor.norm": "mtp.norm"},
    **{f"predictor.{name}_norm": f"mtp.pre_fc_norm_{name}" for name in ("embedding", "hidden")},
    **dict.fromkeys(("predictor.embedding", "predictor.head"), ""),
}
"""Whole names of Qwen3-Next's, whose layer has a name of its own; what has an empty one is not there."""
WITHIN = {
    **{"predictor.layer": BESIDE["predictor.layer"], "predictor.norm": "final_layernorm"},
    **dict.fromkeys(("predictor.embedding", "predictor.head"), ""),
}
"""Names of Nemotron 3's, in its first layer and its last."""
OUTER = "mtp."
"""What a whole name begins with."""
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
LISTED = "mtp_model_layer.layers"
"""Where a hybrid has a predictor's layers."""
_LAST = "predictor.norm"


def roles(is_first: bool, is_last: bool) -> tuple[str, ...]:
    """List what the layers of a predictor have beside their blocks: what leads into it, and out of it."""
    return tuple(role for role in TENSORS if (is_last if role.startswith(_LAST) else is_first))


@dataclass(frozen=True)
class PredictorBeside(Keys):
    """A predictor beside the layers, with attention; of a directory it is passed over.

    Attributes:
        key: of how many there are, which engines read.
    """

    key: str
    says: ClassVar[tuple[str, ...]] = ("predictor_num", "predictors_beside")
    _UNSAID = 1

    def read(self, config: ConfigJson) -> dict[str, Any]:
        """As vLLM reads it: the hub's Qwen3-Next has one, and does not say so."""
        said = self._UNSAID if config.get(self.key) is None else config.whole(self.key)
        return dict(zip(self.says, (0, said), strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        own, beside = (fields[name] for name in self.says)
        return {self.key: own or beside} if own or beside != self._UNSAID else {}

    def lacks(self, fields: Fields) -> list[str]:
        count, last = fields[self.says[0]], fields["layers.blocks"][-1]
        if not count or (count == 1 and "attention" in last):
            return []
        return [f"{self.says[0]}: {count}, of a layer with {'+'.join(last)}  (it has one, with attention)"]


class PredictorPattern(Keys):
    """Predictors of several layers, each a letter, or a word, which goes before; of a directory they are passed over.

    Args:
        letters: by the blocks of a layer.
        words: letters by word.
    """

    says: ClassVar[tuple[str, ...]] = ("predictor_num", "predictor_blocks", "predictors_beside")
    _COUNT, _PATTERN, _LIST = "num_nextn_predict_layers", "mtp_hybrid_override_pattern", "mtp_layers_block_type"

    def __init__(self, letters: Mapping[tuple[str, ...], str], words: Mapping[str, str]) -> None:
        self._letters, self._words = letters, words

    def read(self, config: ConfigJson) -> dict[str, Any]:
        """Read what one may be; none is looked for where it is none that is known."""
        count = 0 if config.get(self._COUNT) is None else config.whole(self._COUNT)
        listed, blocks = config.get(self._LIST), {letter: each for each, letter in self._letters.items()}
        said = listed if isinstance(listed, (list, tuple)) else config.get(self._PATTERN) or ()
        letters = [self._words.get(str(each), str(each)) for each in said]
        count *= bool(letters) and all(each in blocks for each in letters)
        return dict(zip(self.says, (0, tuple(blocks[each] for each in letters) if count else (), count), strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        own, blocks, beside = (fields[name] for name in self.says)
        if not (count := own or beside):
            return {}
        return {self._COUNT: count, self._PATTERN: "".join(self._letters[each] for each in blocks)}

    def lacks(self, fields: Fields) -> list[str]:
        count, blocks, _ = (fields[name] for name in self.says)
        is_known = blocks and all(each in self._letters for each in blocks)
        return [] if is_known or not count else [f"{self.says[0]}: {count}  (its layers are not listed)"]
