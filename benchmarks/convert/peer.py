"""FasterTransformer's own converter as a side of the comparison: ``nemo_ckpt_convert.py`` of a checkout.

Its last step asks NeMo's tokenizer for two ids. A stand-in answers, so that neither NeMo nor the seconds of its import
are needed: all bytes of the weights are written before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_SCRIPT = "examples/pytorch/gpt/utils/nemo_ckpt_convert.py"
_TOKENIZERS = "nemo/collections/nlp/modules/common/tokenizer_utils.py"
_STAND_IN = """from types import SimpleNamespace


def get_nmt_tokenizer(**settings):
    return SimpleNamespace(bos_id=0, eos_id=0)
"""


def converter(checkout: Path) -> Path:
    """Path of the script; FileNotFoundError where the directory is no checkout of FasterTransformer."""
    script = (checkout / _SCRIPT).resolve()
    if not script.is_file():
        raise FileNotFoundError(f"{checkout} has no {_SCRIPT}; give a checkout of FasterTransformer")
    return script


def environment(checkout: Path, folder: Path) -> Mapping[str, str]:
    """Variables that the script needs; the stand-in and what it unpacks lie in a folder."""
    stand_in = folder / "stand_in" / _TOKENIZERS
    stand_in.parent.mkdir(parents=True, exist_ok=True)
    stand_in.write_text(_STAND_IN)
    return {"PYTHONPATH": f"{checkout.resolve()}:{folder / 'stand_in'}", "TMPDIR": str(folder)}
