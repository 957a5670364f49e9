"""The engine over FP8 whose activations have scales in the files, beside the library whose format that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from support.engines.hub_served import check_served, opened
from support.engines.network_runs import load_for_kernels, prefill_logits, some_ids
from support.tiny_models.quantized_models import MIXTURE, STATIC, save_static
from support.tiny_models.statically import model_of
from torch import Tensor

from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.ops.fp8 import round_statically

ROUNDED = QuantizationArgs(num_bits=8, type="float", symmetric=True, dynamic=False, strategy="tensor")


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    found: Tensor = fake_quantize(x, scale, torch.zeros_like(scale), ROUNDED)
    return found


def test_a_group_that_does_not_say_whether_inputs_are_dynamic_has_scales() -> None:
    left_out = QuantizationArgs(num_bits=8, type="float")
    assert left_out.dynamic is False and left_out.strategy == "tensor"


def test_the_library_computes_what_the_engine_does(tmp_path: Path) -> None:
    """transformers runs the directory with the library's hooks, but for those that round keys and values.

    A cache of the engine's that is FP8 has scales of its own.
    """
    save_static(tmp_path, "compressed-tensors")
    given: Any = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **given).eval()
    rounds = [module for module in model.modules() if getattr(module, "input_scale", None) is not None]
    assert len(rounds) == 27
    for module in model.modules():
        module.quantization_enabled = not hasattr(module, "k_scale")
    engine, ids = opened(tmp_path), some_ids(2, 9)
    check_served(engine, model)
    engine.close()
    config = read_config(tmp_path, "Llama")
    found = prefill_logits(Network(config, load_for_kernels(tmp_path, config)), ids)
    with torch.no_grad():
        expected = model(ids).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(("method", "name"), [("modelopt", "qwen3"), ("fp8", MIXTURE)])
def test_other_methods_round_as_the_library_does(method: str, name: str, tmp_path: Path) -> None:
    state = save_static(tmp_path, method, name)
    engine = opened(tmp_path)
    check_served(engine, model_of(tmp_path, state, STATIC[method], rounded))
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_number_becomes_the_librarys(dtype: torch.dtype) -> None:
    """Those between two numbers of FP8, too large and too small ones among them; all in fp32, as scales are."""
    steps = torch.arange(-480, 480, 0.25)
    x = (torch.cat((steps, steps / 256, steps / 2**15)) * 0.013).to(dtype)
    scale = torch.tensor(0.013)
    assert torch.equal(round_statically(x, scale), rounded(x.float(), scale).to(dtype))
