"""LoRA adapters of the tiny Llama-like models as NeMo 2's and Megatron-Bridge's training ranks store them.

Written from their sources, not from this project's tables: NeMo 2, ``collections/llm/peft/utils.py``; Megatron-Bridge,
``peft/utils.py`` (``ParallelLinearAdapter.sharded_state_dict``), ``peft/lora.py``, ``peft/canonical_lora.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from support.checkpoints.llama_adapters import ALPHA, RANK
from support.checkpoints.llama_configs import core_window, nemo2, padded_vocabulary
from support.checkpoints.llama_files import ChunkedArray, chunked, write_huggingface_tokenizer, write_torch_dist
from support.checkpoints.llama_state import core_state, merged_qkv
from support.tiny_models.llama_models import saved

Products = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""linear_in and linear_out, by transformers' names of the weights."""
LORA, CANONICAL = "megatron.bridge.peft.lora.LoRA", "megatron.bridge.peft.canonical_lora.CanonicalLoRA"
BASE = "/models/base"
_CANONICAL = {
    **{f"{letter}_proj": f"self_attention.linear_qkv.adapter.adapter_{letter}" for letter in "qkv"},
    **{f"{word}_proj": f"mlp.linear_fc1.adapter.adapter_{word}" for word in ("gate", "up")},
    "o_proj": "self_attention.linear_proj.adapter",
    "down_proj": "mlp.linear_fc2.adapter",
}


def adapter_arrays(name: str, ranks: int, products: Products, cuts_plain: bool = True) -> dict[str, ChunkedArray]:
    """The arrays of an adapter with one pair of matrices for each fused layer.

    Args:
        name: of the model.
        ranks: of tensor parallelism.
        products: whose fused ones share linear_in.
        cuts_plain: rows of linear_fc1 are cut in halves without a gate, too, as in NeMo 2.
    """
    config = saved(name).config
    groups = config.num_key_value_heads
    size = saved(name).tensors["model.layers.0.self_attn.k_proj.weight"].shape[0] // groups
    layers = []
    for layer in range(config.num_hidden_layers):
        of = _of_layer(products, layer)
        up = of["up_proj"]
        rows = merged_qkv(*(of[f"{letter}_proj"][1] for letter in "qkv"), groups=groups, size=size)  # type: ignore[misc]
        gated = (up[0], torch.stack([of["gate_proj"][1], up[1]])) if "gate_proj" in of else up
        layers.append(
            {
                "self_attention.linear_qkv.adapter": (of["q_proj"][0], rows),
                "self_attention.linear_proj.adapter": of["o_proj"],
                "mlp.linear_fc1.adapter": gated,
                "mlp.linear_fc2.adapter": of["down_proj"],
            }
        )
    return _arrays(layers, ranks, lambda value: cuts_plain or value.ndim == 3)


def canonical_arrays(name: str, ranks: int, products: Products) -> dict[str, ChunkedArray]:
    """The arrays of an adapter with a pair of matrices for each of q, k, v, gate and up.

    ``base_linear_name`` of gate's and of up's holds "linear_fc1", so that each is cut as if it were both.
    """
    config = saved(name).config
    layers = [
        {_CANONICAL[projection]: pair for projection, pair in _of_layer(products, layer).items()}
        for layer in range(config.num_hidden_layers)
    ]
    return _arrays(layers, ranks, lambda value: True)


def _of_layer(products: Products, layer: int) -> Products:
    return {key.split(".")[-2]: pair for key, pair in products.items() if f".layers.{layer}." in key}


def _arrays(layers: list[Products], ranks: int, cuts: Any) -> dict[str, ChunkedArray]:
    arrays: dict[str, ChunkedArray] = {}
    for layer, pairs in enumerate(layers):
        for place, pair in pairs.items():
            for side, value in zip(("in", "out"), pair, strict=True):
                shape = (value.numel() // value.shape[-1], value.shape[-1])
                key = f"decoder.layers.{place}.linear_{side}.weight"
                array = arrays.setdefault(key, ChunkedArray((len(layers), *shape)))
                for offset, part in _stored(place, side, value, ranks, cuts):
                    array.chunks.append(((layer, *offset), part.contiguous()[None]))
    return arrays


def _stored(
    place: str, side: str, value: torch.Tensor, ranks: int, cuts: Any
) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """What the training ranks store of one matrix: (offsets, values)."""
    axis = int(side == "in" and place.endswith(("linear_proj.adapter", "linear_fc2.adapter")))
    if side == "out" and "linear_fc1" in place and cuts(value):
        return list(_halves(value, ranks))
    size = value.shape[axis] // ranks
    return [
        ((0, rank * size) if axis else (rank * size, 0), part) for rank, part in enumerate(value.chunk(ranks, axis))
    ]


def _halves(value: torch.Tensor, ranks: int) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    """apply_swiglu_sharded_factory: a rank's two halves lie at its place and behind all ranks' first halves."""
    for rank in range(ranks):
        own = value.chunk(ranks, 1)[rank].flatten(0, 1) if value.ndim == 3 else value.chunk(ranks)[rank]
        for which, half in enumerate(own.chunk(2)):
            yield ((rank + which * ranks) * len(half), 0), half


SHARED, LEGACY, APART, OUTER = "shared", "legacy", "apart", "outer"
"""An adapter for all experts, with the axis of experts or (before) without; one for each; one side for all."""


def expert_products(name: str, kind: str, rank: int = RANK) -> Products:
    """Matrices of every expert's layers by transformers' names: gate and up share linear_in."""
    generator = torch.Generator().manual_seed(5)
    made: dict[tuple[str, ...], torch.Tensor] = {}

    def one(shape: tuple[int, int], *what: str) -> torch.Tensor:
        if what not in made:
            made[what] = torch.randn(shape, generator=generator) / 8
        return made[what]

    found = {}
    for key, weight in saved(name).tensors.items():
        before, mark, after = key.partition(".experts.")
        if not mark:
            continue
        expert, role = after.split(".")[:2]
        fc = "fc2" if role in ("down_proj", "w2") else "fc1"
        own = {"in": "" if kind in (SHARED, LEGACY) else expert, "out": "" if kind in (SHARED, LEGACY) else expert}
        if kind == OUTER:
            own["in" if fc == "fc1" else "out"] = ""
        down = one((rank, weight.shape[1]), before, fc, "in", own["in"])
        found[key] = (down, one((weight.shape[0], rank), before, fc, role, "out", own["out"]))
    return found


def expert_arrays(name: str, kind: str, ranks: int, products: Products) -> dict[str, ChunkedArray]:
    """The arrays of an adapter of experts, layers numbered.

    An expert's part of an array is a chunk, rows of linear_out of fc1 are cut as a gated weight's by the ranks
    (``_apply_expert_axis_factory``, ``_make_grouped_expert_sharded_tensor``); a side for all experts has no such axis.
    """
    by_place: dict[tuple[int, str, str], dict[int, dict[str, torch.Tensor]]] = {}
    for key, pair in products.items():
        before, _, after = key.partition(".experts.")
        expert, role = after.split(".")[:2]
        fc = "linear_fc2" if role in ("down_proj", "w2") else "linear_fc1"
        for side, value in zip(("in", "out"), pair, strict=True):
            place = by_place.setdefault((int(before.split(".")[2]), fc, side), {})
            place.setdefault(int(expert), {})["0 gate" if role in ("gate_proj", "w1") else "1"] = value
    arrays = {}
    for (layer, fc, side), experts in by_place.items():
        is_for_all = kind == LEGACY or (kind == OUTER and (fc, side) in (("linear_fc1", "in"), ("linear_fc2", "out")))
        chunks: list[tuple[tuple[int, ...], torch.Tensor]] = []
        shape: tuple[int, ...] = ()
        for number, roles in sorted(experts.items()):
            ordered = [roles[role] for role in sorted(roles)]
            is_gated = side == "out" and fc == "linear_fc1"
            value = torch.stack(ordered) if is_gated else ordered[0]
            shape = (value.numel() // value.shape[-1], value.shape[-1])
            place = f"{fc}.adapter"
            parts = list(_halves(value, ranks)) if is_gated else _stored(place, side, value, ranks, bool)
            if is_for_all and not number:
                chunks += [(offset, part.contiguous()) for offset, part in parts]
            elif not is_for_all:
                chunks += [((number, *offset), part.contiguous()[None]) for offset, part in parts]
        whole = shape if is_for_all else (len(experts), *shape)
        key = f"decoder.layers.{layer}.mlp.experts.experts.{fc}.adapter.linear_{side}.weight"
        arrays[key] = ChunkedArray(whole, chunks)
    return arrays


def write_bridge(
    root: Path, name: str, ranks: int, arrays: dict[str, ChunkedArray] | None, is_apart: bool = False, **run: Any
) -> Path:
    """Write a run of Megatron-Bridge: a model's, or an adapter's with ``arrays`` and ``peft``."""
    source, folder = saved(name), root / "iter_0000007"
    folder.mkdir(parents=True)
    model = {**nemo2(source.config, name)["config"], "tensor_model_parallel_size": ranks}
    model["window_size"] = core_window(source.config)
    model["_target_"] = "megatron.bridge.models.gpt_provider.GPTModelProvider"
    if arrays is None:
        state = core_state(source.tensors, source.config, padded_vocabulary(source.config, ranks))
        is_uniform = not any(hasattr(source.config, key) for key in ("mlp_only_layers", "first_k_dense_replace"))
        arrays = chunked(state, ranks, is_stacked=is_uniform, has_pairs=is_apart)
    write_torch_dist(folder, arrays, prefix="", common={"iteration": 7, "content_metadata": {}})
    (folder / "run_config.yaml").write_text(yaml.safe_dump({"model": model, "tokenizer": {}, "peft": None, **run}))
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    (folder / "tokenizer").mkdir()
    write_huggingface_tokenizer(folder / "tokenizer")
    return root


def write_bridge_adapter(
    root: Path, name: str, ranks: int, products: Products, target: str = LORA, **changes: Any
) -> Path:
    """Write an iteration that holds an adapter alone."""
    of_kind = canonical_arrays if target == CANONICAL else adapter_arrays
    more = {} if target == CANONICAL else {"cuts_plain": False}
    peft = {
        **{"_target_": target, "dim": RANK, "alpha": ALPHA, "dropout": 0.1, "dropout_position": "pre"},
        **{"lora_A_init_method": "xavier", "lora_B_init_method": "zero", "a2a_experimental": True},
        **{"normalize_moe_lora": False, "share_expert_adapters": True, "target_modules": ["linear_qkv"]},
        **changes,
    }
    arrays = of_kind(name, ranks, products, **more)  # type: ignore[operator]
    return write_bridge(root, name, ranks, arrays, peft=peft, checkpoint={"pretrained_checkpoint": BASE})


def write_expert_adapter(root: Path, name: str, kind: str, ranks: int, products: Products, **changes: Any) -> Path:
    """Write an iteration that holds an adapter of experts alone."""
    peft = {"_target_": LORA, "dim": RANK, "alpha": ALPHA, "share_expert_adapters": kind != APART}
    peft |= {"experts_shared_outer_loras": kind == OUTER, **changes}
    return write_bridge(root, name, ranks, expert_arrays(name, kind, ranks, products), peft=peft)
