"""What transformers itself makes of quantized directories, with compressed-tensors and accelerate beside it.

``python -m support.tiny_models.quantized_record``, in ``tests/`` and where these are installed, writes the record
again.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from support.tiny_models.quantized_models import CASES, save_case

RECORD = Path(__file__).resolve().parents[2] / "data" / "quantized_models.json"
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def digest_of(state: dict[str, torch.Tensor]) -> str:
    """SHA-256 of all tensors with their names, types and shapes."""
    found = hashlib.sha256()
    for name in sorted(state):
        value = state[name].contiguous()
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode() + value.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def loaded(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Load a directory as dense weights by transformers; without the head, which is the embedding.

    What is stored in bf16 it may leave so, whatever is asked for.
    """
    import transformers

    said = json.loads((path / "config.json").read_text()).get("quantization_config", {})
    more: dict[str, Any] = {}
    if said.get("quant_method") == "compressed-tensors":
        more["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    state = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **more).state_dict()
    return {name: value.to(dtype) for name, value in state.items() if name != "lm_head.weight"}


def record() -> None:
    """Write what is loaded of every case, and by which versions."""
    from importlib.metadata import version

    found: dict[str, Any] = {name: version(name) for name in ("transformers", "compressed-tensors", "torch")}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            save_case(name, Path(folder))
            found[name] = {kind: digest_of(loaded(Path(folder), dtype)) for kind, dtype in TYPES.items()}
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    record()
