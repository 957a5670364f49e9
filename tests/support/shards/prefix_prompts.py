"""Prefix prompts beside the shards of GPT-J, GPT-NeoX and Llama, and Hugging Face's answers with the same past."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from backends.fastertransformer.engine.settings import Settings
from support.shards.family_shards import write_family
from support.tiny_models.huggingface_models import HEADS, HIDDEN, LAYERS, build

COUNT = 9
NEVER = 4000  # an end_id that does not come
LENGTHS = {"squad": 5, "none": 0, "intent": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("GPT-J", {"n_positions": 64}),
    "gpt_neox": ("GPT-NeoX", {"max_position_embeddings": 64, "hidden_act": "gelu_new"}),
    "llama": ("Llama", {"max_position_embeddings": 64}),
}
Prefix = np.ndarray[Any, Any]  # [layers, 2, heads, prompt_length, size_per_head]


def random_prefix(task: int, length: int) -> Prefix:
    """Keys that get some attention, and values that change which token comes."""
    shape = (LAYERS, 2, HEADS, length, HIDDEN // HEADS)
    prefix = np.random.default_rng(task).normal(0, 1, shape) * np.array([1, 6]).reshape(2, 1, 1, 1)
    return prefix.astype(np.float32)


PREFIXES = [random_prefix(task, length) for task, length in enumerate(LENGTHS.values())]


def add_prefixes(shards: Path, section: str, ranks: int) -> None:
    """Tasks, in the one section that the file of a GPT-J or GPT-NeoX has, and their files."""
    ini = shards / "config.ini"
    lines = [ini.read_text().rstrip(), f"num_tasks = {len(LENGTHS)}", "prompt_learning_type = 2"]
    assert lines[0].startswith(f"[{section}]")
    for task, (name, length) in enumerate(LENGTHS.items()):
        lines += [f"[task_{task}]", f"task_name = {name}", f"prompt_length = {length}"]
        for rank, part in enumerate(np.split(PREFIXES[task], ranks, axis=2) if length else ()):
            np.ascontiguousarray(part).tofile(shards / f"model.prefix_prompt.{name}.weight.{rank}.bin")
    ini.write_text("\n".join(lines) + "\n")


def write(family: str, directory: Path, ranks: int = 1) -> tuple[Any, Settings]:
    model_type, changes = FAMILIES[family]
    model = build(family, **changes)
    shards = write_family(model, directory, ranks)
    add_prefixes(shards, family.replace("_", ""), ranks)
    return model, Settings(shards, ranks, 1, "fp32", 1, model_type, has_process_per_rank=False)


@torch.no_grad()
def logits_behind(model: Any, line: list[int], prefix: Prefix, embeddings: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [T, V] of tokens whose positions go on from the prefix, which stands in the cache."""
    cache, length = DynamicCache(), prefix.shape[3]
    for layer, (k, v) in enumerate(torch.from_numpy(prefix)):
        cache.update(k[None], v[None], layer)
    x = model.get_input_embeddings()(torch.tensor([line]))
    if embeddings is not None:
        x = torch.cat((embeddings[None], x), 1)
    positions = torch.arange(length, length + x.shape[1])[None]
    mask = torch.ones(1, length + x.shape[1], dtype=torch.long)
    found = model(inputs_embeds=x, past_key_values=cache, position_ids=positions, attention_mask=mask)
    logits: torch.Tensor = found.logits[0]
    return logits


def greedy(
    model: Any, line: list[int], prefix: Prefix, count: int = COUNT, embeddings: torch.Tensor | None = None
) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(logits_behind(model, [*line, *tokens], prefix, embeddings)[-1].argmax()))
    return tokens
