"""What a model is, stated once: its blocks, its tensors, and ``config.json`` in both directions.

The tensors of a decoder are those that transformers saves, and ``config.json`` is its description. Everything that
converts, exports, serves or measures such a model asks this package, the engine inside Triton's stub included; an
exported model carries its copy. It therefore needs the standard library only and imports no other package.

    architecture = models.find(config["model_type"])
    decoder = architecture.read(config)      # sizes, blocks, layers; architecture.write(decoder) is the inverse
    decoder.tensors()                        # name -> axes, shape, tensor-parallel axis
    decoder.layer_tensors(3)["query"]        # "model.layers.3.self_attn.q_proj"

A new family is a file in ``architectures/`` of the blocks that it has, the names that differ and the keys of its
``config.json``, and a line in ``ARCHITECTURES``. Only what no block computes yet goes elsewhere: a field of a block in
``blocks/``, with the keys that say it beside it. See docs/add_a_model_family.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.architecture import STORAGE, ZERO_CENTRED, Architecture
from models.architectures.deepseek_v2 import DEEPSEEK_V2
from models.architectures.deepseek_v3 import DEEPSEEK_V3
from models.architectures.ernie4_5_moe import ERNIE4_5_MOE
from models.architectures.exaone4 import EXAONE4
from models.architectures.exaone_moe import EXAONE_MOE
from models.architectures.falcon_h1 import FALCON_H1
from models.architectures.gemma import GEMMA
from models.architectures.gemma2 import GEMMA2
from models.architectures.gemma3_text import GEMMA3_TEXT
from models.architectures.glm4_moe import GLM4_MOE
from models.architectures.glm4_moe_lite import GLM4_MOE_LITE
from models.architectures.gpt_oss import GPT_OSS
from models.architectures.granite import GRANITE
from models.architectures.llama import LLAMA
from models.architectures.llama4_text import LLAMA4_TEXT
from models.architectures.minimax_m2 import MINIMAX_M2
from models.architectures.mistral import MISTRAL
from models.architectures.mixtral import MIXTRAL
from models.architectures.nemotron import NEMOTRON
from models.architectures.nemotron_h import NEMOTRON_H
from models.architectures.olmo2 import OLMO2
from models.architectures.olmoe import OLMOE
from models.architectures.phi3 import PHI3
from models.architectures.qwen2 import QWEN2
from models.architectures.qwen3 import QWEN3
from models.architectures.qwen3_5_moe_text import QWEN3_5_MOE_TEXT
from models.architectures.qwen3_5_text import QWEN3_5_TEXT
from models.architectures.qwen3_moe import QWEN3_MOE
from models.architectures.qwen3_next import QWEN3_NEXT
from models.architectures.smollm3 import SMOLLM3
from models.architectures.starcoder2 import STARCODER2
from models.decoder import NAMES, Decoder
from models.errors import ModelError
from models.nearest import nearest

__all__ = ["ARCHITECTURES", "OTHER_NAMES", "Architecture", "Decoder", "ModelError", "find", "with_names"]

ARCHITECTURES: tuple[Architecture, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    NEMOTRON,
    STARCODER2,
    GEMMA,
    GEMMA2,
    GEMMA3_TEXT,
    OLMO2,
    EXAONE4,
    GRANITE,
    SMOLLM3,
    PHI3,
    MIXTRAL,
    QWEN3_MOE,
    OLMOE,
    MINIMAX_M2,
    GLM4_MOE,
    ERNIE4_5_MOE,
    EXAONE_MOE,
    DEEPSEEK_V3,
    DEEPSEEK_V2,
    GLM4_MOE_LITE,
    GPT_OSS,
    NEMOTRON_H,
    FALCON_H1,
    QWEN3_NEXT,
    QWEN3_5_TEXT,
    QWEN3_5_MOE_TEXT,
    LLAMA4_TEXT,
)
"""The first that can express a model is taken: Llama before Mistral, whose only difference is the window."""
OTHER_NAMES = {"kimi_k2": DEEPSEEK_V3.model_type}
"""Names on the hub of what transformers has under another: Kimi K2's code there is DeepSeek V3's."""


def find(model_type: object, config: Mapping[str, Any] | None = None) -> Architecture:
    """Find an architecture by transformers' name of it.

    Args:
        model_type: that name.
        config: whose it is; an error says which one is nearest.

    Raises:
        ModelError: there is none; with the names that there are.
    """
    own = OTHER_NAMES.get(model_type, model_type) if isinstance(model_type, str) else model_type
    for each in ARCHITECTURES:
        if each.model_type == own:
            return each
    legal = ", ".join(each.model_type for each in ARCHITECTURES)
    near = nearest(config, ARCHITECTURES) if config else ""
    raise ModelError(f"config.json: model_type is {model_type!r}", f"known are {legal}{near and f'; {near}'}")


def with_names(decoder: Decoder) -> Decoder:
    """Call the tensors of a model as the first architecture does that can express it; of none, by Llama's names."""
    found = next((each for each in ARCHITECTURES if not each.lacks(decoder)), None)
    for name in STORAGE if found else ():
        block, _, field = name.partition(".")
        own = getattr(decoder, block)
        if name != ZERO_CENTRED and own:
            stored: dict[str, Any] = {block: replace(own, **{field: bool(found and found.has.get(name))})}
            decoder = replace(decoder, **stored)
    return replace(decoder, names=found.all_names if found else NAMES)
