"""How a served model keeps the matrices of its layers: what each format is called where the project says or reads it.

The engine packs them (``engine/ops/linear.py``); the parity has limits for each (``conf/evaluation/parity.yaml``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KEY = "int8_mode"
"""FasterTransformer's: of config.pbtxt, of the configuration, of an endpoint's settings, and of a table's column."""


@dataclass(frozen=True)
class WeightFormat:
    """One format.

    Attributes:
        name: in results' directories, reports and limits; empty: the matrices are as data_type says.
        mode: what KEY says.
    """

    name: str
    mode: int

    def __bool__(self) -> bool:
        return bool(self.name)


NONE, INT8 = WeightFormat("", 0), WeightFormat("int8", 1)
FORMATS = (NONE, INT8)
"""Those that KEY chooses."""
FP8, FP8_BLOCK = FP8_FORMATS = (WeightFormat("fp8", 0), WeightFormat("fp8_block", 0))
"""Those that ``quantization`` chooses, or that a Hugging Face directory has."""


def find_format(mode: Any, quantization: str | None = None) -> WeightFormat:
    """Return the format that KEY and ``quantization`` say; where they say nothing it is NONE.

    One that only another server knows is called as it is written.
    """
    if found := [each for each in FP8_FORMATS if each.name == quantization]:
        return found[0]
    written = str(int(mode)) if isinstance(mode, bool) else str(mode or 0)
    return next((each for each in FORMATS if str(each.mode) == written), WeightFormat(f"{KEY} {written}", -1))
