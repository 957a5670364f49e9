"""NeMo's LoRA adapters, merged at conversion, against NeMo's forward with the adapters beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.megatron_core import core_forward, core_state, cut
from support.checkpoints.nemo_archive import HEAD_SIZE, HEADS, HIDDEN, INTER, LAYERS, VOCAB, gpt_config, write_nemo
from support.shards.reference_forward import forward

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.user_files import GivenFiles
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from handover.errors import CheckpointError

RANK, ALPHA = 4, 6.0
INPUT_IDS = np.arange(2 * 6).reshape(2, 6) % VOCAB
FUSED = {"kqv": "self_attention.linear_qkv", "hto4h": "mlp.linear_fc1"}
OTHERS = {"dense_attention": "self_attention.linear_proj", "4htoh": "mlp.linear_fc2"}
CANONICAL = {"unfused_kqv": ("q", "k", "v"), "unfused_hto4h": ("gate", "up")}
LEGACY = {
    "decoder.layers": "language_model.encoder.layers",
    "decoder.final": "language_model.encoder.final",
    "model.embedding": "model.language_model.embedding",
    "linear_qkv": "query_key_value",
    "linear_proj": "dense",
    "linear_fc1": "dense_h_to_4h",
    "linear_fc2": "dense_4h_to_h",
    "pre_mlp_layernorm": "post_attention_layernorm",
}


def legacy(key: str) -> str:
    for new, old in LEGACY.items():
        key = key.replace(new, old)
    return key


def adapter_state(variant: str, groups: int = HEADS) -> dict[str, torch.Tensor]:
    """An adapter of all layers, whole, by NeMo's sizes of each kind."""
    generator = torch.Generator().manual_seed(7)
    qkv_rows = {"q": HIDDEN, "k": groups * HEAD_SIZE, "v": groups * HEAD_SIZE}
    state = {}

    def add(place: str, rows: int, columns: int) -> None:
        state[f"{place}.linear_in.weight"] = torch.randn(RANK, columns, generator=generator) / 3
        state[f"{place}.linear_out.weight"] = torch.randn(rows, RANK, generator=generator) / 3

    for layer in range(LAYERS):
        base = f"model.decoder.layers.{layer}."
        attention, mlp = f"{base}self_attention.adapter_layer.lora_", f"{base}mlp.adapter_layer.lora_"
        if variant == "nemo":
            add(f"{attention}kqv_adapter", (HEADS + 2 * groups) * HEAD_SIZE, HIDDEN)
            add(f"{mlp}hto4h_adapter", INTER, HIDDEN)
        else:
            for part, rows in qkv_rows.items():
                add(f"{attention}unfused_kqv_adapter.{part}_adapter", rows, HIDDEN)
            for part in ("gate", "up"):
                add(f"{mlp}unfused_hto4h_adapter.{part}_adapter", INTER // 2, HIDDEN)
        add(f"{attention}dense_attention_adapter", HIDDEN, HIDDEN)
        add(f"{mlp}4htoh_adapter", HIDDEN, INTER)
    return state


def forward_of(state: dict[str, torch.Tensor], groups: int, ranks: int) -> Callable[[np.ndarray, str], np.ndarray]:
    """What NeMo adds to a linear layer's output: ``ParallelLinearAdapter.forward`` and the mixins of each layer."""
    w = {key.removeprefix("model."): value.double().numpy() for key, value in state.items()}

    def one(x: np.ndarray, place: str) -> np.ndarray:
        return x @ w[f"{place}.linear_in.weight"].T @ w[f"{place}.linear_out.weight"].T * (ALPHA / RANK)

    def adapter(x: np.ndarray, name: str) -> np.ndarray:
        module, _, layer = name.rpartition(".")
        for kind, linear in {**FUSED, **OTHERS}.items():
            place = f"{module}.adapter_layer.lora_{kind}_adapter"
            if linear.endswith(layer) and f"{place}.linear_in.weight" in w:
                return one(x, place)
        place = f"{module}.adapter_layer.lora_unfused_{'kqv' if layer == 'linear_qkv' else 'hto4h'}_adapter"
        if layer == "linear_fc1":  # each training rank puts its own rows of both behind one another
            gate, up = (one(x, f"{place}.{part}_adapter") for part in ("gate", "up"))
            pairs = zip(np.split(gate, ranks, -1), np.split(up, ranks, -1), strict=True)
            return np.concatenate([half for pair in pairs for half in pair], -1)
        query, key, value = (one(x, f"{place}.{part}_adapter") for part in ("q", "k", "v"))
        shape = (*x.shape[:2], groups, -1, HEAD_SIZE)
        return np.concatenate([query.reshape(shape), key.reshape(shape), value.reshape(shape)], 3).reshape(
            *x.shape[:2], -1
        )

    return adapter


def cut_adapter(key: str, value: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """ColumnParallelLinear cuts rows; RowParallelLinear, behind a row-parallel layer, columns."""
    is_row_parallel = "linear_in" in key and any(kind in key for kind in ("dense_attention", "4htoh"))
    return value.chunk(ranks, int(is_row_parallel))[rank].clone()


def files_of(state: dict[str, torch.Tensor], tensor: int, pipeline: int, cut_one: Any) -> dict[str, Any]:
    files = {}
    for stage in range(pipeline):
        per_stage = LAYERS // pipeline
        kept = {}
        for key, value in state.items():
            head, layers, rest = key.partition(".layers.")
            number, _, name = rest.partition(".")
            if pipeline == 1:
                kept[key] = value
            elif layers and int(number) // per_stage == stage:
                kept[f"{head}.layers.{int(number) % per_stage}.{name}"] = value
            elif not layers and stage == (0 if "embedding" in key else pipeline - 1):
                kept[key] = value
        for rank in range(tensor):
            part = f"tp_rank_{rank:02d}_pp_rank_{stage:03d}/" if pipeline > 1 else f"mp_rank_{rank:02d}/"
            part = "" if tensor * pipeline == 1 else part
            files[f"{part}model_weights.ckpt"] = {key: cut_one(key, value, tensor, rank) for key, value in kept.items()}
    return files


def sizes(tensor: int, pipeline: int, **more: Any) -> dict[str, Any]:
    return gpt_config(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, **more)


def write_adapter(path: Path, state: dict[str, Any], tensor: int = 1, pipeline: int = 1, **changes: Any) -> Path:
    lora = {"target_modules": ["all"], "adapter_dim": RANK, "alpha": ALPHA, "adapter_dropout": 0.1, "variant": "nemo"}
    peft = {"peft_scheme": "lora", "lora_tuning": {**lora, "weight_tying": False, **changes.pop("lora_tuning", {})}}
    config = sizes(tensor, pipeline, peft={**peft, **changes.pop("peft", {})}, **changes)
    return write_nemo(path, config, files_of(state, tensor, pipeline, cut_adapter), files={})


def merged(tmp_path: Path, model: Path, adapter: Path | None, ranks: int = 1) -> np.ndarray:
    convert(ConvertArguments(model, tmp_path / "out", ranks, "fp32", adapter=adapter))
    return forward(tmp_path / "out", INPUT_IDS)


@pytest.mark.parametrize("variant", ["nemo", "canonical"])
@pytest.mark.parametrize(
    ("model_ranks", "adapter_ranks", "groups"),
    [
        ((1, 1), (1, 1), HEADS),
        ((2, 1), (2, 1), HEADS),
        ((1, 1), (2, 2), HEADS),
        ((2, 2), (1, 1), HEADS),
        ((2, 1), (2, 1), 2),
    ],
)
def test_merged_logits_are_nemos_with_the_adapter(
    variant: str, model_ranks: tuple[int, int], adapter_ranks: tuple[int, int], groups: int, tmp_path: Path
) -> None:
    state, lora = core_state(groups), adapter_state(variant, groups)
    wanted = core_forward(state, INPUT_IDS, groups, 0, adapter=forward_of(lora, groups, adapter_ranks[0]))
    assert np.abs(wanted - core_forward(state, INPUT_IDS, groups, 0)).max() > 0.1, "it changes something"
    config = sizes(*model_ranks, num_query_groups=groups, bias_activation_fusion=True)
    model = write_nemo(tmp_path / "model.nemo", config, files_of(state, *model_ranks, cut))
    adapter = write_adapter(
        tmp_path / "adapter.nemo", lora, *adapter_ranks, num_query_groups=groups, lora_tuning={"variant": variant}
    )
    assert np.abs(merged(tmp_path, model, adapter, ranks=2) - wanted).max() < 1e-4


def test_an_adapter_of_legacy_keys_beside_its_model(tmp_path: Path) -> None:
    state, lora = core_state(), adapter_state("nemo")
    wanted = core_forward(state, INPUT_IDS, HEADS, 0, adapter=forward_of(lora, HEADS, 1))
    write_nemo(tmp_path / "model.nemo", gpt_config(), {"model_weights.ckpt": {legacy(k): v for k, v in state.items()}})
    write_adapter(tmp_path / "adapter.nemo", {legacy(key): value for key, value in lora.items()})
    assert np.abs(merged(tmp_path / "result", tmp_path, None) - wanted).max() < 1e-4


def test_alpha_is_the_rank_where_nothing_is_said(tmp_path: Path) -> None:
    state, lora = core_state(), adapter_state("nemo")
    wanted = core_forward(
        state, INPUT_IDS, HEADS, 0, adapter=lambda x, name: forward_of(lora, HEADS, 1)(x, name) * RANK / ALPHA
    )
    model = write_nemo(tmp_path / "model.nemo", gpt_config(), {"model_weights.ckpt": state})
    adapter = write_adapter(tmp_path / "adapter.nemo", lora, lora_tuning={"alpha": None})
    assert np.abs(merged(tmp_path, model, adapter) - wanted).max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft": {"peft_scheme": "lora,ptuning"}}, "peft_scheme is 'lora,ptuning'"),
        ({"lora_tuning": {"weight_tying": True}}, "weight_tying is True"),
        ({"lora_tuning": {"adapter_dim": 3}}, "are not matrices of adapter_dim 3"),
        ({"lora_tuning": {"alpha": "much"}}, "alpha is 'much'"),
    ],
)
def test_what_cannot_be_merged_exactly_is_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = write_nemo(tmp_path / "model.nemo", gpt_config(), {"model_weights.ckpt": core_state()})
    adapter = write_adapter(tmp_path / "adapter.nemo", adapter_state("nemo"), **changes)
    with pytest.raises(CheckpointError, match=words):
        open_source(find_archive(model, GivenFiles(adapter=adapter)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("lora_kqv_adapter.linear_in", "lora_kqv_adapter.linear_up"), "no part of a LoRA adapter that is read"),
        (("lora_kqv_adapter", "lora_q_adapter"), "no part of a LoRA adapter that is read"),
        (
            ("layers.1.", "layers.9."),
            "the model has no model.decoder.layers.9.self_attention.query_key_value.weight",
        ),
        (
            ("lora_4htoh", "lora_hto4h"),
            r"lora_hto4h_adapter.*\[8, 12\] does not fit model.decoder.layers.0.mlp.linear_fc1.weight",
        ),
    ],
)
def test_every_key_of_an_adapter_is_used(change: tuple[str, str], words: str, tmp_path: Path) -> None:
    state = {key.replace(*change): value for key, value in adapter_state("nemo").items()}
    model = write_nemo(tmp_path / "model.nemo", gpt_config(), {"model_weights.ckpt": core_state()})
    with pytest.raises(CheckpointError, match=words):
        open_source(find_archive(model, GivenFiles(adapter=write_adapter(tmp_path / "adapter.nemo", state))))


def test_an_adapter_for_a_model_is_refused_with_the_key_to_give_it_by(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter.nemo", adapter_state("nemo"))
    with pytest.raises(CheckpointError, match="holds a LoRA adapter, not a GPT") as caught:
        open_source(find_archive(adapter))
    assert "export.model.adapter_path" in str(caught.value.hint)


def test_layers_of_several_stages_that_cannot_be_numbered_are_refused(tmp_path: Path) -> None:
    state = {key: value for key, value in adapter_state("nemo").items() if "layers.0." not in key}
    model = write_nemo(tmp_path / "model.nemo", gpt_config(), {"model_weights.ckpt": core_state()})
    with pytest.raises(CheckpointError, match="adapters of 1 of 2 layers, from 2 pipeline stages"):
        open_source(find_archive(model, GivenFiles(adapter=write_adapter(tmp_path / "adapter.nemo", state, 1, 2))))


def test_a_model_that_says_lora_and_has_all_weights_is_a_model(tmp_path: Path) -> None:
    config = gpt_config(peft={"peft_scheme": "lora", "lora_tuning": {"adapter_dim": RANK}})
    model = write_nemo(tmp_path / "model.nemo", config, {"model_weights.ckpt": core_state()})
    assert inspect_source(model, 1, "fp32").dims.axis_size("num_layer") == LAYERS


@pytest.mark.parametrize("groups", [HEADS, 2])
def test_one_of_a_gpt_as_pefts(groups: int, tmp_path: Path) -> None:
    """transformers' GPT-2 has the weights transposed; what PEFT's reader, which PEFT's logits prove, merges of it."""
    more = {} if groups == HEADS else {"num_query_groups": groups}
    state, adapter_of = core_state(groups), adapter_state("nemo", groups)
    model = write_nemo(tmp_path / "model.nemo", sizes(1, 1, **more), files_of(state, 1, 1, cut))
    adapter = write_adapter(tmp_path / "adapter.nemo", adapter_of, **more)
    wish = {"weight_data_type": "fp32", "adapter": adapter}
    convert(ConvertArguments(model, tmp_path / "peft", **wish, format="peft"))
    convert(ConvertArguments(model, tmp_path / "merged", **wish, format="huggingface"))
    convert(ConvertArguments(model, tmp_path / "base", weight_data_type="fp32", format="huggingface"))
    wish["adapter"] = tmp_path / "peft"
    convert(ConvertArguments(tmp_path / "base", tmp_path / "again", **wish, format="huggingface"))
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "again"))
    assert first.keys() == second.keys()
    assert max(float((first[key] - second[key]).abs().max()) for key in first) < 1e-6
