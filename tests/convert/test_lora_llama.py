"""LoRA adapters of Llama-like models, of PEFT and of NeMo: logits of the merged model in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.llama_adapters import ALPHA, GATES, PROJECTIONS, RANK, merged_logits, products
from support.checkpoints.llama_configs import nemo1, nemo2, padded_vocabulary
from support.checkpoints.llama_files import (
    chunked,
    write_archive,
    write_huggingface_tokenizer,
    write_nemo2_tree,
    write_torch_dist,
)
from support.checkpoints.llama_state import core_state, merged_qkv
from support.checkpoints.nemo_archive import write_nemo
from support.shards.llama_shards_forward import forward
from support.tiny_models.llama_models import VOCAB, input_ids, logits, save, saved
from support.tiny_models.peft_adapters import DATA, INPUT_IDS
from support.tiny_models.peft_output import assert_holds

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
State = dict[str, torch.Tensor]


def test_pefts_logits(tmp_path: Path) -> None:
    """As FT shards, and as a directory that transformers loads."""
    from transformers import AutoModelForCausalLM

    save("llama", tmp_path / "source")
    wanted = np.load(DATA / "llama.logits.npy")
    adapter = DATA / "llama"
    for ranks in (1, 2, 4):
        convert(ConvertArguments(tmp_path / "source", tmp_path / f"{ranks}-gpu", ranks, "fp32", adapter=adapter))
        assert np.abs(forward(tmp_path / f"{ranks}-gpu", INPUT_IDS)[..., :VOCAB] - wanted).max() < 1e-4
    hub = tmp_path / "hub"
    convert(ConvertArguments(tmp_path / "source", hub, 1, "fp32", adapter=adapter, format="huggingface"))
    with torch.no_grad():
        made = AutoModelForCausalLM.from_pretrained(hub)(torch.from_numpy(INPUT_IDS)).logits.numpy()
    assert np.abs(made - wanted).max() < 1e-4


def in_nemos_words(name: str, adapter: dict[str, tuple[torch.Tensor, torch.Tensor]], is_fused: bool) -> State:
    """NeMo's keys, gated projections as [2, inter, rank] until a rank's part is cut."""
    config, state = saved(name).config, {}
    groups = config.num_key_value_heads
    size = saved(name).tensors["model.layers.0.self_attn.k_proj.weight"].shape[0] // groups
    for layer in range(config.num_hidden_layers):
        of: dict[str, Any] = {p: adapter.get(f"model.layers.{layer}.{p}.weight") for p in (*PROJECTIONS, *GATES)}
        attention = f"model.decoder.layers.{layer}.self_attention.adapter_layer.lora_"
        mlp = f"model.decoder.layers.{layer}.mlp.adapter_layer.lora_"
        made = {
            f"{attention}dense_attention_adapter": of["self_attn.o_proj"],
            f"{mlp}4htoh_adapter": of["mlp.down_proj"],
        }
        q, k, v = (of[f"self_attn.{letter}_proj"] for letter in "qkv")
        gate, up = (of[p] for p in GATES)
        if is_fused:
            made[f"{attention}kqv_adapter"] = (q[0], merged_qkv(q[1], k[1], v[1], groups, size))
            made[f"{mlp}hto4h_adapter"] = up if gate is None else (gate[0], torch.stack([gate[1], up[1]]))
        else:
            made |= {
                f"{attention}unfused_kqv_adapter.{n}_adapter": one for n, one in zip("qkv", (q, k, v), strict=True)
            }
            made |= {f"{mlp}unfused_hto4h_adapter.{n}_adapter": one for n, one in (("gate", gate), ("up", up))}
        for place, (down, out) in made.items():
            state |= {f"{place}.linear_in.weight": down, f"{place}.linear_out.weight": out}
    return state


def cut_adapter(key: str, value: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    is_row_parallel = "linear_in" in key and ("dense_attention" in key or "4htoh" in key)
    if value.ndim == 3:
        return value.chunk(ranks, 1)[rank].reshape(-1, value.shape[-1])
    return value.chunk(ranks, int(is_row_parallel))[rank].clone()


def write_adapter(path: Path, name: str, state: State, ranks: int, is_fused: bool) -> Path:
    lora = {"adapter_dim": RANK, "alpha": ALPHA, "adapter_dropout": 0.0, "variant": "nemo" if is_fused else "canonical"}
    peft = {"peft_scheme": "lora", "lora_tuning": {**lora, "target_modules": ["all"], "weight_tying": False}}
    files = {
        f"mp_rank_{rank:02d}/model_weights.ckpt" if ranks > 1 else "model_weights.ckpt": {
            key: cut_adapter(key, value, ranks, rank) for key, value in state.items()
        }
        for rank in range(ranks)
    }
    return write_nemo(path, nemo1(saved(name).config, (ranks, 1), peft=peft), files, files={})


def model_of(form: str, name: str, ranks: int, folder: Path) -> Path:
    source = saved(name)
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, ranks))
    if form == "archive":
        return write_archive(folder / "model.nemo", nemo1(source.config, (ranks, 1)), state, (ranks, 1))
    weights = write_nemo2_tree(folder / "model", nemo2(source.config, name))
    is_apart = form.endswith("apart")
    write_torch_dist(weights, chunked(state, ranks, not is_apart, is_apart))
    return folder / "model"


CASES = [
    ("llama", "archive", 1, 1),
    ("llama", "archive", 2, 4),
    ("llama", "archive", 4, 1),
    ("llama", "nemo2", 2, 2),
    ("llama", "nemo2, gate and up apart", 2, 2),
    ("mistral", "archive", 2, 2),
    ("qwen2", "nemo2", 1, 2),
]
FORMS = [(*case, is_fused) for case in CASES for is_fused in (True, False)]


# Products apart are joined before ranks and after the file is read.
@pytest.mark.in_ci(when=lambda at: at.is_fused or (at.form, at.ranks) == ("archive", 2))
@pytest.mark.parametrize(
    ("name", "form", "ranks", "adapter_ranks", "is_fused"), [*FORMS, ("nemotron", "archive", 2, 1, True)]
)
def test_nemos_adapters(name: str, form: str, ranks: int, adapter_ranks: int, is_fused: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    adapter = products(name, is_fused)
    wanted = merged_logits(name, adapter)
    assert np.abs(wanted - saved(name).logits).max() > 0.05, "it changes something"
    model = model_of(form, name, ranks, tmp_path)
    path = write_adapter(
        tmp_path / "adapter.nemo", name, in_nemos_words(name, adapter, is_fused), adapter_ranks, is_fused
    )
    if name == "llama":  # the relatives have no shards
        convert(ConvertArguments(model, tmp_path / "2-gpu", 2, "fp32", adapter=path))
        made = forward(tmp_path / "2-gpu", input_ids())[..., :VOCAB]
        assert np.abs(made - wanted).max() < 1e-4 * max(1.0, float(np.abs(wanted).max()))
    tokenizer = tmp_path / "tokenizer"
    write_huggingface_tokenizer(tokenizer)
    wish = ConvertArguments(model, tmp_path / "hub", 1, "fp32", adapter=path, tokenizer=tokenizer, format="huggingface")
    convert(wish)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", attn_implementation="eager")
    assert np.abs(logits(loaded)[..., :VOCAB] - wanted).max() < 1e-4 * max(1.0, float(np.abs(wanted).max()))


@pytest.mark.parametrize(("form", "is_fused"), [("archive", True), ("archive", False), ("nemo2, apart", False)])
def test_nemos_adapters_as_pefts(form: str, is_fused: bool, tmp_path: Path) -> None:
    added = products("llama", is_fused)
    adapter = write_adapter(tmp_path / "a.nemo", "llama", in_nemos_words("llama", added, is_fused), 2, is_fused)
    model = model_of(form, "llama", 2, tmp_path)
    convert(ConvertArguments(model, tmp_path / "peft", weight_data_type="fp32", adapter=adapter, format="peft"))
    assert_holds(tmp_path / "peft", added)
