"""PEFT's adapters, merged at conversion: PEFT's own logits, and what cannot be merged exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.shards.decoder_forward import forward
from support.tiny_models import peft_served
from support.tiny_models.huggingface_models import logits, save
from support.tiny_models.llama_models import save as save_llama
from support.tiny_models.llama_models import saved
from support.tiny_models.low_rank import STATES, draw, merged, write
from support.tiny_models.peft_adapters import ADAPTERS, DATA, INPUT_IDS

from evaluation.parity.references import open_reference
from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.user_files import GivenFiles
from export_scripts.convert import convert
from export_scripts.inspect import main as inspect
from handover.errors import CheckpointError
from handover.manifest import Manifest

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def run(source: Path, output: Path, adapter: Path | None = None, ranks: int = 1) -> Manifest:
    return convert(ConvertArguments(source, output / f"{ranks}-gpu", ranks, "fp32", adapter=adapter))


def difference(root: Path, name: str) -> float:
    return float(np.abs(forward(root, INPUT_IDS) - np.load(DATA / f"{name}.logits.npy")).max())


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "llama"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_merged_logits_are_pefts(name: str, ranks: int, tmp_path: Path) -> None:
    model = save(ADAPTERS[name][0], tmp_path / "source")
    assert np.abs(logits(model, INPUT_IDS) - np.load(DATA / f"{name}.logits.npy")).max() > 0.05, "it changes something"
    manifest = run(tmp_path / "source", tmp_path / "out", DATA / name, ranks)
    assert difference(tmp_path / f"out/{ranks}-gpu", name) < 1e-4
    assert manifest.made_from["adapter"] == str(DATA / name)


@pytest.mark.parametrize(("family", "other"), [("nemotron_h", "backbone."), ("qwen3_5", "model.language_model.")])
def test_a_module_may_have_the_name_that_its_class_gives_it_or_the_files(
    family: str, other: str, tmp_path: Path
) -> None:
    """transformers' Nemotron-H has a ``model`` where its files have a ``backbone``; Qwen3.5 may see images."""
    import transformers

    model = save_llama(family, tmp_path / "source")
    pairs = draw(model, 3, targets=("q_proj", "o_proj", "up_proj", *STATES))
    as_files = {name.replace("model.", other, 1): pair for name, pair in pairs.items()}
    wanted = logits(merged(model, pairs), INPUT_IDS)
    assert np.abs(wanted - logits(model, INPUT_IDS)).max() > 0.01, "it changes something"
    for name, each in (("class", pairs), ("files", as_files)):
        adapter = write(tmp_path / name, each)
        out = tmp_path / f"out-{name}"
        convert(ConvertArguments(tmp_path / "source", out, 1, "fp32", adapter=adapter, format="huggingface"))
        found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        assert np.abs(logits(found, INPUT_IDS) - wanted).max() < 1e-4
    again = {name: (a.clone(), b.clone()) for name, (a, b) in as_files.items()}
    both = write(tmp_path / "both", pairs | again)
    given = ConvertArguments(tmp_path / "source", tmp_path / "out", 1, "fp32", adapter=both, format="huggingface")
    with pytest.raises(CheckpointError, match="has the matrices of .* twice, by two names"):
        convert(given)


@pytest.mark.parametrize(
    ("family", "name"), [("mixtral", "all"), ("deepseek_v3", "all"), ("qwen3_5_moe", "gates"), ("qwen3", "head")]
)
def test_routers_gates_and_heads_are_merged_as_peft_adds_to_them(family: str, name: str, tmp_path: Path) -> None:
    """PEFT names a router's weight as a parameter, by another name than Mixtral's files have."""
    import transformers

    save_llama(family, tmp_path / "source", **peft_served.CHANGES.get(family, {}))
    adapter, out = peft_served.DATA / family / name, tmp_path / "out"
    convert(ConvertArguments(tmp_path / "source", out, 1, "fp32", adapter=adapter, format="huggingface"))
    found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    wanted = np.load(adapter.parent / "logits.npz")[name]
    assert np.abs(logits(found, peft_served.INPUT_IDS) - wanted).max() < 1e-4


def test_inspect_shows_what_is_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("gptj", tmp_path / "source")
    inspect([str(tmp_path / "source"), "--adapter", str(DATA / "gptj_rslora")])
    assert "the LoRA adapter gptj_rslora is merged into 4 weights, computed in fp32" in capsys.readouterr().out


def test_parity_compares_with_the_merged_model(tmp_path: Path) -> None:
    """transformers would load the model without its adapter: the engine computes the reference."""
    save("gpt2", tmp_path / "source")
    given = GivenFiles(adapter=DATA / "gpt2")
    reference, notes = open_reference(tmp_path / "source", "auto", tmp_path / "scratch", given)
    assert "a LoRA adapter is merged into it" in notes[0]
    prompt, *_ = INPUT_IDS.tolist()
    made = np.asarray(reference.log_probs(prompt[:5], prompt[5:]))
    wanted = torch.from_numpy(np.load(DATA / "gpt2.logits.npy")[0, :-1]).log_softmax(-1).numpy()
    assert np.abs(made - wanted).max() < 1e-4


def test_an_adapter_beside_the_model_is_merged(tmp_path: Path) -> None:
    """In a directory with the model's, and in the model's own, as transformers takes it."""
    save("gptj", tmp_path / "both/model")
    shutil.copytree(DATA / "gptj_rslora", tmp_path / "both/adapter")
    run(tmp_path / "both", tmp_path / "out")
    assert difference(tmp_path / "out/1-gpu", "gptj_rslora") < 1e-4
    shutil.copytree(DATA / "gptj_rslora", tmp_path / "both/model", dirs_exist_ok=True)
    run(tmp_path / "both/model", tmp_path / "within")
    assert difference(tmp_path / "within/1-gpu", "gptj_rslora") < 1e-4


def test_a_given_adapter_takes_the_place_of_those_beside_the_model(tmp_path: Path) -> None:
    save("gpt_neox", tmp_path / "both/model")
    for name in ("gpt_neox_head", "gpt_neox_patterns"):
        shutil.copytree(DATA / name, tmp_path / "both" / name)
    with pytest.raises(CheckpointError, match="2 LoRA adapters: gpt_neox_head, gpt_neox_patterns"):
        open_source(find_archive(tmp_path / "both"))
    run(tmp_path / "both", tmp_path / "out", tmp_path / "both/gpt_neox_patterns")
    assert difference(tmp_path / "out/1-gpu", "gpt_neox_patterns") < 1e-4


def test_weights_in_torchs_file_of_half_precision(tmp_path: Path) -> None:
    """The sum is that of fp32 numbers, whatever the two are stored as."""
    save("gptj", tmp_path / "source", dtype=torch.bfloat16)
    adapter = tmp_path / "adapter"
    shutil.copytree(DATA / "gptj_rslora", adapter)
    state = load_file(adapter / WEIGHTS)
    (adapter / WEIGHTS).unlink()
    torch.save({key: value.half() for key, value in state.items()}, adapter / "adapter_model.bin")
    run(tmp_path / "source", tmp_path / "out", adapter)
    base = load_file(tmp_path / "source/model.safetensors")["transformer.h.1.attn.q_proj.weight"].float()
    module = "base_model.model.transformer.h.1.attn.q_proj.lora_"
    down, up = (state[f"{module}{side}.weight"].half().float() for side in "AB")
    wanted = base + up @ down * np.float32(5 / np.sqrt(3))
    fused = np.fromfile(tmp_path / "out/1-gpu/model.layers.1.attention.query_key_value.weight.0.bin", np.float32)
    assert np.abs(fused.reshape(32, 3, 32)[:, 0].T - wanted.numpy()).max() < 1e-6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, r"use_dora: True  \(its weights are also scaled"),
        ({"bias": "all"}, r"bias: 'all'  \(the model's biases"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa'"),
        ({"init_lora_weights": "something"}, "init_lora_weights: 'something'"),
        ({"lora_bias": True}, "lora_bias: True"),
        ({"layer_replication": [[0, 2], [0, 2]]}, "layer_replication: .* it makes layers of its own|layer_replication"),
        ({"something_new": 3}, r"something_new: 3  \(it is not known here\)"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 9}, "are not matrices of rank 9"),
        ({"target_modules": ["q_proj", "out_proj"]}, "no matrices for the target_modules out_proj"),
        ({"alpha_pattern": {"q_.*": 3}}, "alpha_pattern holds 'q_"),
    ],
)
def test_what_cannot_be_merged_exactly_is_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    save("gptj", tmp_path / "source")
    shutil.copytree(DATA / "gptj_rslora", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=words):
        open_source(find_archive(tmp_path / "source", GivenFiles(adapter=tmp_path / "adapter")))


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["q_proj", "v_proj", "query_key_value", "c_attn", "Wqkv"]},
        {"target_modules": ["q_proj", "v_proj", "out_proj"], "exclude_modules": ["out_proj"]},
    ],
)
def test_names_of_modules_that_peft_passes_over_are_passed_over(changes: dict[str, Any], tmp_path: Path) -> None:
    save("gptj", tmp_path / "source")
    shutil.copytree(DATA / "gptj_rslora", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps({**config, **changes}))
    run(tmp_path / "source", tmp_path / "out", tmp_path / "adapter")
    assert difference(tmp_path / "out/1-gpu", "gptj_rslora") < 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, ": adapter_config.json describes an adapter"),
        ({"lora_alpha": None}, ": adapter_config.json: lora_alpha is None"),
        ({"target_modules": ["out_proj", "q_proj", "v_proj"]}, " has no matrices for the target_modules out_proj"),
    ],
)
def test_an_error_names_the_adapters_own_directory(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    save("gptj", tmp_path / "source")
    adapter = tmp_path / "elsewhere/adapter"
    shutil.copytree(DATA / "gptj_rslora", adapter)
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=f"{adapter}{words}"):
        open_source(find_archive(tmp_path / "source", GivenFiles(adapter=adapter)))


def changed(tmp_path: Path, rename: dict[str, str | None], **more: torch.Tensor) -> Path:
    """Copy gptj's adapter with keys renamed or removed, and others added."""
    shutil.copytree(DATA / "gptj_rslora", tmp_path / "adapter")
    state = load_file(tmp_path / "adapter" / WEIGHTS)
    kept = {rename.get(key, key): value for key, value in state.items() if rename.get(key, key)}
    save_file({**kept, **more}, tmp_path / "adapter" / WEIGHTS)
    return tmp_path / "adapter"


KEY = "base_model.model.transformer.h.0.attn.q_proj.lora_A.weight"
LAYER_7 = {KEY.replace("A.w", f"{side}.w"): KEY.replace("A.w", f"{side}.w").replace("h.0", "h.7") for side in "AB"}


@pytest.mark.parametrize(
    ("rename", "more", "words"),
    [
        ({KEY: None}, {}, "h.0.attn.q_proj.lora_A.weight is missing beside"),
        (LAYER_7, {}, "the model has no transformer.h.7.attn.q_proj.weight"),
        ({}, {KEY.replace("A.weight", "magnitude_vector"): torch.ones(32)}, "lora_magnitude_vector is no matrix"),
        ({}, {"base_model.model.transformer.wte.weight": torch.ones(97, 32)}, r"\[97, 32\] does not fit wte.weight"),
        ({}, {"base_model.model.score.weight": torch.ones(2, 32)}, "the model has no score.weight"),
    ],
)
def test_every_key_of_an_adapter_is_used(
    rename: dict[str, str | None], more: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    save("gptj", tmp_path / "source")
    with pytest.raises(CheckpointError, match=words):
        open_source(find_archive(tmp_path / "source", GivenFiles(adapter=changed(tmp_path, rename, **more))))


def test_a_tied_head_is_not_changed_by_half(tmp_path: Path) -> None:
    save("gpt2", tmp_path / "source")
    shutil.copytree(DATA / "gpt2", tmp_path / "adapter")
    state = load_file(tmp_path / "adapter" / WEIGHTS)
    for name, words in (("transformer.wte", "the embedding and the output projection"), ("lm_head", "has no lm_head")):
        save_file({**state, f"base_model.model.{name}.weight": torch.ones(96, 32)}, tmp_path / "adapter" / WEIGHTS)
        with pytest.raises(CheckpointError, match=words):
            open_source(find_archive(tmp_path / "source", GivenFiles(adapter=tmp_path / "adapter")))


def test_an_adapter_for_a_checkpoint_is_refused_with_the_key_to_give_it_by(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_source(find_archive(DATA / "gpt2"))
    assert "export.model.adapter_path" in str(caught.value.hint)
    save("gpt2", tmp_path / "source")
    with pytest.raises(CheckpointError, match="adapter_path .*/none does not exist"):
        find_archive(tmp_path / "source", GivenFiles(adapter=tmp_path / "none"))


def test_a_number_that_is_none_in_an_adapter_is_named(tmp_path: Path) -> None:
    save("gptj", tmp_path / "source")
    adapter = changed(tmp_path, {})
    state = load_file(adapter / WEIGHTS)
    state[KEY][0, 0] = torch.nan
    save_file(state, adapter / WEIGHTS)
    with pytest.raises(
        CheckpointError, match=r"model.layers.0.attention.query_key_value.weight holds \d+ values that are NaN"
    ):
        run(tmp_path / "source", tmp_path / "out", adapter)


def test_a_tied_embedding_of_llamas_is_not_trained_for_one_of_its_purposes(tmp_path: Path) -> None:
    """PEFT's copy of the embedding is not the head, which stays as it was."""
    save_llama("llama32", tmp_path / "model")
    (tmp_path / "adapter").mkdir()
    tensors, place = saved("llama32").tensors, "model.layers.0.self_attn.o_proj."
    rows, columns = tensors[f"{place}weight"].shape
    pair = {f"{place}lora_A.weight": torch.ones(2, columns), f"{place}lora_B.weight": torch.ones(rows, 2)}
    state = {**pair, "model.embed_tokens.weight": torch.ones_like(tensors["model.embed_tokens.weight"])}
    named = {f"base_model.model.{key}": value for key, value in state.items()}
    save_file(named, tmp_path / "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["o_proj"]}
    config["modules_to_save"] = ["embed_tokens"]
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is the embedding and the output projection; the adapter changes one"):
        open_source(find_archive(tmp_path / "model", GivenFiles(adapter=tmp_path / "adapter")))
