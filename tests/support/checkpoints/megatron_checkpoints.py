"""A small GPT as Megatron-LM saves it, of any version and number of ranks."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2LMHeadModel

HEADS, HIDDEN, LAYERS, POSITIONS, VOCAB = 4, 32, 4, 16, 97
SIZE = HIDDEN // HEADS
ARGUMENTS = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "layernorm_epsilon": 1e-5,
    "num_query_groups": 1,
    "group_query_attention": False,
}


def fused(weight: torch.Tensor, version: float, ranks: int, rank: int) -> torch.Tensor:
    """One rank's rows of q, k and v in the order of a checkpoint version; the source has [.., q | k | v] columns."""
    parts = [part.swapaxes(0, -1).reshape(HEADS, SIZE, -1).chunk(ranks)[rank] for part in weight.chunk(3, -1)]
    stacked = torch.stack(parts)  # [3, heads, size, in]
    order = {0: (0, 1, 2, 3), 1: (1, 2, 0, 3)}.get(int(version), (1, 0, 2, 3))
    rows = stacked.permute(order).reshape(3 * HEADS * SIZE // ranks, -1)
    return rows.contiguous() if weight.ndim == 2 else rows.reshape(-1)


def layer_state(model: GPT2LMHeadModel, layer: int, version: float, ranks: int, rank: int) -> dict[str, torch.Tensor]:
    w = {key: value.detach() for key, value in model.transformer.h[layer].state_dict().items()}
    attention = "attention" if version < 2 else "self_attention"
    return {
        "input_layernorm.weight": w["ln_1.weight"],
        "input_layernorm.bias": w["ln_1.bias"],
        f"{attention}.query_key_value.weight": fused(w["attn.c_attn.weight"], version, ranks, rank),
        f"{attention}.query_key_value.bias": fused(w["attn.c_attn.bias"], version, ranks, rank),
        f"{attention}.dense.weight": w["attn.c_proj.weight"].T.chunk(ranks, 1)[rank].contiguous(),
        f"{attention}.dense.bias": w["attn.c_proj.bias"],
        "post_attention_layernorm.weight": w["ln_2.weight"],
        "post_attention_layernorm.bias": w["ln_2.bias"],
        "mlp.dense_h_to_4h.weight": w["mlp.c_fc.weight"].T.chunk(ranks)[rank].contiguous(),
        "mlp.dense_h_to_4h.bias": w["mlp.c_fc.bias"].chunk(ranks)[rank],
        "mlp.dense_4h_to_h.weight": w["mlp.c_proj.weight"].T.chunk(ranks, 1)[rank].contiguous(),
        "mlp.dense_4h_to_h.bias": w["mlp.c_proj.bias"],
    }


def content(model: GPT2LMHeadModel, version: float, grid: tuple[int, int], place: tuple[int, int]) -> dict[str, Any]:
    """What one training rank saves: nested dictionaries, as ``state_dict_for_save_checkpoint`` makes them."""
    (ranks, stages), (rank, stage) = grid, place
    per_stage = LAYERS // stages
    stack: dict[str, torch.Tensor] = {}
    for layer in range(stage * per_stage, (stage + 1) * per_stage):
        for name, value in layer_state(model, layer, version, ranks, rank).items():
            stack[f"layers.{layer % per_stage}.{name}"] = value
    outer = model.transformer
    padded = torch.cat([outer.wte.weight.detach(), torch.zeros(128 - VOCAB, HIDDEN)])
    words = {"weight": padded.chunk(ranks)[rank].contiguous()}
    language: dict[str, Any] = {"transformer" if version < 2 else "encoder": stack}
    whole: dict[str, Any] = {"language_model": language}
    if stage == 0:
        positions = {"weight": outer.wpe.weight.detach()}
        language["embedding"] = {"word_embeddings": words, "position_embeddings": positions}
    if stage == stages - 1:
        stack |= {f"final_layernorm.{name}": value.detach() for name, value in outer.ln_f.state_dict().items()}
        if stages > 1:
            whole["word_embeddings_for_head"] = words
    moments = {"fp32": [torch.zeros(7)], "step": 3}
    return {"iteration": 500, "model": whole, "optimizer": {"optimizer": moments}, "rng_state": rng_state()}


def rng_state() -> list[dict[str, Any]]:
    return [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(), "tracker": {}}]


def with_arguments(saved: dict[str, Any], version: float, grid: tuple[int, int], **changes: Any) -> dict[str, Any]:
    parallel = {"tensor_model_parallel_size": grid[0], "pipeline_model_parallel_size": grid[1]}
    arguments = argparse.Namespace(**{**ARGUMENTS, **parallel, "params_dtype": torch.bfloat16, **changes})
    return {**saved, "args": arguments, "checkpoint_version": version}


def write(
    root: Path,
    model: GPT2LMHeadModel,
    version: float,
    grid: tuple[int, int] = (1, 1),
    is_zip: bool = True,
    **changes: Any,
) -> Path:
    """Write ``latest_checkpointed_iteration.txt``, ``iter_0000500/mp_rank_*`` and the vocabulary."""
    for rank in range(grid[0]):
        for stage in range(grid[1]):
            name = f"mp_rank_{rank:02d}_{stage:03d}" if grid[1] > 1 else f"mp_rank_{rank:02d}"
            folder = root / "iter_0000500" / name
            folder.mkdir(parents=True)
            saved = content(model, version, grid, (rank, stage))
            if version:
                saved = with_arguments(saved, version, grid, **changes)
            torch.save(saved, folder / "model_optim_rng.pt", _use_new_zipfile_serialization=is_zip)
    (root / "latest_checkpointed_iteration.txt").write_text("500\n")
    (root / "gpt2-vocab.json").write_text('{"a": 0, "<|endoftext|>": 96}')
    (root / "gpt2-merges.txt").write_text("#version: 0.2\n")
    if not version:
        (root / "args.json").write_text(json.dumps({"num_attention_heads": HEADS}))
    return root
