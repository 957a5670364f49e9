"""Weights in other formats: what linear layers become where ``export.model.quantization`` asks for it, a file each."""

from __future__ import annotations

from collections.abc import Mapping

from export_scripts.quantization.fp8 import Fp8
from export_scripts.quantization.fp8_block import Fp8Block
from export_scripts.quantization.int4 import Int4
from export_scripts.quantization.mxfp4 import Mxfp4
from export_scripts.quantization.record import Quantization

QUANTIZATIONS: Mapping[str, Quantization] = {each.name: each for each in (Fp8(), Fp8Block(), Int4(), Mxfp4())}
"""By the name that ``export.model.quantization`` has for it."""
