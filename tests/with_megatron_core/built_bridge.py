"""Megatron-Bridge's own conversions on a CPU: from Hugging Face into a built model, into its checkpoint, and back.

Below ``<folder>/<model>`` stand ``hub``, what transformers saved; ``megatron``, what Bridge's ``save_megatron_model``
made of it; and ``back``, what its ``save_hf_pretrained`` made of the model. Transformer Engine's modules are their
parameters alone; what megatron-core asks torch.cuda for comes from the CPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from support.checkpoints.llama_files import write_huggingface_tokenizer
from support.tiny_models.llama_models import VOCAB, save
from with_megatron_core import engine_parameters
from with_megatron_core.absent import stand_in

_CHANGES: dict[str, dict[str, Any]] = {"deepseek_v2": {"q_lora_rank": 24}}  # Bridge builds none without
MODELS = (
    *("llama", "qwen2", "qwen3", "gemma", "gemma2", "nemotron"),
    *("qwen3_moe_alike", "glm4_moe", "deepseek_v2", "deepseek_v3"),
)
_PUBLISHED = {"deepseek_v3": {"scoring_func": "sigmoid"}}
"""Keys of the published models' configurations that transformers' classes leave out, and Bridge reads."""


def _without_cuda() -> None:
    from with_megatron_core.llama import without_cuda

    without_cuda()
    arange = torch.arange
    torch.arange = lambda *given, **named: arange(*given, **{**named, "device": None})
    torch.cuda.Stream = lambda *_, **__: None  # type: ignore[assignment,misc]
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()


def convert(folder: Path) -> None:
    """Let Bridge convert a model, there and back."""
    from megatron.bridge import AutoBridge

    for key in ("FLASH", "FUSED", "UNFUSED"):  # the model before has set them
        os.environ.pop(f"NVTE_{key}_ATTN", None)
    bridge = AutoBridge.from_hf_pretrained(folder / "hub")
    provider: Any = bridge.to_megatron_provider()
    provider.gradient_accumulation_fusion = False  # APEX's
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    bridge.save_megatron_model(model, folder / "megatron", hf_tokenizer_path=folder / "hub")
    bridge.save_hf_pretrained(model, folder / "back", show_progress=False)


def main(root: Path) -> None:
    """Save every model, then let Bridge convert them."""
    for name in MODELS:
        hub = root / name / "hub"
        save(name, hub, **_CHANGES.get(name, {}))
        write_huggingface_tokenizer(hub, VOCAB)
        config = hub / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | _PUBLISHED.get(name, {})))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    stand_in()
    engine_parameters.install()
    _without_cuda()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    for name in MODELS:
        convert(root / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
