"""Directories of Hugging Face: for each family of tensors, the architectures of transformers that may express it."""

from __future__ import annotations

from collections.abc import Mapping

from export_scripts.weights.hub_keys import Target
from export_scripts.weights.huggingface_bloom import BLOOM
from export_scripts.weights.huggingface_decoder import HUB_DECODERS
from export_scripts.weights.huggingface_gpt2 import GPT2
from export_scripts.weights.huggingface_gptj import GPTJ
from export_scripts.weights.huggingface_gptneox import GPTNEOX
from export_scripts.weights.huggingface_opt import OPT
from export_scripts.weights.huggingface_t5 import T5

TARGETS: Mapping[str, tuple[Target, ...]] = {
    "gpt": (OPT, GPT2, BLOOM),
    "gptj": (GPTJ,),
    "gptneox": (GPTNEOX,),
    "llama": HUB_DECODERS,
    "t5": (T5,),
}
"""By the family's name; the first that can express a model is taken."""
