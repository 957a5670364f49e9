"""Kernels go through Triton's compiler, for GPUs that are not here: its interpreter takes what the compiler does not.

``make test-kernels`` runs it; nothing is computed, and no register may be spilled where a profile chose the tiles.
"""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from backends.fastertransformer.engine.ops.kernels import (
    delta_scan,
    expert_choice,
    few_experts,
    fp8_rows,
    grouped_gemm,
    grouped_prefill,
    mamba_scan,
)
from backends.fastertransformer.engine.ops.kernels import prefill_attention as row_kernels

KERNELS = "backends.fastertransformer.engine.ops.kernels"
CAPABILITIES = [80, 90]
POINTERS = {
    "tables": "*i32",
    "turns": "*i32",
    "lost": "*i32",
    "finished": "*i32",
    "arrivals": "*i32",
    "blocks": "*i32",
    "ends": "*i32",
    "lasts": "*i32",
    "stops": "*i32",
    "pages": "*i32",
    "partial": "*fp32",
    "frequencies": "*fp32",
    "sinks": "*fp32",
}
POINTERS |= {"parts": "*fp32", "gain_sums": "*fp32", "units": "*fp32", "logits": "*fp32", "places": "*fp16"}
POINTERS |= dict.fromkeys(("positions", "windows", "ids", "offsets", "addresses", "lengths", "slots", "plan"), "*i64")
POINTERS |= {"top_k": "*i64", "top_p": "*fp32", "uniform": "*fp64"}
POINTERS |= dict.fromkeys(
    (
        "q",
        "k",
        "v",
        "kv",
        "out",
        "bias",
        "x",
        "y",
        "weight",
        "scales",
        "gain",
        "shift",
        "residual",
        "other",
        "other_scales",
        "other_bias",
        "q_gain",
        "k_gain",
    ),
    "*fp16",
)
NUMBERS = {"scale": "fp32", "cap": "fp32", "eps": "fp32", "factor": "fp32", "page_stride": "i64", "values_at": "i64"}


def attention(block: int, is_cut: bool, kind: int = 0, rotation: int = 0, size: int = 128) -> dict[str, Any]:
    tiles = {"page_tokens": 32, "size": size, "width": 128, "block": block, "least": 128}
    return {**tiles, "kind": kind, "is_cut": is_cut, "is_new": True, "rotation": rotation, "fp8": 0}


PEERS = {"size": 4, "padded": 4, "patience": 1 << 25}
SUMS = PEERS | {"block": 256, "programs": 32}
DEQUANTIZE = {"block_n": 8, "block_k": 1024, "is_native": True, "scale_width": 0}


def keeping(rotation: int) -> dict[str, Any]:
    heads = {"heads": 32, "kv_heads": 32, "has_norm": False}
    return {
        "page_tokens": 32,
        **heads,
        "size": 128,
        "width": 128,
        "many": 16,
        "blocks": 3,
        "rotation": rotation,
        "fp8": 0,
    }


def halves(has_norm: bool) -> dict[str, Any]:
    return {"page_tokens": 32, "heads": 32, "kv_heads": 8, "half": 64, "many": 16, "has_norm": has_norm, "fp8": 0}


DRAWN = {"tokens": "*i64", "rows": "*i64", "scales": "*fp32"}
SINGLE: dict[str, Any] = {"is_gated": False, "other": None, "other_scales": None, "other_bias": None}
GATED = {"is_gated": True, "has_bias": False, "has_residual": False, "activation": "silu"}
INT8 = {"weight": "*i8", "other": "*i8"}
SCALES = {"scales": "*fp32", "other_scales": "*fp32"}
FP8 = {"weight": "*fp8e4nv", "other": "*fp8e4nv", **SCALES}
CACHE = {**dict.fromkeys(("q", "k", "v", "out"), "*bf16"), "kv": "*u8"}
BYTES = {"weight": "*u8", "other": "*u8", **SCALES}
"""What a GPU without FP8 takes its numbers as."""
MXFP4 = {"weight": "*u8", "scales": "*u8", **dict.fromkeys(("x", "y", "gain", "bias"), "*bf16")}
BLOCKS = {"has_scales": True, "scale_width": 128}


def paired(constants: dict[str, Any]) -> dict[str, Any]:
    """Products with two matrices."""
    return {name: value for name, value in constants.items() if name not in SINGLE} | GATED


def product(norm: str, ahead: int, is_int8: bool, block_n: int = 8) -> dict[str, Any]:
    tiles = {"block_n": block_n, "block_k": 2048 if is_int8 else 1024, "ahead": ahead, "is_whole": True}
    kind = {"norm": norm, "activation": "gelu" if norm else "", "has_residual": not norm, "has_bias": True}
    kind["scale_width"] = 0
    return {**tiles, **kind, "is_native": True, "has_scales": is_int8, "is_split": is_int8, "maxnreg": 128, **SINGLE}


BF16 = dict.fromkeys(("x", "y", "weight", "other", "gain", "residual"), "*bf16")
BF16_ROWS = dict.fromkeys(("x", "y", "gain", "residual"), "*bf16")
NORMED = {"norm": "rms", "has_shift": False, "shift": None, "block": 4096}
ROUNDED = {**NORMED, "is_gated": False, "activation": "", "is_whole": True}
GATED = {"norm": "", "gain": None, "is_gated": True, "activation": "silu", "block": 16384}


def products(padded: int, stages: int, splits: int, is_split: bool) -> dict[str, Any]:
    tiles = {"block_n": 64, "block_k": 128, "stages": stages, "splits": splits, "padded": padded}
    kind = {"has_scales": is_split, "has_bias": True, "activation": "gelu", "has_residual": True, "scale_width": 0}
    return {**tiles, **kind, "is_split": is_split, "is_native": True, **SINGLE}


ROWS = {"bias": "*fp32"} | dict.fromkeys(("token_stride", "head_stride", "out_stride"), "i64")  # multiples of 16 too


def rows(tiles: row_kernels.Tiles, kind: int, is_causal: bool, size: int = 128) -> dict[str, Any]:
    block_m, block_n, _, stages, registers = tiles
    limits = {"num_stages": stages} | ({"maxnreg": registers} if registers else {})
    given = {"size": size, "width": size, "block_m": block_m, "block_n": block_n, "kind": kind}
    return {**given, "is_causal": is_causal, "is_native": True, **limits}


def group(block: int, size: int = 128, **others: Any) -> dict[str, Any]:
    """Decode attention of groups of four."""
    tiles = {"group": 4, "many": 4, "padded": 16, "page_tokens": 32, "size": size, "width": size, "block": block}
    kind = {"stages": 0, "has_cap": False, "is_packed": False, "has_norm": False, "has_sinks": False, "rotation": 2}
    return {**tiles, **kind, "in_chunks": False, "fp8": 0, **others}


def causal(tiles: row_kernels.Tiles, is_paged: bool, has_cap: bool = False, size: int = 128) -> dict[str, Any]:
    """Attention of rows with groups of four."""
    block_m, block_n, _, stages, _ = tiles
    given = {"group": 4, "page_tokens": 32, "size": size, "width": size, "block_m": block_m, "block_n": block_n}
    kind = {"has_cap": has_cap, "in_chunks": False, "is_paged": is_paged, "has_sinks": False, "fp8": 0}
    return {**given, **kind, "num_stages": stages}


LIMITS = {name: "*i64" for name in ("seeds", "generated", "top_ks")} | dict.fromkeys(
    ("top_ps", "temperatures", "scales"), "*fp32"
)
GRAMMARS = {"bits": "*u8", "least": "fp32"}
GROUPED = dict.fromkeys(("q_stride", "q_head_stride", "kv_stride", "kv_head_stride"), "i64")  # multiples of 16 too
BF16_GROUP = dict.fromkeys(("q", "k", "v", "kv", "out"), "*bf16")
SHORT, LONG, WIDE = row_kernels._CAUSAL_TILES, row_kernels._TILES, row_kernels._WIDE_TILES
OLDER, OLDER_SHORT = row_kernels._OLDER_WIDE_TILES, grouped_prefill._OLDER_TILES

GROUPED_GEMM = "grouped_gemm"
EXPERTS = {
    "order": "*i32",
    "counts": "*fp32",
    "results": "*fp16",
    **dict.fromkeys(("factor", "offset", "limit"), "fp32"),
}
CHOICE = {"chosen": "*i64", **dict.fromkeys(("counts", "products", "choice_bias"), "*fp32")}
CHOICE |= {"scale": "fp32", "least_sum": "fp32"}
CHOSEN = {"used": 8, "padded": 8, "width": 256, "is_sigmoid": True, "has_choice_bias": True, "is_normalised": True}


def grouped(tiles: grouped_gemm.Tiles, is_into: bool) -> dict[str, Any]:
    """Products of 128 experts, into the middle with a clamped gate and biases, or out of it."""
    cut = {"block_m": tiles.rows, "block_n": tiles.outputs, "block_k": tiles.inputs, "stages": tiles.stages}
    kind = {"is_into": is_into, "is_gated": is_into, "has_bias": is_into, "is_clamped": is_into, "activation": ""}
    return {**cut, **kind, "width": 128, "scale_width": 0, "has_scales": False, "is_native": True, "is_packed": False}


ADAPTERS = {**dict.fromkeys(("places", "rows", "order", "marks"), "*i32"), "h": "*fp32"}
UNMARKED = {"marks": None}
ADAPTERS |= dict.fromkeys(("down", "up"), "*fp16")
LATENT = {"turned": "*fp16", "absorbed": "*fp16"}
LATENT_FP32 = dict.fromkeys(("turned", "absorbed", "kv", "out"), "*fp32")


def latent(heads: int, many: int, **others: Any) -> dict[str, Any]:
    """DeepSeek's latent attention."""
    entry = {"rotated": 64, "padded": 64, "size": 512, "width": 512, "page_tokens": 32}
    return {"heads": heads, "many": many, **entry, "block": 32, "stages": 2, **others}


STATES = {"states": "*i64", "rows": "*i64", "columns": "*i32", "learnt": "*i32", "forgotten": "*i32"}
STATES |= dict.fromkeys(("weight", "bias", "convolved", "past", "memory", "step_bias", "decay", "skip", "out"), "*fp32")
STATES |= dict.fromkeys(("solved", "scores", "gain"), "*fp32") | dict.fromkeys(("given", "rates", "x"), "*bf16")
STATES |= {"least_step": "fp32"}
CONVOLUTION = {"taps": 3, "has_bias": True, "block": 256}
MAMBA = {"head_size": 64, "memory_size": 128, "block": 32, "width": 128}
WIDE_MAMBA = {"head_size": 128, "memory_size": 256, "block": 32, "width": 256}
DELTA = {"key_size": 128, "value_size": 128, "block": 32, "width": 128}


def scan(tiles: mamba_scan.ScanTiles) -> dict[str, Any]:
    """Scans of packed rows."""
    return {"chunk": tiles.chunk, "block": tiles.block, "precision": tiles.precision, "num_stages": 1}


MAMBA_TILES, DELTA_TILES, EXACT, OLDER_SCAN = mamba_scan._NEWER, delta_scan._NEWER, mamba_scan.EXACT, mamba_scan.OLDER
CONV, SCAN, DELTA_SCAN, NORM = "state_conv", "mamba_scan", "delta_scan", "gated_norm"
DECODE, PREFILL = "decode_attention", "prefill_attention"
LATENT_DECODE, LATENT_PREFILL = "latent_decode", "latent_prefill"
GROUP_DECODE, GROUP_PREFILL = "grouped_decode", "grouped_prefill"
# Module, function, warps, constants, what is another type than usually.
CASES: dict[str, tuple[str, str, int, dict[str, Any], dict[str, str]]] = {
    "few heads": (DECODE, "_attend", 8, attention(128, True), {}),
    "many heads": (DECODE, "_attend", 4, {**attention(32, False), "maxnreg": 128}, {}),
    "many turned heads": (DECODE, "_attend", 4, {**attention(32, False, rotation=2), "maxnreg": 128}, {}),
    "alibi": (DECODE, "_attend", 8, attention(128, True, kind=1, size=80), {"bias": "*fp32"}),
    "alibi, smaller blocks": (
        "decode_attention",
        "_attend",
        8,
        attention(64, True, kind=1, size=80),
        {"bias": "*fp32"},
    ),
    "by distance, smaller blocks": (DECODE, "_attend", 8, attention(64, True, kind=2), {"bias": "*fp32"}),
    "by distance": (DECODE, "_attend", 4, attention(32, True, kind=2), {"bias": "*fp32"}),
    "by pairs": (DECODE, "_attend", 8, attention(128, False, rotation=1), {}),
    "by halves": (DECODE, "_attend", 4, attention(32, True, rotation=2), {}),
    "choice of experts": (
        "expert_choice",
        "_choose",
        1,
        {**CHOSEN, "groups": 8, "groups_used": 4, "is_group_of_two": True},
        CHOICE,
    ),
    **{
        f"pairs by expert, {name}": ("expert_choice", "_sort", warps, {"block": block}, CHOICE | {"order": "*i32"})
        for name, (block, warps) in {"few": expert_choice._FEW_PAIRS, "many": expert_choice._MANY_PAIRS}.items()
    },
    "results of experts": (GROUPED_GEMM, "_sum", 4, {"used": 8, "block": 1024, "has_residual": True}, EXPERTS),
    "rows of adapters": ("low_rank", "_share", 1, {"width": 16, "block_m": 16}, ADAPTERS),
    "adapters of few rows": (
        "low_rank",
        "_narrow",
        4,
        {"block_m": 16, "block_r": 16, "block_k": 256, "parts": 8, **UNMARKED},
        ADAPTERS,
    ),
    "adapters of many rows": (
        "low_rank",
        "_narrow",
        4,
        {"block_m": 64, "block_r": 64, "block_k": 128, "parts": 1, **UNMARKED},
        ADAPTERS,
    ),
    "what adapters add to few rows": (
        "low_rank",
        "_widen",
        4,
        {"block_m": 16, "block_n": 128, "block_r": 16, "parts": 8, "matrices": 3, "is_one_block": True, **UNMARKED},
        ADAPTERS,
    ),
    "what adapters add to few wide rows": (
        "low_rank",
        "_widen",
        8,
        {"block_m": 16, "block_n": 256, "block_r": 16, "parts": 8, "matrices": 2, "is_one_block": True},
        ADAPTERS,
    ),
    **{
        f"a layer and its adapters, {name}": (
            "low_rank",
            "_finish",
            8 if kind["is_gated"] else 4,
            {"block_m": 16, "block_n": 256, "block_r": 16, "is_one_block": True, "activation": "", **kind},
            {**ADAPTERS, "wide": "*fp16"},
        )
        for name, kind in {
            "three matrices": {"matrices": 3, "is_gated": False, "has_residual": False},
            "residual": {"matrices": 1, "is_gated": False, "has_residual": True},
            "gated": {"matrices": 2, "is_gated": True, "has_residual": False, "activation": "silu"} | {"block_n": 128},
            "large ranks": {"matrices": 2, "is_gated": True, "has_residual": False, "activation": "silu"}
            | {"block_n": 128, "block_r": 32, "is_one_block": False},
        }.items()
    },
    "what adapters add to many rows": (
        "low_rank",
        "_widen",
        8,
        {"block_m": 64, "block_n": 128, "block_r": 32, "parts": 1, "matrices": 3, "is_one_block": False, **UNMARKED},
        ADAPTERS,
    ),
    **{
        f"what adapters add to the head's {name} rows": (
            "low_rank",
            "_widen",
            8,
            {"block_m": block_m, "matrices": 1, **tiles},
            {**ADAPTERS, "y": "*fp32"},
        )
        for name, block_m, tiles in (
            ("few", 16, {"block_n": 512, "block_r": 16, "parts": 8, "is_one_block": True}),
            ("many", 64, {"block_n": 128, "block_r": 32, "parts": 1, "is_one_block": False}),
        )
    },
    **{
        f"what adapters add by head to {name} rows": (
            "low_rank",
            "_by_head",
            warps,
            {"block_m": block_m, "block_n": 128, "block_r": 32, "block_k": 64},
            ADAPTERS,
        )
        for name, block_m, warps in (("few", 16, 4), ("many", 64, 8))
    },
    "argmax": ("sampling", "_argmax_step", 4, {"parts": 32, "block": 1024}, {"tokens": "*i64", "lost": "i32"}),
    "limits of draws": ("sampling", "_draw_limits", 1, {"block": 32}, LIMITS),
    "limits of draws without temperatures": (
        "sampling",
        "_draw_limits",
        1,
        {"block": 32, "temperatures": None, "scales": None},
        LIMITS,
    ),
    "grammars": ("sampling", "_keep_allowed", 4, {"block": 2048, "rows": None}, GRAMMARS),
    "grammars of some rows": ("sampling", "_keep_allowed", 4, {"block": 2048}, {**GRAMMARS, "rows": "*i64"}),
    "embedding": ("elementwise", "_embed", 4, {"has_places": True, "block": 1024}, {"tokens": "*fp16"}),
    "peer sum": (
        "all_reduce",
        "_all_reduce_add",
        4,
        SUMS,
        {"memory": "*i64", "part": "*fp32"},
    ),
    "peer choice": ("all_reduce", "_all_reduce_argmax", 1, PEERS, {"memory": "*i64", "tokens": "*i64"}),
    "keep": ("kv_write", "_kv_write", 4, keeping(rotation=0), {}),
    "turn by pairs": ("kv_write", "_kv_write", 4, keeping(rotation=1), {}),
    "turn by halves": ("kv_write", "_kv_write", 4, keeping(rotation=2), {}),
    "turn whole heads": ("kv_write", "_kv_write_halves", 4, halves(has_norm=False), {}),
    "turn and norm whole heads": ("kv_write", "_kv_write_halves", 4, halves(has_norm=True), {}),
    "turn and norm groups": ("kv_write", "_kv_write", 4, {**keeping(2), "kv_heads": 8, "has_norm": True}, {}),
    "dequantize": (
        "elementwise",
        "_dequantize",
        4,
        DEQUANTIZE,
        {"weight": "*i8"},
    ),
    "plan": ("row_plan", "_plan_rows", 4, {"block": 64, "is_packed": False, "slots": None, "ends": None}, {}),
    "plan of packed rows": ("row_plan", "_plan_rows", 4, {"block": 64, "is_packed": True, "windows": None}, {}),
    "cut": ("row_blocks", "_cut", 1, {"queries": 64, "is_paged": False, "positions": None}, {}),
    "cut what sees pages": ("row_blocks", "_cut", 1, {"queries": 16, "is_paged": True}, {}),
    "causal rows": (PREFILL, "_attend_rows", SHORT[2], rows(SHORT, 0, is_causal=True), ROWS),
    "rows with slopes": (PREFILL, "_attend_rows", SHORT[2], rows(SHORT, 1, is_causal=True), ROWS),
    "rows by distance": (PREFILL, "_attend_rows", LONG[2], rows(LONG, 2, is_causal=False), ROWS),
    "rows of wide heads": (PREFILL, "_attend_rows", WIDE[2], rows(WIDE, 0, is_causal=True, size=256), ROWS),
    "rows of wide heads with slopes": (
        "prefill_attention",
        "_attend_rows",
        WIDE[2],
        rows(WIDE, 1, is_causal=True, size=256),
        ROWS,
    ),
    "older: wide heads": (
        "prefill_attention",
        "_attend_rows",
        OLDER[2],
        rows(OLDER, 0, is_causal=True, size=256),
        ROWS,
    ),
    "older: wide heads, slopes": (
        "prefill_attention",
        "_attend_rows",
        OLDER[2],
        rows(OLDER, 1, is_causal=True, size=256),
        ROWS,
    ),
    "group": (GROUP_DECODE, "_attend_group", 4, group(64), GROUPED),
    "group of few rows": (GROUP_DECODE, "_attend_group", 8, group(64), GROUPED),
    "group of many rows": (GROUP_DECODE, "_attend_group", 4, group(32, stages=5), GROUPED),
    "capped wide group of many rows": (
        GROUP_DECODE,
        "_attend_group",
        8,
        group(32, 256, stages=5, has_cap=True),
        GROUPED,
    ),
    "group, bf16": (GROUP_DECODE, "_attend_group", 4, group(64), GROUPED | BF16_GROUP),
    "normed group": (GROUP_DECODE, "_attend_group", 4, group(64, has_norm=True), GROUPED),
    "capped wide group": (GROUP_DECODE, "_attend_group", 8, group(32, 256, has_cap=True), GROUPED),
    "packed group": (GROUP_DECODE, "_attend_group", 4, group(64, is_packed=True, rotation=0), GROUPED),
    "rows of groups": (GROUP_PREFILL, "_attend_causally", 4, causal(SHORT, is_paged=False), GROUPED),
    "rows of groups with pages": (GROUP_PREFILL, "_attend_causally", 4, causal(SHORT, is_paged=True), GROUPED),
    "capped rows of groups": (GROUP_PREFILL, "_attend_causally", 8, causal(WIDE, False, True, 256), GROUPED),
    "capped rows of groups with pages": (GROUP_PREFILL, "_attend_causally", 8, causal(WIDE, True, True, 256), GROUPED),
    "group with sinks": (GROUP_DECODE, "_attend_group", 4, group(64, 64, has_sinks=True), GROUPED),
    "rows of groups with sinks": (
        GROUP_PREFILL,
        "_attend_causally",
        4,
        {**causal(SHORT, False, size=64), "has_sinks": True},
        GROUPED,
    ),
    "rows of groups with pages and sinks": (
        GROUP_PREFILL,
        "_attend_causally",
        4,
        {**causal(SHORT, True, size=64), "has_sinks": True},
        GROUPED,
    ),
    "group in chunks": (GROUP_DECODE, "_attend_group", 4, group(32, stages=5, in_chunks=True), GROUPED),
    "rows of groups in chunks": (
        GROUP_PREFILL,
        "_attend_causally",
        4,
        {**causal(SHORT, True), "in_chunks": True},
        GROUPED,
    ),
    "older: rows of groups in chunks": (
        GROUP_PREFILL,
        "_attend_causally",
        4,
        {**causal(OLDER_SHORT, True), "in_chunks": True},
        GROUPED,
    ),
    "older: rows of groups": (GROUP_PREFILL, "_attend_causally", 4, causal(OLDER_SHORT, True), GROUPED),
    "older: capped rows of groups": (GROUP_PREFILL, "_attend_causally", 8, causal(OLDER, True, True, 256), GROUPED),
    "latent heads": (LATENT_DECODE, "_attend_latent", 4, latent(16, 16), LATENT),
    "some more latent heads": (LATENT_DECODE, "_attend_latent", 8, latent(20, 32), LATENT),
    "many latent heads": (LATENT_DECODE, "_attend_latent", 8, latent(128, 64), LATENT),
    "rows of latent heads": (LATENT_PREFILL, "_extend_latent", 8, latent(16, 16, tokens=4), LATENT),
    "rows of many latent heads": (LATENT_PREFILL, "_extend_latent", 8, latent(128, 64, tokens=1), LATENT),
    "older: latent heads": (LATENT_DECODE, "_attend_latent", 8, latent(128, 32), LATENT),
    "older: rows of latent heads": (LATENT_PREFILL, "_extend_latent", 8, latent(16, 16, tokens=2), LATENT),
    "older: rows of many latent heads": (LATENT_PREFILL, "_extend_latent", 8, latent(128, 32, tokens=1), LATENT),
    "latent heads, fp32": (LATENT_DECODE, "_attend_latent", 4, latent(16, 16, block=16, stages=1), LATENT_FP32),
    "rows of latent heads, fp32": (
        LATENT_PREFILL,
        "_extend_latent",
        8,
        latent(16, 16, tokens=1, block=16, stages=1),
        LATENT_FP32,
    ),
    "latent entries": ("latent_entries", "_keep", 4, latent(16, 16, plain=128, rotation=1), LATENT),
    "convolution of a token": (CONV, "_convolve_step", 2, CONVOLUTION, STATES),
    "convolution of rows": (CONV, "_convolve_rows", 8, {**CONVOLUTION, "many": 16}, STATES),
    "last inputs": (CONV, "_keep_last", 2, CONVOLUTION, STATES),
    "step of Mamba": (SCAN, "_step", 4, MAMBA, STATES),
    "step of a wide Mamba": (SCAN, "_step", 4, {**WIDE_MAMBA, "block": 16}, STATES),
    "drafts of Mamba": (SCAN, "_run_drafts", 4, MAMBA, STATES),
    "drafts of a wide Mamba": (SCAN, "_run_drafts", 4, {**WIDE_MAMBA, "block": 16}, STATES),
    "rows of Mamba": (SCAN, "_scan", MAMBA_TILES.warps, MAMBA | scan(MAMBA_TILES), STATES),
    "older: rows of Mamba": (SCAN, "_scan", OLDER_SCAN.warps, MAMBA | scan(OLDER_SCAN), STATES),
    "rows of a wide Mamba": (SCAN, "_scan", OLDER_SCAN.warps, WIDE_MAMBA | scan(OLDER_SCAN), STATES),
    "rows of Mamba, fp32": (SCAN, "_scan", EXACT.warps, MAMBA | scan(EXACT), STATES),
    "step of the delta rule": (DELTA_SCAN, "_step", 4, DELTA, STATES),
    "drafts of the delta rule": (DELTA_SCAN, "_run_drafts", 4, DELTA, STATES),
    "chunks of the delta rule": (DELTA_SCAN, "_solve", DELTA_TILES.warps, DELTA | scan(DELTA_TILES), STATES),
    "chunks of the delta rule, fp32": (DELTA_SCAN, "_solve", EXACT.warps, DELTA | scan(EXACT), STATES),
    "rows of the delta rule": (DELTA_SCAN, "_scan", DELTA_TILES.warps, DELTA | scan(DELTA_TILES), STATES),
    "rows of the delta rule, fp32": (DELTA_SCAN, "_scan", EXACT.warps, DELTA | scan(EXACT), STATES),
    "older: chunks of the delta rule": (DELTA_SCAN, "_solve", OLDER_SCAN.warps, DELTA | scan(OLDER_SCAN), STATES),
    "older: rows of the delta rule": (DELTA_SCAN, "_scan", OLDER_SCAN.warps, DELTA | scan(OLDER_SCAN), STATES),
    "gated norm": (
        NORM,
        "_gate_groups",
        4,
        {"has_norm": True, "is_behind": False, "is_shared": False, "many": 1, "width": 1024},
        STATES | {"x": "*fp32", "out": "*bf16"},
    ),
    "norm": ("elementwise", "_norm_rows", 8, {"is_rms": False, "has_shift": True, "block": 8192}, {}),
    "draw": ("sampling", "_draw", 16, {"block": 4096, "scales": None}, {"tokens": "*i64", "rows": "*i64"}),
    "draw with temperature": ("sampling", "_draw", 16, {"block": 4096}, DRAWN),
    "draw of all": ("sampling", "_draw_of_all", 4, {"parts": 32, "block": 1024}, DRAWN),
    "small m": ("small_m_gemm", "small_m_gemm", 4, products(8, 6, 2, False), {}),
    "a router": (
        "small_m_gemm",
        "small_m_gemm",
        4,
        {**products(16, 4, 8, False), "has_residual": False},
        {"y": "*fp32"},
    ),
    "small m, int8": ("small_m_gemm", "small_m_gemm", 4, products(8, 4, 4, True), {"x": "*i8", "weight": "*i8"}),
    "64 rows, int8": ("small_m_gemm", "small_m_gemm", 4, products(64, 4, 1, True), {"x": "*i8", "weight": "*i8"}),
    "many rows, int8": (
        "small_m_gemm",
        "small_m_gemm",
        8,
        {**products(64, 3, 2, True), "block_n": 128},
        {"x": "*i8", "weight": "*i8"},
    ),
    "64 rows, int8, widened": ("small_m_gemm", "small_m_gemm", 4, products(64, 4, 1, False), {"weight": "*i8"}),
    "digits": ("int8", "_split_rows", 8, {"norm": "layer", "has_shift": True, "block": 8192}, {"digits": "*i8"}),
    "gemv, norm": ("gemv", "gemv", 4, product("layer", 4, False, 4), {"bias": "*fp32"}),
    "gemv, bf16, norm": ("gemv", "gemv", 4, product("layer", 8, False, 2), {**BF16, "bias": "*fp32"}),
    "gemv, bf16": ("gemv", "gemv", 8, {**product("", 2, False), "block_k": 2048}, BF16),
    "gemv": ("gemv", "gemv", 8, product("", 8, False, 2), {}),
    "gated gemv": ("gemv", "gemv", 4, paired(product("rms", 4, False, 4)), {}),
    "gated gemv, bf16": ("gemv", "gemv", 4, paired(product("rms", 4, False, 4)), BF16),
    "gated gemv, int8": ("gemv", "gemv", 4, paired(product("rms", 2, True)), INT8),
    "gated small m": ("small_m_gemm", "small_m_gemm", 4, paired(products(8, 6, 1, False)), {}),
    "gated small m, split": ("small_m_gemm", "small_m_gemm", 4, paired(products(8, 6, 2, False)), {}),
    "gated small m, int8": ("small_m_gemm", "small_m_gemm", 4, paired(products(8, 4, 1, False)), INT8),
    "gated 64 rows, int8": ("small_m_gemm", "small_m_gemm", 4, paired(products(64, 4, 1, True)), INT8 | {"x": "*i8"}),
    "gate halves": ("elementwise", "_gate_halves", 4, {"activation": "silu", "block": 1024}, {"both": "*fp16"}),
    "gate": ("elementwise", "_gate", 4, {"activation": "silu", "block": 1024}, {"gate": "*fp16"}),
    "gemv, int8, norm": ("gemv", "gemv", 4, product("layer", 2, True), {"weight": "*i8"}),
    "gemv, int8": ("gemv", "gemv", 8, product("", 4, True, 4), {"weight": "*i8"}),
    "keep, fp8": ("kv_write", "_kv_write", 4, {**keeping(rotation=1), "fp8": 2}, CACHE),
    "turn whole heads, fp8": ("kv_write", "_kv_write_halves", 4, {**halves(has_norm=True), "fp8": 2}, CACHE),
    "many heads, fp8 cells": (DECODE, "_attend", 4, {**attention(32, False), "fp8": 2}, CACHE),
    "few heads, fp8 cells": (DECODE, "_attend", 8, {**attention(64, True), "fp8": 2}, CACHE),
    "group, fp8 cells": (GROUP_DECODE, "_attend_group", 4, group(64, fp8=2), GROUPED | CACHE),
    "group of few rows, fp8 cells": (GROUP_DECODE, "_attend_group", 8, group(64, fp8=2), GROUPED | CACHE),
    "group of many rows, fp8 cells": (GROUP_DECODE, "_attend_group", 4, group(32, stages=5, fp8=2), GROUPED | CACHE),
    "rows of groups with pages, fp8 cells": (
        GROUP_PREFILL,
        "_attend_causally",
        4,
        {**causal(SHORT, is_paged=True), "fp8": 2},
        GROUPED | CACHE | {"k": "*u8", "v": "*u8"},
    ),
    "FP8 digits": ("int8", "_split_rows", 8, NORMED, {"digits": "*fp8e4nv", "x": "*bf16", "gain": "*bf16"}),
    "gated gemv of words, int8": (
        "gemv",
        "gemv",
        4,
        {**paired(product("rms", 1, True, block_n=16)), "is_whole": False},
        INT8 | BF16_ROWS,
    ),
    "layer norm, gemv of words, int8": (
        "gemv",
        "gemv",
        4,
        {**product("layer", 1, True, block_n=16), "is_whole": False},
        INT8 | {"y": "*fp16"},
    ),
    "gated and rounded rows": (
        "fp8_rows",
        "_round_rows",
        16,
        {**ROUNDED, **GATED, "group": 0},
        {"codes": "*fp8e4nv", "scales": "*fp32"},
    ),
    "added rows": ("elementwise", "_add", 8, {"block": 2048}, {}),
    "rounded rows": ("fp8_rows", "_round_rows", 8, {**ROUNDED, "group": 0}, {"codes": "*fp8e4nv", "scales": "*fp32"}),
    "rounded blocks": (
        "fp8_rows",
        "_round_rows",
        8,
        {**ROUNDED, "group": 128},
        {"codes": "*fp8e4nv", "scales": "*fp32"},
    ),
}
for name, numbers in {"fp8": FP8, "bytes": BYTES}.items():
    for kind, more in {"": {"has_scales": True}, " by block": BLOCKS}.items():
        one = {**product("rms", 2, True), "is_split": False, **more}
        few, many = ({**products(padded, 4, 2, False), **more} for padded in (8, 64))
        CASES |= {
            f"gemv, {name}{kind}": ("gemv", "gemv", 4, one, numbers | BF16_ROWS),
            f"gemv, fp16, {name}{kind}": ("gemv", "gemv", 4, one, numbers),
            f"gated gemv, {name}{kind}": ("gemv", "gemv", 4, paired(one), numbers | BF16_ROWS),
            f"small m, {name}{kind}": ("small_m_gemm", "small_m_gemm", 4, few, numbers | BF16_ROWS),
            f"gated small m, {name}{kind}": ("small_m_gemm", "small_m_gemm", 4, paired(few), numbers | BF16_ROWS),
            f"64 rows, {name}{kind}": ("small_m_gemm", "small_m_gemm", 4, many, numbers | BF16_ROWS),
            f"128 rows, {name}{kind}": (
                "small_m_gemm",
                "small_m_gemm",
                8,
                {**many, "stages": 3, "block_n": 128},
                numbers | BF16_ROWS,
            ),
            f"dequantize, {name}{kind}": (
                "elementwise",
                "_dequantize",
                4,
                {**DEQUANTIZE, "scale_width": 128 if kind else 0},
                numbers | {"out": "*bf16"},
            ),
        }
for kind, more in {"": {"has_scales": True}, " by block": BLOCKS}.items():
    one = {**product("", 1, True), "is_whole": False, **more}
    gated_words = paired({**product("rms", 1, True, block_n=8 if kind else 16), "is_whole": False, **more})
    CASES[f"gemv of words, fp8{kind}"] = ("gemv", "gemv", 4, one, FP8 | BF16_ROWS)
    split = {**products(64, 4, 2, True), **more}
    CASES[f"64 rows of digits, fp8{kind}"] = (
        "small_m_gemm",
        "small_m_gemm",
        4,
        split,
        FP8 | BF16_ROWS | {"x": "*fp8e4nv"},
    )
    CASES[f"gated gemv of words, fp8{kind}"] = ("gemv", "gemv", 4, gated_words, FP8 | BF16_ROWS)
CASES["256 rows of digits, fp8"] = (
    "small_m_gemm",
    "small_m_gemm",
    8,
    {**products(64, 4, 1, True), "block_n": 128},
    FP8 | BF16_ROWS | {"x": "*fp8e4nv"},
)
for name, cut in {"few": fp8_rows._FEW, "some": fp8_rows._SOME, "many": fp8_rows._MANY}.items():
    given = {"block_m": cut.rows, "block_n": cut.outputs, "width": 128, "stages": cut.stages}
    pointers = {"x": "*fp8e4nv", **FP8, "y": "*bf16"}
    CASES[f"rounded, {name} rows"] = ("fp8_rows", "_multiply_blocks", cut.warps, given, pointers)
for name, tiles in {"few": grouped_gemm._FEW, "some": grouped_gemm._SOME, "many": grouped_gemm._MANY}.items():
    CASES |= {
        f"into experts, {name} rows": (GROUPED_GEMM, "_grouped", tiles.warps, grouped(tiles, is_into=True), EXPERTS),
        f"out of experts, {name} rows": (GROUPED_GEMM, "_grouped", tiles.warps, grouped(tiles, is_into=False), EXPERTS),
    }
    for where, is_into in {"into": True, "out of": False}.items():
        older = {"older: ": grouped_gemm._OLDER_PACKED} if name == "many" else {}
        for age, cut in {"": tiles, **older}.items():
            given = {**grouped(cut, is_into), "is_packed": True}
            case = f"{age}{where} experts, mxfp4, {name} rows"
            CASES[case] = (GROUPED_GEMM, "_grouped", cut.warps, given, EXPERTS | MXFP4)
    scaled = EXPERTS | FP8 | BF16_ROWS | {"bias": "*bf16"}
    for kind, more in {"": {"has_scales": True}, " by block": BLOCKS}.items():
        for where, is_into in {"into": True, "out of": False}.items():
            given = {**grouped(tiles, is_into), "has_bias": False, "is_clamped": False, **more}
            CASES[f"{where} experts, fp8{kind}, {name} rows"] = (GROUPED_GEMM, "_grouped", tiles.warps, given, scaled)

for most, *pair in grouped_gemm._HALVES:
    for where, cut in zip(("into", "out of"), pair, strict=True):
        given = grouped(cut, where == "into")
        CASES[f"{where} experts, halves below {most}"] = (GROUPED_GEMM, "_grouped", cut.warps, given, EXPERTS)

for name, cut, own in [
    (
        "into",
        few_experts._INTO,
        {"is_gated": True, "activation": "silu", "is_clamped": False, "steps": 4, "has_norm": True},
    ),
    ("out of", few_experts._OUT, {"used": 8, "steps": 1, "has_residual": True}),
]:
    tiling = {"block_n": cut[0], "block_k": cut[1], "has_bias": False, "uses_pdl": True, "is_native": True}
    tiling |= {"is_packed": False, "scales": None}
    of_few = (
        "few_experts",
        "_into" if name == "into" else "_out",
        cut[2],
        {**tiling, **own},
        {"chosen": "*i64", **EXPERTS},
    )
    CASES[f"{name} the experts of few rows"] = of_few
    wide = few_experts._PACKED_INTO if name == "into" else few_experts._PACKED_OUT
    given = {**tiling, **own, "is_packed": True, "block_n": wide[0], "block_k": wide[1], "steps": 3, "has_bias": True}
    del given["scales"]
    CASES[f"{name} the experts of few rows, mxfp4"] = (
        *of_few[:2],
        wide[2],
        given,
        {"chosen": "*i64", **EXPERTS, **MXFP4},
    )

NOT_CHOSEN = [
    *((case, 80) for case in ("small m, int8", "64 rows, int8", "many rows, int8", "gated 64 rows, int8")),
    *((case, 80) for case in ("rows of wide heads", "rows of wide heads with slopes", "alibi")),
    *((case, 90) for case in ("alibi, smaller blocks", "by distance, smaller blocks")),
    *((case, 80) for case in CASES if re.search("rows of (groups|(many )?latent)", case) and "older" not in case),
    *(
        (case, 80)
        for case in ("many latent heads", "rows of Mamba", "chunks of the delta rule", "rows of the delta rule")
    ),
    ("chunks of the delta rule, fp32", 80),  # spills some there, where fp32 is for tests
    *((case, 90) for case in CASES if "older" in case or "bytes" in case),
    *((case, 80) for case in CASES if re.search("fp8|rounded|halves", case)),
    *((f"{where} experts, mxfp4, many rows", 80) for where in ("into", "out of")),
]  # see product.multiply, rows._choose, attention.attend


def resources(binary: bytes, directory: Path) -> str:
    """What the vendor's tool says of a kernel, such as REG:108 STACK:0."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    file = directory / "kernel.cubin"
    file.write_bytes(binary)
    shown = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    return shown.stdout + shown.stderr


COMPILED = [each for each in itertools.product(CASES, CAPABILITIES) if each not in NOT_CHOSEN]


def is_like_another(case: str, capability: int) -> bool:
    """Whether it is compiled of a source that is compiled for the newer GPU too, or with scales by block."""
    is_one_scale = re.search("(fp8|bytes)(?!( by block| cells))", case) is not None
    return is_one_scale or (capability == 80 and (case, 90) in COMPILED)


@pytest.mark.parametrize(
    ("case", "capability"),
    # What is compiled for the newer GPU is the same source, and a launch of dependents more.
    [pytest.param(*each, marks=pytest.mark.long if is_like_another(*each) else ()) for each in COMPILED],
)
def test_a_kernel_compiles_and_spills_no_register(case: str, capability: int, tmp_path: Path) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    module, function, warps, constants, types = CASES[case]
    kernel = getattr(importlib.import_module(f"{KERNELS}.{module}"), function)
    uses_pdl = capability >= 90
    limit = {"maxnreg": constants["maxnreg"]} if uses_pdl and "maxnreg" in constants else {}
    limit |= {"num_stages": constants["num_stages"]} if "num_stages" in constants else {}
    constants = {**constants, "uses_pdl": uses_pdl}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    known = {**POINTERS, **NUMBERS, **types}
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in kernel.arg_names}
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    # As the launcher finds them: memory begins at multiples of 16 bytes, and so do pages and rows of a matrix.
    sizes = ("outputs", "inputs", *["rank"] * (module == "low_rank"))
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or kind == "i64" or name in sizes]
    source = ASTSource(
        kernel,
        signature,
        {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "launch_pdl": uses_pdl, **limit}
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    found = re.findall(r"REG:(\d+) STACK:(\d+)", resources(compiled.asm["cubin"], tmp_path))
    most_stack = 48 if constants.get("rotation") else 0  # the sine of a huge number takes some
    assert found and all(int(stack) <= most_stack and int(registers) <= 255 for registers, stack in found)
