"""GPT-OSS: from and to MXFP4 as transformers computes it, and every field of a training that it has not refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints.core_adapters import APART, write_expert_adapter
from support.checkpoints.dcp_checkpoints import state_of, write_fsdp
from support.checkpoints.llama_adapters import ALPHA, RANK
from support.checkpoints.llama_configs import megatron_lm
from support.checkpoints.llama_files import write_megatron_lm_tree
from support.checkpoints.llama_sources import Case, write_source
from support.tiny_models.llama_models import EXPERTS, HIDDEN, LAYERS, build, logits, saved, tensors
from support.tiny_models.quantized_models import save_mxfp4
from transformers import AutoModelForCausalLM, Mxfp4Config

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.megatron.arguments import in_nemo_words
from export_scripts.checkpoints.nemo.llama_config import problems_of, read_dims
from export_scripts.convert import convert
from handover.errors import CheckpointError
from models.engine_limits import beyond_engine


def loaded(folder: Path, **given: Any) -> Any:
    """Read a directory as transformers does, without a complaint."""
    given = {"dtype": torch.float32, "attn_implementation": "eager", **given}
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **given)
    assert not any(loading.values()), loading
    return model.eval()


def to_huggingface(source: Path, folder: Path, data_type: str, quantization: str | None = None) -> Path:
    given = {"weight_data_type": data_type, "format": "huggingface", "quantization": quantization}
    convert(ConvertArguments(source, folder, **given))  # type: ignore[arg-type]
    return folder


def test_mxfp4_becomes_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """The model and an expert's middle are equally wide: logits show that no axis has been taken for the other."""
    theirs = loaded(save_mxfp4(tmp_path / "source"), quantization_config=Mxfp4Config(dequantize=True))
    made = to_huggingface(tmp_path / "source", tmp_path / "hf", "bf16")
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    own = tensors(made)
    for name, value in theirs.state_dict().items():
        assert torch.equal(own[name].float(), value.float()), name
    assert np.abs(logits(loaded(made)) - logits(theirs.float())).max() < 1e-5


def test_mxfp4_that_is_asked_for_again_is_kept(tmp_path: Path) -> None:
    given = tensors(save_mxfp4(tmp_path / "source"))
    made = to_huggingface(tmp_path / "source", tmp_path / "hf", "bf16", "mxfp4")
    assert (made / "model.safetensors").read_bytes() == (tmp_path / "source/model.safetensors").read_bytes()
    key = "quantization_config"
    configs = [json.loads((each / "config.json").read_text()) for each in (made, tmp_path / "source")]
    assert configs[0][key] == configs[1][key]
    wide = tensors(to_huggingface(tmp_path / "source", tmp_path / "fp32", "fp32", "mxfp4"))
    for name, value in given.items():
        assert torch.equal(wide[name], value if value.dtype == torch.uint8 else value.float()), name
        assert wide[name].dtype == (torch.uint8 if value.dtype == torch.uint8 else torch.float32), name
    given["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = 255
    save_file(given, tmp_path / "source/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj_scales holds 1 or more values that are NaN"):
        to_huggingface(tmp_path / "source", tmp_path / "bad", "bf16", "mxfp4")


def test_a_training_becomes_mxfp4_that_transformers_reads(tmp_path: Path) -> None:
    case = Case("gpt_oss", "Megatron-LM, torch_dist", 2, 1, torch.bfloat16)
    source = write_source(case, tmp_path / "source")
    made = to_huggingface(source, tmp_path / "mxfp4", "bf16", "mxfp4")
    plain = tensors(to_huggingface(source, tmp_path / "hf", "bf16"))
    model = loaded(made, quantization_config=Mxfp4Config(dequantize=True))
    for name, value in model.state_dict().items():
        wanted = plain[name].float()
        if name.endswith(("gate_up_proj", "down_proj")):
            error = (value.float() - wanted).norm() / wanted.norm()
            assert 0 < error < 0.2, name
        else:
            assert torch.equal(value.float(), wanted), name
    again = to_huggingface(made, tmp_path / "again", "bf16")
    assert np.abs(logits(loaded(again)) - logits(model.float())).max() < 1e-5


def test_a_directory_of_the_hub_stays_what_it_is(tmp_path: Path) -> None:
    source = saved("gpt_oss")
    build("gpt_oss").save_pretrained(tmp_path / "source")
    made = to_huggingface(tmp_path / "source", tmp_path / "hf", "fp32")
    assert all(torch.equal(value, source.tensors[name]) for name, value in tensors(made).items())
    assert np.array_equal(logits(loaded(made)), source.logits)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"softmax_type": "off-by-one"}, "softmax_type: off-by-one"),
        ({"softmax_type": "vanilla"}, "attention.has_sinks: False"),
        ({"glu_linear_offset": 0.0}, "feed_forward.up_offset: 0"),
        ({"activation_func_clamp_value": None}, "feed_forward.clamp: 0"),
        ({"quick_geglu": False, "swiglu": False}, "feed_forward.is_gated: False"),
        ({"add_bias_linear": False}, "mixture.has_bias: False"),
        ({"moe_router_pre_softmax": True}, "mixture.is_normalised: False"),
        ({"moe_layer_freq": 2}, "layers.blocks"),
        ({"qk_layernorm": True}, "attention.qk_norm: head"),
        ({"enable_gpt_oss": True}, "enable_gpt_oss: True"),
    ],
)
def test_what_gpt_oss_has_not_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    from models.architectures.gpt_oss import GPT_OSS

    config = in_nemo_words(megatron_lm(saved("gpt_oss").config, **changes))
    found = problems_of(config) or GPT_OSS.lacks(read_dims(config, 128))
    assert any(line.startswith(words) for line in found), found


def test_the_drop_in_engine_computes_its_gates_in_experts_alone() -> None:
    decoder: Any = read_dims(in_nemo_words(megatron_lm(saved("gpt_oss").config)), 128)
    assert beyond_engine(decoder) == []
    first = replace(decoder.layers[0], blocks=("attention", "feed_forward"))
    for other in (
        replace(decoder, layers=(first, *decoder.layers[1:])),
        replace(decoder, mixture=replace(decoder.mixture, shared_inter_size=8)),
    ):
        assert beyond_engine(other) == ["a clamped gate  (experts alone have an offset and a clamp)"]


@pytest.mark.parametrize("splits_gates", [True, False])
def test_megatron_fsdps_experts_are_read_unless_ranks_have_cut_gate_and_up_together(
    splits_gates: bool, tmp_path: Path
) -> None:
    source = saved("gpt_oss")

    def run(name: str, **changes: int) -> Path:
        arguments = megatron_lm(source.config, **changes)
        write_fsdp(write_megatron_lm_tree(tmp_path / name), state_of(source), 2, arguments, splits_gates)
        return tmp_path / name

    made = tensors(to_huggingface(run("alone"), tmp_path / "hf", "fp32"))
    assert made.keys() == source.tensors.keys()
    assert all(torch.equal(made[name], value) for name, value in source.tensors.items())
    if not splits_gates:
        with pytest.raises(CheckpointError, match="in the order of the ranks"):
            to_huggingface(run("cut", expert_tensor_parallel_size=2), tmp_path / "refused", "fp32")


@pytest.mark.parametrize("form", ["", ", gate and up apart"])
def test_an_adapter_of_experts_is_added_to_the_arrays(form: str, tmp_path: Path) -> None:
    """Of Megatron-Bridge; PEFT has no linear layers there to say it of."""
    source = saved("gpt_oss")
    added = products()
    model = write_source(Case("gpt_oss", f"Megatron-LM, torch_dist{form}", 2), tmp_path / "model")
    adapter = write_expert_adapter(tmp_path / "adapter", "gpt_oss", APART, 1, added)
    wish: dict[str, Any] = {"weight_data_type": "fp32", "adapter": adapter}
    convert(ConvertArguments(model, tmp_path / "out", **wish, format="huggingface"))
    made = tensors(tmp_path / "out")
    assert all(torch.equal(made[name], value) for name, value in source.tensors.items() if ".experts." not in name)
    for key, (down, up) in added.items():
        place, number, role = key.removesuffix(".weight").rsplit(".", 2)
        name, halves = {
            "gate_proj": ("gate_up_proj", np.s_[:, 0::2]),
            "up_proj": ("gate_up_proj", np.s_[:, 1::2]),
            "down_proj": ("down_proj", np.s_[:]),
        }[role]
        wanted = source.tensors[f"{place}.{name}"][int(number)][halves] + ALPHA / RANK * (up @ down).T
        assert (made[f"{place}.{name}"][int(number)][halves] - wanted).abs().max() < 1e-6, key
    with pytest.raises(CheckpointError, match="is computed into transformers' weights"):
        convert(ConvertArguments(model, tmp_path / "peft", **wish, format="peft"))


def products() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """linear_in and linear_out of each expert, under the names that a model with experts apart has; each is square."""
    draw = torch.Generator().manual_seed(7)
    made = {}
    for place in (f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(LAYERS) for expert in range(EXPERTS)):
        shared = torch.randn((RANK, HIDDEN), generator=draw) / 8
        for role in ("gate_proj", "up_proj", "down_proj"):
            down = torch.randn((RANK, HIDDEN), generator=draw) / 8 if role == "down_proj" else shared
            made[f"{place}.{role}.weight"] = (down, torch.randn((HIDDEN, RANK), generator=draw) / 8)
    return made
