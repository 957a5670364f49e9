"""Made-up models in Hugging Face's form, and defects in their files: experts, latent attention, sinks, states, angles.

Each model has transformers' own class and the weights that ``benchmarks.parity.models`` calls sharpened. A defect is
planted in a copy of the directory, in the tensors of the layer in the middle or in ``config.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.parity.models import LOGIT_SPREAD, SHARPNESS

VOCAB, LAYERS, MIDDLE, LONGEST = 2000, 6, 3, 512
_WIDTH, HEADS = 256, 8
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1}
_LATENT = {"q_lora_rank": 64, "kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
_GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": HEADS}
# Falcon-H1's factors make Mamba's part of a layer small, next to attention's.
_LOUD = {"ssm_in_multiplier": 8.0, "ssm_out_multiplier": 5.0, "ssm_multipliers": [1.3, 2.5, 1.8, 1.5, 1.1]}
_MAMBA = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
Files = dict[str, Tensor]


def change_tensors(pattern: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """Replace the tensors of the layer in the middle, or of the model, whose names end so."""

    def damage(directory: Path) -> None:
        def all_of(files: Files) -> None:
            names = [name for name in files if re.search(rf"(layers\.{MIDDLE}\.|^)[^0-9]*{pattern}$", name)]
            assert names, f"no tensor is {pattern}"
            for name in names:
                files[name] = change(files[name].float()).to(files[name].dtype).contiguous()

        rewrite(directory, all_of)

    return damage


def swap_tensors(first: str, second: str) -> Callable[[Path], None]:
    """Let tensors of the layer in the middle change places: those whose names hold one word, or the other."""

    def damage(directory: Path) -> None:
        def all_of(files: Files) -> None:
            names = [name for name in files if f".{MIDDLE}." in name and first in name]
            assert names, f"no tensor is {first}"
            for name in names:
                other = name.replace(first, second)
                files[name], files[other] = files[other], files[name]

        rewrite(directory, all_of)

    return damage


def configure(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change ``config.json``."""

    def damage(directory: Path) -> None:
        file = directory / "config.json"
        said = json.loads(file.read_text())
        change(said)
        file.write_text(json.dumps(said))

    return damage


def rewrite(directory: Path, change: Callable[[Files], None]) -> None:
    """Change the tensors of a directory."""
    (file,) = directory.glob("*.safetensors")
    files = load_file(file)
    change(files)
    save_file(files, file, {"format": "pt"})


def _without_scaling(said: dict[str, Any]) -> None:
    said["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}


def halves(x: Tensor) -> Tensor:
    """Let the halves of a tensor's rows change places."""
    return x.roll(len(x) // 2, 0)


@dataclass(frozen=True)
class HubModel:
    """A model, and what is done to it.

    Attributes:
        architecture: prefix of transformers' classes.
        values: of its configuration beyond the usual sizes.
        defects: by name.
    """

    architecture: str
    values: dict[str, Any]
    defects: dict[str, Callable[[Path], None]] = field(default_factory=dict)

    @torch.no_grad()
    def save(self, directory: Path, seed: int = 0) -> None:
        """Make the weights and write the directory."""
        import transformers

        torch.manual_seed(seed)
        config = getattr(transformers, f"{self.architecture}Config")(**{**_SIZES, **self.values})
        model = getattr(transformers, f"{self.architecture.removesuffix('Text')}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0, 1)
            if parameter.dim() < 2 or "conv1d" in name:
                continue
            inputs = parameter.shape[1] if parameter.dim() == 3 and "gpt" in config.model_type else parameter.shape[-1]
            parameter.normal_(0, inputs**-0.5)
            if re.search(r"\.(q|k|q_b)_proj\.", name):
                parameter *= SHARPNESS**0.5
            if re.search(r"(o_proj|down_proj|out_proj)", name):
                parameter *= (2 * LAYERS) ** -0.5
        model.get_output_embeddings().weight *= LOGIT_SPREAD
        model.save_pretrained(directory)


COMMON = {
    "input norm x 1.02": change_tensors(r"input_layernorm\.weight", lambda x: 1.02 * x),
    "o_proj: two heads' columns swapped": change_tensors(
        r"self_attn\.o_proj\.weight", lambda x: x.view(len(x), HEADS, -1)[:, [1, 0, *range(2, HEADS)]].flatten(1)
    ),
}
MODELS: dict[str, HubModel] = {
    "experts and latent attention": HubModel(
        "DeepseekV3",
        {**_EXPERTS, **_LATENT, **_GROUPS},
        {
            **COMMON,
            "two experts swapped": swap_tensors("experts.0.", "experts.1."),
            "an expert zeroed": change_tensors(r"experts\.5\.down_proj\.weight", lambda x: 0 * x),
            "gate and up of an expert swapped": swap_tensors("experts.2.gate_proj", "experts.2.up_proj"),
            "router: rows in another order": change_tensors(r"mlp\.gate\.weight", lambda x: x.roll(1, 0)),
            "router x 1.10": change_tensors(r"mlp\.gate\.weight", lambda x: 1.1 * x),
            "shared expert dropped": change_tensors(r"shared_experts\.down_proj\.weight", lambda x: 0 * x),
            "latent norm x 1.02": change_tensors(r"kv_a_layernorm\.weight", lambda x: 1.02 * x),
            "kv_b_proj: halves swapped": change_tensors(r"kv_b_proj\.weight", halves),
            "routed scaling 2 in place of 2.5": configure(lambda said: said.update(routed_scaling_factor=2.0)),
        },
    ),
    "sinks": HubModel(
        "GptOss",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 32},
        {
            **COMMON,
            "sinks zeroed": change_tensors("sinks", lambda x: 0 * x),
            "sinks in another order": change_tensors("sinks", lambda x: x.roll(1, 0)),
            "experts in another order": change_tensors("experts.gate_up_proj", lambda x: x.roll(1, 0)),
            "window 64 in place of 32": configure(lambda said: said.update(sliding_window=64)),
        },
    ),
    "states": HubModel(
        "FalconH1",
        {**_MAMBA, **_LOUD, "head_dim": 32},
        {
            **{name: damage for name, damage in COMMON.items() if "o_proj" in name},
            "A_log + 0.1": change_tensors("A_log", lambda x: x + 0.1),
            "D zeroed": change_tensors(r"mamba\.D", lambda x: 0 * x),
            "dt_bias zeroed": change_tensors("dt_bias", lambda x: 0 * x),
            "conv1d reversed": change_tensors(r"conv1d\.weight", lambda x: x.flip(-1)),
        },
    ),
    "angles": HubModel(
        "Llama",
        {"rope_parameters": _ROPE},
        {
            **COMMON,
            "rope scaling ignored": configure(_without_scaling),
            "rope theta 10% off": configure(lambda said: said["rope_parameters"].update(rope_theta=11000.0)),
            "rms_norm_eps 1e-5 in place of 1e-6": configure(lambda said: said.update(rms_norm_eps=1e-5)),
            "adapter not applied": change_tensors(
                r"(q|v)_proj\.weight",
                lambda x: x - 0.02 * torch.outer(torch.ones(len(x)), torch.ones(x.shape[1])) / x.shape[1] ** 0.5,
            ),
        },
    ),
}
