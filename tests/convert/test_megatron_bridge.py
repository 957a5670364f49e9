"""Megatron-Bridge's directories: torch's own distributed files with run_config.yaml, as its sources write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.checkpoints.llama_configs import architecture, core_window, nemo2, padded_vocabulary
from support.checkpoints.llama_files import chunked, write_huggingface_tokenizer, write_torch_dist
from support.checkpoints.llama_state import core_state as core_state_of
from support.checkpoints.megatron_core import core_forward, core_state
from support.checkpoints.nemo_archive import HEADS, HIDDEN, INTER, LAYERS, POSITIONS, TOKENIZER, VOCAB
from support.shards.reference_forward import forward
from support.tiny_models.llama_models import build, input_ids, saved

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.nemo.rotations import read_rotaries
from export_scripts.checkpoints.tokenizers import vocabularies
from export_scripts.checkpoints.user_files import GivenFiles
from export_scripts.convert import convert
from export_scripts.inspect import main as inspect
from handover.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
INPUT_IDS = np.arange(2 * POSITIONS).reshape(2, POSITIONS) % VOCAB
GELU = {"_target_": "torch._C._nn.gelu", "_call_": False}
TRANSFORMER = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": INTER,
    "num_attention_heads": HEADS,
    "num_query_groups": None,
    "kv_channels": HIDDEN // HEADS,
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "gated_linear_unit": False,
    "activation_func": GELU,
    "bias_activation_fusion": True,
    "num_moe_experts": None,
    "qk_layernorm": False,
    "window_size": None,
    "tensor_model_parallel_size": 2,
    "params_dtype": {"_target_": "torch.bfloat16", "_call_": False},
    "attention_backend": {"_target_": "megatron.core.transformer.enums.AttnBackend", "_call_": True, "_args_": [5]},
    "timers": {"_target_": "megatron.core.timers.Timers", "_call_": True},
}
GPT = {
    "seq_length": POSITIONS,
    "position_embedding_type": "learned_absolute",
    "share_embeddings_and_output_weights": True,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "seq_len_interpolation_factor": None,
    "make_vocab_size_divisible_by": 128,
    "should_pad_vocab": False,
    "vocab_size": VOCAB,
    "transformer_layer_spec": {"_target_": "megatron.bridge.models.gpt_provider.default_layer_spec", "_call_": False},
}
PROVIDER = {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", **TRANSFORMER, **GPT}


def builder(**changes: Any) -> dict[str, Any]:
    """The newer form: the transformer's fields in a section, the activation's name beside it."""
    transformer = {key: value for key, value in {**TRANSFORMER, **changes}.items() if key != "activation_func"}
    metadata = {"megatron_bridge.activation_func": "gelu", "hf_model_id": "openai-community/gpt2"}
    name = "megatron.bridge.models.gpt.model_config.BridgeGPTModelConfig"
    return {"_target_": name, "transformer": transformer, "extra_checkpoint_metadata": metadata, **GPT}


def write(root: Path, state: dict[str, torch.Tensor], model: dict[str, Any] | None, ranks: int = 1, **run: Any) -> Path:
    """Write one iteration: what ``save_checkpoint`` leaves, without the optimizer."""
    folder = root / "iter_0000007"
    folder.mkdir(parents=True)
    plain = {key.removeprefix("model."): value for key, value in state.items()}
    common = {"iteration": 7, "checkpoint_version": 3.0, "content_metadata": {}}
    write_torch_dist(folder, chunked(plain, ranks, True, False), prefix="", common=common)
    tokenizer = {"_target_": "megatron.bridge.training.tokenizers.config.TokenizerConfig"}
    config = {"model": model, "tokenizer": {**tokenizer, "tokenizer_type": "GPT2BPETokenizer"}, "peft": None, **run}
    (folder / "run_config.yaml").write_text(yaml.safe_dump(config))
    torch.save({"step": torch.tensor(7, dtype=torch.int32)}, folder / "train_state.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    (folder / "tokenizer").mkdir()
    for name, content in TOKENIZER.items():
        (folder / "tokenizer" / name).write_bytes(content)
    return folder


def logits(source: Path, output: Path) -> np.ndarray:
    convert(ConvertArguments(source, output, 2, "fp32"))
    return forward(output, INPUT_IDS)


@pytest.mark.parametrize("form", ["provider", "builder"])
@pytest.mark.parametrize(("ranks", "groups"), [(1, HEADS), (2, HEADS), (2, 2)])
def test_logits_are_megatron_cores(form: str, ranks: int, groups: int, tmp_path: Path) -> None:
    state, changes = core_state(groups), {"num_query_groups": groups}
    folder = write(
        tmp_path / "run", state, {**PROVIDER, **changes} if form == "provider" else builder(**changes), ranks
    )
    wanted = core_forward(state, INPUT_IDS, groups, 0)
    assert np.abs(logits(tmp_path / "run", tmp_path / "out") - wanted).max() < 1e-4
    assert np.abs(logits(folder, tmp_path / "one") - wanted).max() < 1e-4, "the iteration's own directory"


LLAMAS = {
    "llama": "llama.llama_provider.LlamaModelProvider",
    "llama31": "llama.llama_provider.Llama31ModelProvider",
    "mistral": "mistral.mistral_provider.MistralModelProvider",
    "nemotron": "nemotron.nemotron_provider.NemotronModelProvider",
    "qwen2": "qwen.qwen_provider.Qwen2ModelProvider",
    "qwen3": "qwen.qwen_provider.Qwen3ModelProvider",
    "gemma": "gemma.gemma_provider.GemmaModelProvider",
    "gemma2": "gemma.gemma2_provider.Gemma2ModelProvider",
}


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_and_its_relatives(name: str, tmp_path: Path) -> None:
    source = saved(name)
    model = {**nemo2(source.config, name)["config"], "_target_": f"megatron.bridge.models.{LLAMAS[name]}"}
    model["window_size"] = core_window(source.config)
    if name == "llama31":  # the newer words
        model |= {"rope_scaling": True, "rope_scaling_factor": model.pop("scale_factor")}
    check_becomes_transformers_own(name, model, tmp_path)


def check_becomes_transformers_own(
    name: str, model: dict[str, Any], folder: Path, prefix: str = "", more: dict[str, torch.Tensor] | None = None
) -> None:
    from transformers import AutoModelForCausalLM

    source = saved(name)
    state = core_state_of(source.tensors, source.config, padded_vocabulary(source.config, 2))
    write(folder / "run", {**{prefix + key: value for key, value in state.items()}, **(more or {})}, model, 2)
    convert(ConvertArguments(folder / "run", folder / "hf", weight_data_type="fp32", format="huggingface"))
    made = AutoModelForCausalLM.from_pretrained(folder / "hf", attn_implementation="eager").eval()
    assert type(made.config) is type(source.config)
    rows = made.config.vocab_size  # the tokenizer's
    ids = torch.from_numpy(input_ids() % rows)
    with torch.no_grad():
        found, wanted = (each(ids).logits[..., :rows] for each in (made, build(name)))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


_SPECS = {"_target_": "megatron.bridge.models.exaone.exaone4.exaone4_provider.exaone4_layer_spec", "_call_": False}
_YARN = {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
NEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma.gemma3_provider.Gemma3ModelProvider",
        {
            "rotary_base": [700.0, 1e5],
            "rope_scaling_factor": 8.0,
            "interleaved_attn_pattern": [1, 1],
            "window_size": 5,
            "softmax_scale": 24**-0.5,
        },
    ),
    "exaone4": (
        "gpt_provider.GPTModelProvider",
        {"rotary_base": 1e6, "window_attn_skip_freq": 2, "no_rope_freq": 2, "transformer_layer_spec": _SPECS},
    ),
    "exaone4_full": ("gpt_provider.GPTModelProvider", {"rotary_base": 1e6, "transformer_layer_spec": _SPECS}),
    "smollm3": (
        "gpt_provider.GPTModelProvider",
        {"rotary_base": 2e6, "no_rope_freq": [0, 1], "window_attn_skip_freq": [0, 1]},
    ),
    "gpt_oss": ("gpt_oss.gpt_oss_provider.GPTOSSProvider", {"position_embedding_type": "yarn"}),
    "llama_yarn": (
        "llama.llama_provider.LlamaModelProvider",
        {
            "position_embedding_type": "yarn",
            **{f"yarn_{key}": value for key, value in _YARN.items()},
            **{"yarn_mscale": None, "yarn_mscale_all_dim": None, "yarn_correction_range_round_to_int": True},
        },
    ),
}


@pytest.mark.parametrize("name", NEWER)
def test_models_without_shards_become_transformers_own(name: str, tmp_path: Path) -> None:
    """By the fields of megatron-core and of Megatron-Bridge's providers, written here from their sources."""
    config, (target, changes) = saved(name).config, NEWER[name]
    model = architecture(config) | {"position_embedding_type": "rope", "rotary_percent": 1.0}
    model |= {"share_embeddings_and_output_weights": config.tie_word_embeddings, "seq_length": 64}
    model |= {"window_size": core_window(config), "_target_": f"megatron.bridge.models.{target}", **changes}
    check_becomes_transformers_own(name, model, tmp_path)


IMAGES = {
    "qwen3": ("qwen_vl.qwen3_vl_provider.Qwen3VLModelProvider", "vision_model.patch_embed.proj.weight"),
    "qwen3_moe_alike": ("qwen_vl.qwen3_vl_provider.Qwen3VLMoEModelProvider", "vision_model.patch_embed.proj.weight"),
    "qwen2": ("qwen_vl.qwen25_vl_provider.Qwen25VLModelProvider", "visual.blocks.0.norm1.weight"),
    "gemma3": ("gemma_vl.gemma3_vl_provider.Gemma3VLModelProvider", "multi_modal_projector.proj.weight"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_of_a_model_that_sees_images_the_text_model_is_converted_and_that_is_said(name: str, tmp_path: Path) -> None:
    source, (target, image) = saved(name), IMAGES[name]
    model = architecture(source.config) | {"seq_length": 64, "_target_": f"megatron.bridge.models.{target}"}
    model |= {"share_embeddings_and_output_weights": source.config.tie_word_embeddings, "rotary_percent": 1.0}
    model |= {"vision_config": {"depth": 3}, "image_token_id": 3, "mrope_section": [2, 1, 1]}
    if name == "gemma3":
        model |= {"position_embedding_type": "rope", "is_vision_language": True, **NEWER[name][1]}
    else:
        model |= {"position_embedding_type": "mrope", "rotary_base": 1e6, "window_size": None}
    check_becomes_transformers_own(name, model, tmp_path, prefix="language_model.", more={image: torch.zeros(4)})
    said = [each for each in open_source(find_archive(tmp_path / "run"), for_shards=False).remarks if "images" in each]
    assert len(said) == 1 and image.partition(".")[0] in said[0]
    assert not [
        each for each in open_source(find_archive(tmp_path / "run"), for_shards=False).remarks if "known" in each
    ]
    plain = {**model, "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider"}
    with pytest.raises(CheckpointError):
        check_becomes_transformers_own(name, plain, tmp_path / "plain", "language_model.", {image: torch.zeros(4)})


def test_yarns_factor_is_megatron_cores_where_one_mscale_is_zero() -> None:
    """``_yarn_get_concentration_factor``: transformers passes over a pair of which one is 0."""
    from math import log

    words = {"position_embedding_type": "yarn", **{f"yarn_{key}": value for key, value in _YARN.items()}}
    for mscale, whole, wanted in ((1.0, 0.0, 0.1 * log(4) + 1), (0.5, 0.0, 0.05 * log(4) + 1), (0.0, 1.0, None)):
        (rotary,) = read_rotaries({**words, "yarn_mscale": mscale, "yarn_mscale_all_dim": whole}, 8, (0,))
        assert rotary
        assert rotary.attention_factor(64) == pytest.approx(wanted or 1 / (0.1 * log(4) + 1))


def written(folder: Path, name: str, target: str, **changes: Any) -> tuple[Path, Any]:
    """A run of one of transformers' models, and that model."""
    source = saved(name)
    model = {**nemo2(source.config, name)["config"], "window_size": core_window(source.config), "_target_": target}
    state = core_state_of(source.tensors, source.config, padded_vocabulary(source.config, 1))
    write(folder, state, {**model, **changes})
    return folder, source


def test_what_the_number_of_a_window_means_is_said(tmp_path: Path) -> None:
    run, source = written(tmp_path, "mistral", f"megatron.bridge.models.{LLAMAS['mistral']}")
    found = open_source(find_archive(run))
    assert found.dims.layers[0].window == source.config.sliding_window == 5  # type: ignore[attr-defined]
    said = "\n".join(found.remarks)
    assert "window_size [4, 0] becomes a window of 5 tokens that counts the token itself, as megatron-core" in said
    assert "a run that Megatron-Bridge before 0.4 imported" in said and "write [3, 0]" in said


@pytest.mark.parametrize("name", ["gemma", "gemma2"])
def test_a_gemma_under_a_class_that_is_not_known_is_refused(name: str, tmp_path: Path) -> None:
    run, _ = written(tmp_path, name, "my_recipes.gemma.models.SmallProvider")
    with pytest.raises(
        CheckpointError, match="class my_recipes.gemma.models.SmallProvider is not known here"
    ) as refused:
        open_source(find_archive(run))
    assert "gemma_provider.GemmaModelProvider" in refused.value.hint
    plain = "megatron.bridge.models.gpt.model_config.BridgeGPTModelConfig"
    run, _ = written(tmp_path / "built", name, plain, _builder_="mine.GemmaBuilder")
    with pytest.raises(CheckpointError, match="class mine.GemmaBuilder is not known"):
        open_source(find_archive(run))


def test_another_class_of_the_users_own_is_named_and_one_of_other_models_refused(tmp_path: Path) -> None:
    run, _ = written(tmp_path / "own", "llama", "my_recipes.SmallProvider")
    assert [each for each in open_source(find_archive(run)).remarks if "names my_recipes.SmallProvider, which" in each]
    spec = {"_target_": "functools.partial", "_args_": [{"_target_": "my.layers.spec", "_call_": False}]}
    plain = "megatron.bridge.models.gpt_provider.GPTModelProvider"
    run, _ = written(tmp_path / "spec", "llama", plain, transformer_layer_spec=spec)
    assert [each for each in open_source(find_archive(run)).remarks if "names my.layers.spec, which" in each]
    spelled = {"_target_": "megatron.core.transformer.spec_utils.ModuleSpec", "module": {"_target_": "mine.Layer"}}
    run, _ = written(tmp_path / "spelled", "llama", plain, transformer_layer_spec=spelled)
    assert [each for each in open_source(find_archive(run)).remarks if "spec_utils.ModuleSpec, which" in each]
    run, _ = written(
        tmp_path / "other",
        "llama",
        "megatron.bridge.models.mimo_v2_flash.mimo_v2_flash_provider.MiMoV2FlashModelProvider",
    )
    with pytest.raises(CheckpointError, match="MiMoV2FlashModelProvider, which is not known to build a GPT, a Llama"):
        open_source(find_archive(run))


def test_norms_stored_less_one_become_a_llamas_of_hugging_face(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = saved("llama", torch.bfloat16)
    state = core_state_of(source.tensors, source.config, padded_vocabulary(source.config, 1))
    state = {key: value - 1 if "norm" in key else value for key, value in state.items()}
    model = {**nemo2(source.config, "llama")["config"], "layernorm_zero_centered_gamma": True}
    write(tmp_path / "run", state, {**model, "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider"})
    convert(ConvertArguments(tmp_path / "run", tmp_path / "hf", weight_data_type="fp32", format="huggingface"))
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert type(made).__name__ == "LlamaForCausalLM"
    norms = {key: value for key, value in made.state_dict().items() if "norm" in key}
    assert all(torch.equal(value, (source.tensors[key] - 1).float() + 1) for key, value in norms.items())


def test_the_tracker_chooses_and_inspect_names_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {key: value + 1 for key, value in core_state().items()}
    write(tmp_path / "run", other, PROVIDER)
    (tmp_path / "run/iter_0000007").rename(tmp_path / "run/iter_0000003")
    write(tmp_path / "run", core_state(), PROVIDER)
    wanted = core_forward(core_state(), INPUT_IDS, HEADS, 0)
    assert np.abs(logits(tmp_path / "run", tmp_path / "out") - wanted).max() < 1e-4
    inspect([str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "megatron-core GPT" in said and "keys that are not known" not in said


@pytest.mark.parametrize("name", ["vocab.json", "tokenizer.json"])
def test_a_large_vocabulary_is_parsed_once_and_given_back(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its JSON takes tenths of a second, and is asked for by what checks it, its size and its special tokens."""
    state = core_state_of(saved("llama").tensors, saved("llama").config, padded_vocabulary(saved("llama").config, 2))
    model = {**nemo2(saved("llama").config, "llama")["config"], "_target_": f"megatron.bridge.models.{LLAMAS['llama']}"}
    folder = write(tmp_path / "run", state, model, 2) / "tokenizer"
    if name not in TOKENIZER:
        for each in folder.iterdir():
            each.unlink()
        write_huggingface_tokenizer(folder, saved("llama").config.vocab_size)
    parsed = list[str]()

    def noted(content: bytes, where: str) -> Any:
        parsed.append(where)
        return parse_json(content, where)

    monkeypatch.setattr(vocabularies, "parse_json", noted)
    convert(ConvertArguments(tmp_path / "run", tmp_path / "hf", weight_data_type="fp32", format="huggingface"))
    assert len(parsed) == 1 and parsed[0].endswith(name)
    assert not vocabularies._parsed.cache_info().currsize


def test_the_whole_model_is_described_or_refused(tmp_path: Path) -> None:
    write(tmp_path / "moe", core_state(), {**PROVIDER, "num_moe_experts": 8})
    write(tmp_path / "bare", core_state(), None)
    write(tmp_path / "other", core_state(), PROVIDER, checkpoint={"ckpt_format": "torch_dcp"})
    null = write(tmp_path / "null", core_state(), PROVIDER, tokenizer={"tokenizer_type": "NullTokenizer"})
    (null / "tokenizer").rename(tmp_path / "elsewhere")
    for name, words in (
        ("moe", "num_moe_experts: 8"),
        ("bare", "model is None"),
        ("other", "says ckpt_format torch_dcp, which is not read"),
        ("null", "trained with NullTokenizer"),
    ):
        with pytest.raises(CheckpointError, match=words):
            open_source(find_archive(tmp_path / name))


def test_a_tokenizer_that_was_not_saved_is_asked_for(tmp_path: Path) -> None:
    named = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "meta-llama/Llama-3.2-1B"}
    folder = write(tmp_path / "run", core_state(), PROVIDER, tokenizer=named)
    (folder / "tokenizer").rename(tmp_path / "elsewhere")
    with pytest.raises(
        CheckpointError, match="names the tokenizer meta-llama/Llama-3.2-1B and does not hold its files"
    ):
        open_source(find_archive(tmp_path / "run"))
    source = open_source(find_archive(tmp_path / "run", GivenFiles(tokenizer=tmp_path / "elsewhere")))
    assert source.tokenizer.library == "bpe" and source.ids.end_id == 3
