"""Directories of Hugging Face: for each family of tensors, the architectures of transformers that may express it."""

from __future__ import annotations

from collections.abc import Mapping

from export_scripts.targets.huggingface.bloom import BLOOM
from export_scripts.targets.huggingface.decoder import HUB_DECODERS
from export_scripts.targets.huggingface.gpt2 import GPT2
from export_scripts.targets.huggingface.gptj import GPTJ
from export_scripts.targets.huggingface.gptneox import GPTNEOX
from export_scripts.targets.huggingface.opt import OPT
from export_scripts.targets.huggingface.t5 import T5
from export_scripts.targets.huggingface.table import Target

TARGETS: Mapping[str, tuple[Target, ...]] = {
    "gpt": (OPT, GPT2, BLOOM),
    "gptj": (GPTJ,),
    "gptneox": (GPTNEOX,),
    "llama": HUB_DECODERS,
    "t5": (T5,),
}
"""By the family's name; the first that can express a model is taken."""
