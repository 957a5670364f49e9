"""The text model of checkpoints that see images as well, against the whole model of transformers on texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models.huggingface_models import filling
from support.tiny_models.quantized_models import deepseeks, to_fp8

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.checkpoints.formats import open_source
from export_scripts.convert import convert
from handover.errors import CheckpointError

_SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None}
_MROPE = {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [2, 1, 1]}
_TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
_QWEN2_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
_QWEN3_VISION = {**_QWEN2_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIGLIP |= {"image_size": 28, "patch_size": 14, "vision_use_head": False, "model_type": "siglip_vision_model"}
_GEMMA: dict[str, Any] = {"head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_QWEN35_VISION = {**_QWEN2_VISION, "num_position_embeddings": 16}
_DELTA = {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5}, "head_dim": 16, "full_attention_interval": 2}
_DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 4}
_LLAMA4 = {"head_dim": 8, "intermediate_size_mlp": 40, "num_local_experts": 4, "interleave_moe_layer_step": 2}
_LLAMA4 |= {"attention_chunk_size": 5, "floor_scale": 3, "no_rope_layer_interval": 2}
_LLAMA4_VISION = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_LLAMA4_VISION |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 16}
_LLAMA4_VISION |= {"projector_input_dim": 16, "projector_output_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", {"rope_parameters": _MROPE}, _QWEN2_VISION, _TOKENS),
    "qwen3_vl": ("Qwen3VL", {"rope_parameters": _MROPE, "head_dim": 8}, _QWEN3_VISION, _TOKENS),
    "qwen3_vl_moe": ("Qwen3VLMoe", {"rope_parameters": _MROPE, "head_dim": 8, **_EXPERTS}, _QWEN3_VISION, _TOKENS),
    "qwen3_5": ("Qwen3_5", _DELTA, _QWEN35_VISION, _TOKENS),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 12},
        _QWEN35_VISION,
        _TOKENS,
    ),
    "llama4": ("Llama4", _LLAMA4, _LLAMA4_VISION, {"image_token_index": 90}),
    "gemma3": ("Gemma3", _GEMMA, _SIGLIP, {"image_token_index": 90, "mm_tokens_per_image": 4}),
}
_OLDER = {
    "qwen2_5_vl": (("model.language_model.", "model."), ("model.visual.", "visual.")),
    "gemma3": (("model.language_model.", "language_model.model."), ("model.vision_tower.", "vision_tower.")),
}
"""What version 4 called the tensors."""
CLASSES = {"qwen2_5_vl": "Qwen2ForCausalLM", "qwen3_vl": "Qwen3ForCausalLM", "gemma3": "Gemma3ForCausalLM"}
CLASSES |= {"qwen3_vl_moe": "Qwen3MoeForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM"}
CLASSES |= {"qwen3_5_moe": "Qwen3_5MoeForCausalLM", "llama4": "Llama4ForCausalLM"}
IDS = torch.arange(3, 21).reshape(2, 9)


def save(name: str, folder: Path, **changes: Any) -> torch.Tensor:
    """Save a tiny model that sees images, and return its logits of two texts."""
    import transformers

    kind, text, vision, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        text_config={**_SIZES, **text, **changes}, vision_config=vision, **more
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(filling(key, tuple(parameter.shape))))
        model.save_pretrained(folder)
        more = {"token_type_ids": torch.zeros_like(IDS)} if name == "gemma3" else {}
        result: torch.Tensor = model(input_ids=IDS, **more).logits
    return result


@pytest.mark.parametrize("form", ["as saved", "older names"])
@pytest.mark.parametrize("name", MODELS)
def test_the_text_model_computes_what_the_whole_computes_of_texts(name: str, form: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    wanted = save(name, tmp_path / "source")
    if form == "older names":
        rename(tmp_path / "source", _OLDER.get(name, ()))
        if name == "qwen3_5_moe":
            gather(tmp_path / "source")
    convert(ConvertArguments(tmp_path / "source", tmp_path / "hf", weight_data_type="fp32", format="huggingface"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    assert type(model).__name__ == CLASSES[name]
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, wanted, rtol=0, atol=1e-5)


def rename(folder: Path, names: tuple[tuple[str, str], ...]) -> None:
    """Call tensors as version 4 did, and put the text's keys of Qwen2.5's into the whole's, as its files have them."""
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(file)
    for new, old in names:
        tensors = {old + key.removeprefix(new) if key.startswith(new) else key: each for key, each in tensors.items()}
    save_file(tensors, file)
    said = json.loads(config.read_text())
    if said["model_type"] == "qwen2_5_vl":
        text = said.pop("text_config")
        rope = text.pop("rope_parameters")
        mrope = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        said = {**text, **said, "rope_theta": rope["rope_theta"], "rope_scaling": mrope}
    config.write_text(json.dumps(said))


def gather(folder: Path) -> None:
    """Hold the experts of each layer in two arrays, gate above up, as the hub's files of Qwen3.5 do."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for base in {key.partition("experts.0.")[0] for key in tensors if "experts.0." in key}:
        names = [[f"{base}experts.{n}.{part}_proj.weight" for part in ("gate", "up", "down")] for n in range(4)]
        gate, up, down = (torch.stack([tensors.pop(name) for name in each]) for each in zip(*names, strict=True))
        tensors |= {f"{base}experts.gate_up_proj": torch.cat([gate, up], 1), f"{base}experts.down_proj": down}
    save_file(tensors, file)


def test_what_is_left_out_is_said_and_what_is_not_known_is_refused(tmp_path: Path) -> None:
    save("gemma3", tmp_path)
    said = [
        each for each in open_source(open_archive(tmp_path), for_shards=False).remarks if "text model alone" in each
    ]
    assert len(said) == 1 and "of multi_modal_projector" in said[0] and "of vision_tower" in said[0]
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.hearing.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"hearing\.weight"):
        convert(ConvertArguments(tmp_path, tmp_path / "hf", weight_data_type="fp32", format="huggingface"))


@pytest.mark.parametrize("place", ["the whole's", "the text's", "both's, and they differ"])
def test_fp8_is_read_wherever_the_configuration_says_it(place: str, tmp_path: Path) -> None:
    save("qwen3_vl", tmp_path / "source")
    file, config = tmp_path / "source/model.safetensors", tmp_path / "source/config.json"
    state, wanted, about = load_file(file), dict[str, torch.Tensor](), json.loads(config.read_text())
    for key in [key for key in state if ".layers." in key and "_proj.weight" in key and "visual" not in key]:
        state[key], state[f"{key}_scale_inv"] = numbers, scales = to_fp8(state[key].float(), 16, 16)
        spread = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
        wanted[key.replace("language_model.", "")] = numbers.float() * spread
    save_file(state, file)
    if place != "the text's":
        about["quantization_config"] = deepseeks([16, 16])
    if place != "the whole's":
        about["text_config"]["quantization_config"] = deepseeks([16, 32] if "differ" in place else [16, 16])
    config.write_text(json.dumps(about))
    arguments = ConvertArguments(tmp_path / "source", tmp_path / "hf", weight_data_type="fp32", format="huggingface")
    if "differ" in place:
        with pytest.raises(CheckpointError, match=r"text_config\.quantization_config of config\.json differ"):
            convert(arguments)
        return
    convert(arguments)
    made = load_file(tmp_path / "hf/model.safetensors")
    assert len(wanted) == 14 and not [key for key, value in wanted.items() if not torch.equal(made[key], value)]
    assert "quantization_config" not in (tmp_path / "hf/config.json").read_text()


def test_experts_that_may_lie_either_way_are_refused(tmp_path: Path) -> None:
    save("qwen3_vl_moe", tmp_path, moe_intermediate_size=16)  # two gates are as wide as the model
    with pytest.raises(CheckpointError, match="whether an expert's rows are outputs or inputs cannot be told"):
        open_source(open_archive(tmp_path), for_shards=False)
