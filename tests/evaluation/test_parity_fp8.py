"""Parity of models whose matrices are FP8: made when they are loaded, or written so by a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.measurements.parity_runs import limits, run, serve
from support.tiny_models.dequantized import dequantized, tensors
from support.tiny_models.llama_hub_models import MIXTRAL, build_llama, save_llama
from support.tiny_models.quantized_models import save_static

from backends.fastertransformer.engine.model.hub_reader import HubReader
from backends.fastertransformer.engine.ops import fp8, linear
from evaluation.parity.arguments import FP8_ACTIVATIONS, LEAST_PASSAGES
from evaluation.parity.formats import Formats, round_to_fp8
from evaluation.tasks.metric import FAILS, HOLDS
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from ft_format.weight_format import FP8_FORMATS, find_format

UNBOUNDED = limits(99.0, 99.0, 0.0, 99.0)  # of prompts: passages alone decide


def written(source: Path, quantization: str) -> Path:
    directory = source.parent / quantization
    given: Any = {"format": "huggingface", "quantization": quantization}
    convert(ConvertArguments(source, directory, weight_data_type="bf16", **given))
    return directory


@pytest.mark.parametrize("quantization", [each.name for each in FP8_FORMATS])
def test_the_source_becomes_what_a_conversion_writes(quantization: str, tmp_path: Path) -> None:
    """Its experts too, which transformers has in one tensor; routers, embedding and head stay."""
    build_llama("Mixtral", hidden_size=160, num_hidden_layers=1, head_dim=20, **MIXTRAL[1]).to(
        torch.bfloat16
    ).save_pretrained(tmp_path / "source")
    found = tensors(written(tmp_path / "source", quantization))
    ends = ("_scale", "_scale_inv")
    means = {
        name: dequantized(found, name) if any(name + end in found for end in ends) else each.float()
        for name, each in found.items()
        if not name.endswith(ends)
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    round_to_fp8(model, Formats("bf16", "bf16", find_format(0, quantization)))
    model.save_pretrained(tmp_path / "ours")
    ours = tensors(tmp_path / "ours")
    assert ours.keys() == means.keys() and any("experts.1." in name for name in means)
    for name, each in means.items():
        torch.testing.assert_close(ours[name], each, rtol=1e-6, atol=0, msg=name)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fp8") / "source"
    save_llama("llama", directory, torch.bfloat16)
    return directory


def look(
    source: Path, directory: Path, served: Path, how: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    with serve(served, "Llama", data_type="bf16", **settings) as fake:
        return run(fake, source, directory, limits=UNBOUNDED, **(how or {}))


@pytest.mark.in_ci(when=lambda at: at.quantization == "fp8")
@pytest.mark.parametrize("quantization", [each.name for each in FP8_FORMATS])
def test_a_sound_model_holds_and_one_whose_scales_are_others_fails(
    quantization: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, form = (source, quantization) if quantization == "fp8" else (written(source, quantization), None)
    sound = look(source, tmp_path, served, quantization=form)
    assert sound["verdict"] == HOLDS and sound["source"]["precision"] == quantization, sound["reasons"]
    made = fp8.quantized

    def wrongly(*given: Any) -> Any:
        numbers, grid = made(*given)
        return numbers, 1.05 * grid

    monkeypatch.setattr(f"{HubReader.__module__}.quantized", wrongly)
    found = look(source, tmp_path, source, quantization=quantization)
    assert found["verdict"] == FAILS, found


@pytest.mark.parametrize(
    ("settings", "place"),
    [({"quantization": "fp8"}, f"{HubReader.__module__}.quantized"), ({"int8_mode": 1}, f"{linear.__name__}.quantize")],
)
def test_a_router_that_a_rounding_turns_is_no_damage_and_other_scales_are(
    settings: dict[str, Any], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near ties of routers fall the other way: the source is far from such tokens, the source rounded alike is not."""
    model = build_llama("Mixtral", num_local_experts=8, num_experts_per_tok=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(8 if "experts" in name else 1)
    source = tmp_path / "source"
    model.to(torch.float16).save_pretrained(source)

    def compared() -> dict[str, Any]:
        with serve(source, "Llama", data_type="fp16", **settings) as fake:
            how = {"limits": limits(1.0, 99.0, 0.0, 99.0), "max_passages": LEAST_PASSAGES}
            return run(fake, source, tmp_path, passages=LEAST_PASSAGES, **how)

    sound = compared()
    assert sound["verdict"] != FAILS, sound["reasons"]
    assert sound["max_log_prob_difference"] > 1 > 100 * sound["rounded_max_log_prob_difference"]
    made = fp8.quantized if "quantization" in settings else linear.quantize

    def wrongly(*given: Any) -> Any:
        numbers, scales = made(*given)
        return numbers, scales.roll(1, 0)

    monkeypatch.setattr(place, wrongly)
    found = compared()
    assert found["verdict"] == FAILS and found["rounded_max_log_prob_difference"] > 1, found


def test_scales_of_activations_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the source's own; a server that takes others is not."""
    save_static(tmp_path / "source", "fp8", "llama")
    given, how = (tmp_path / "source", tmp_path, tmp_path / "source"), {"scale_error": 0.2, "passages": 16}
    sound = look(*given, how)
    assert sound["verdict"] == HOLDS and sound["source"]["precision"] == FP8_ACTIVATIONS, sound["reasons"]
    monkeypatch.setattr(fp8, "round_statically", lambda x, scale, rounds=fp8.round_statically: rounds(x, 1.5 * scale))
    found = look(*given, how)
    assert found["verdict"] == FAILS, found


def test_experts_that_are_int8_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_llama("Mixtral", num_hidden_layers=2, **MIXTRAL[1]).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    given, how = (tmp_path / "source", tmp_path, tmp_path / "source"), {"scale_error": 0.1, "passages": 16}
    sound = look(*given, how, int8_mode=1)
    assert sound["verdict"] == HOLDS and sound["source"]["precision"] == "int8", sound["reasons"]
    made = linear.quantize
    monkeypatch.setattr(linear, "quantize", lambda weight: (made(weight)[0], 1.05 * made(weight)[1]))
    assert look(*given, how, int8_mode=1)["verdict"] == FAILS
