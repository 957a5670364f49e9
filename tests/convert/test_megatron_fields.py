"""Every field of megatron-core's configurations and of the classes around it has a verdict, and the verdict holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.llama_configs import megatron_lm, nemo1, nemo2
from support.checkpoints.megatron_core_record import recorded
from support.checkpoints.nemo_archive import gpt_config
from support.tiny_models.llama_models import saved

from export_scripts.checkpoints.megatron import arguments
from export_scripts.checkpoints.megatron.bridge import model_in_nemo1_words
from export_scripts.checkpoints.megatron.gpt import model_of
from export_scripts.checkpoints.nemo import core_fields, known_keys, t5_config
from export_scripts.checkpoints.nemo import gpt_config as gpt_keys
from export_scripts.checkpoints.nemo.core_without_effect import WITHOUT_EFFECT
from export_scripts.checkpoints.nemo.nemo2 import config_in_nemo1_words
from export_scripts.weights.values import Fields
from handover.errors import CheckpointError

DATA_FOLDER = Path(__file__).parents[1] / "data"
DATA = json.loads((DATA_FOLDER / "megatron_fields.json").read_text())
# Looked through by hand: no decoder computes anything else by these.
TRAINING = json.loads((DATA_FOLDER / "megatron_training_arguments.json").read_text())
CLASSES: dict[str, list[str]] = {**DATA["megatron-core 0.16.1"], **DATA["sources"]}
ARGUMENTS = next(name for name in CLASSES if name.startswith("Megatron-LM"))
HARMLESS = [name for names in WITHOUT_EFFECT.values() for name in names]


@pytest.mark.parametrize("name", [name for name in CLASSES if name != ARGUMENTS])
def test_every_field_of_a_class_has_a_verdict(name: str) -> None:
    assert not [field for field in CLASSES[name] if field not in core_fields.CORE_KNOWN]


def test_every_argument_of_megatron_lm_has_a_verdict() -> None:
    read = {*arguments.READ, *core_fields.CORE_KNOWN}
    assert {*CLASSES[ARGUMENTS]} - read == {*TRAINING}


def test_a_field_has_one_verdict_and_none_stands_for_others() -> None:
    verdicts = [*core_fields.CORE_LIMITS, *core_fields.ROUTER_LIMITS, *core_fields.CORE_HONOURED, *HARMLESS]
    assert len(verdicts) == len({*verdicts})
    assert not [name for name in {*verdicts, *known_keys.GPT_KNOWN, *known_keys.T5_KNOWN} if "*" in name]


def test_megatron_cores_logits_bear_the_verdicts_out() -> None:
    """The others were not computed with: they need a GPU, Transformer Engine, several processes or another field."""
    computed, changing = ({*recorded("effects")[kind]} for kind in ("computed", "changing"))
    assert len(computed & {*HARMLESS}) >= 136
    assert not changing & {*HARMLESS}
    assert changing <= {*core_fields.CORE_HONOURED, *core_fields.CORE_LIMITS, *core_fields.ROUTER_LIMITS}


def readers(name: str, changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each reader makes of a model with some fields changed, in NeMo 1's words."""
    config = saved(name).config
    of_nemo2 = nemo2(config, name, **changes)
    bridge = Fields({**of_nemo2["config"], "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider"}, "model")
    return {
        "NeMo 1": nemo1(config, **changes),
        "NeMo 1, customized": nemo1(config, mcore_customization_config=dict(changes)),
        "NeMo 2": config_in_nemo1_words(of_nemo2),
        "Megatron-Bridge": model_in_nemo1_words(bridge),
        "Megatron-LM": arguments.in_nemo_words(megatron_lm(config, **changes)),
    }


def outcome(words: Mapping[str, Any]) -> object:
    """What a configuration becomes: the family and its dimensions, or the refusal."""
    try:
        model = model_of(words)
        dims = model.dims(words, 100, ())
    except CheckpointError as error:
        return str(error)
    variant = getattr(model, "variant", lambda config, keys: None)(words, ())
    return model.family(words), dims, variant


REFUSED: dict[str, Any] = {
    "softmax_type": "learnable",
    "rope_scaling": {"factor": 2},
    "scale_factor": 2.0,
    "moe_router_score_function": "sqrtsoftplus",
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_layer_freq": [1, 2],
    "mlp_multipliers": [1.0, 0.5],
    "layer_spec": ["my.module", "spec"],
}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_limited_field_is_refused_by_name_from_every_source(name: str) -> None:
    limits = {**core_fields.CORE_LIMITS, **(core_fields.ROUTER_LIMITS if name == "mixtral" else {})}
    honoured = {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "scale_factor"}
    honoured |= {"softmax_scale", "no_rope_freq", "multi_latent_attention", "qk_l2_norm"}
    honoured |= {"mtp_num_layers"} if name == "mixtral" else set()
    honoured |= {"softmax_type", "glu_linear_offset", "activation_func_clamp_value"}
    for field in limits:
        if field in honoured or field in ("rope_scaling", "parallel_attention", "new_decoder_architecture"):
            continue  # the Llama family has the first, and reads the others by words of its own
        value = REFUSED.get(field, 2)
        for source, words in readers(name, {field: value}).items():
            assert f"{field}: {value}" in str(outcome(words)), (source, field)


def test_a_router_of_another_kind_is_refused_and_what_changes_nothing_is_not() -> None:
    for changes in (
        {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"], "moe_aux_loss_coeff": [0.1, 0.0]},
        {"moe_router_group_topk": 1, "moe_router_num_groups": 4, "moe_router_topk": 4},
        {"moe_expert_capacity_factor": 1.0},
    ):
        for source, words in readers("mixtral", changes).items():
            if "moe_expert_capacity_factor" in changes and source.startswith("NeMo"):
                continue  # is said, as NeMo's own exporters leave it out
            assert next(iter(changes)) in str(outcome(words)), (source, changes)
    fine = {
        "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
        "moe_expert_capacity_factor": 2.0,  # of 4 experts, 2 chosen: none can be full
        "moe_layer_freq": [1, 1],
        "moe_router_dtype": "fp32",
    }
    for (source, words), same in zip(readers("mixtral", fine).items(), readers("mixtral", {}).values(), strict=True):
        if source != "NeMo 1, customized":
            assert outcome(words) == outcome(same), source
    for words in readers("llama", {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5}).values():
        assert not isinstance(outcome(words), str), "a model without experts reads no router"


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_field_without_effect_changes_nothing_and_is_not_remarked_on(name: str) -> None:
    of_other_words = ("_builder_", "config", "extra_checkpoint_metadata", "virtual_pipeline_model_parallel_size")
    changes = {field: 2 for field in HARMLESS if field not in of_other_words}
    plain = readers(name, {})
    for source, words in readers(name, changes).items():
        expected = {**plain[source], "max_position_embeddings": words["max_position_embeddings"]}
        assert outcome(words) == outcome(expected), source
    assert not gpt_keys.key_remarks({**gpt_config(), **changes, "mcore_customization_config": changes})
    sides = {side: dict(changes) for side in ("encoder", "decoder")}
    assert not [line for line in t5_config.remarks({**changes, **sides}) if "not known" in line]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_limited_field_at_megatron_cores_default_is_in_nothings_way(name: str) -> None:
    limits = {*core_fields.CORE_LIMITS, *core_fields.ROUTER_LIMITS}
    classes = (DATA["megatron-core 0.16.1"][kind] for kind in ("ModelParallelConfig", "TransformerConfig"))
    defaults = {field: value for kind in classes for field, value in kind.items() if field in limits}
    plain = readers(name, {})
    assert len(defaults) >= 20
    assert all(outcome(words) == outcome(plain[source]) for source, words in readers(name, defaults).items())


HONOURED: dict[str, Any] = {
    "softmax_scale": 0.5,
    "no_rope_freq": 2,
    "num_layers": 3,
    "hidden_size": 128,
    "num_attention_heads": 16,
    "num_query_groups": 2,
    "ffn_hidden_size": 100,
    "kv_channels": 12,
    "layernorm_epsilon": 1e-3,
    "layernorm_zero_centered_gamma": True,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "gated_linear_unit": False,
    "activation_func": "relu",
    "num_moe_experts": 2,
    "moe_router_topk": 1,
    "moe_ffn_hidden_size": 7,
    "moe_router_pre_softmax": True,
    "moe_router_num_groups": 2,
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 9,
    "moe_expert_capacity_factor": 1.0,
    "qk_layernorm": True,
    "window_size": [3, 0],
    "apply_residual_connection_post_layernorm": True,
    "rotary_interleaved": True,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 5000,
    "rotary_percent": 0.5,
    "seq_len_interpolation_factor": 2.0,
    "seq_length": 7,
    "share_embeddings_and_output_weights": True,
    "transformer_layer_spec": {"_target_": "megatron.core.models.bert.bert_layer_specs.bert_layer_spec"},
    "_target_": "megatron.bridge.models.mimo_v2_flash.mimo_v2_flash_provider.MiMoV2FlashModelProvider",
}
HONOURED |= {
    **{"q_lora_rank": None, "kv_lora_rank": 9, "qk_head_dim": 9, "qk_pos_emb_head_dim": 6, "v_head_dim": 9},
    **{"original_max_position_embeddings": 32, "beta_fast": 3, "beta_slow": 2, "mscale": 0.5, "mscale_all_dim": 0.5},
    **{"rope_type": "rope", "mtp_use_repeated_layer": True},
}
_SPEC = {"_target_": "megatron.core.models.hybrid.hybrid_layer_specs.gated_delta_product_stack_spec"}
HONOURED |= {"moe_latent_size": 16, "hybrid_stack_spec": _SPEC, "mamba_stack_spec": _SPEC}
HONOURED |= {"moe_apply_probs_on_input": True, "falconh1_ratio": 1.0, "falconh1_stack_spec": _SPEC}
_HYBRID, _FALCON = {"hybrid_layer_pattern": "M*"}, {"falconh1_ratio": 1.0}
_DELTA = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2}
_LINEAR = {"num_key_heads": 4, "num_value_heads": 16, "key_head_dim": 4, "value_head_dim": 4, "conv_kernel_dim": 3}
TOGETHER: dict[str, dict[str, Any]] = {  # what counts beside another alone
    "max_position_embeddings": {
        **{"multi_latent_attention": True, "qk_layernorm": True},
        **{"rope_type": "yarn", "max_position_embeddings": 32},
    },
    **{f"mamba_{name}": {**_HYBRID, f"mamba_{name}": 4} for name in ("num_heads", "head_dim", "num_groups")},
    **{f"mamba_{name}": {**_HYBRID, f"mamba_{name}": 6} for name in ("state_dim", "chunk_size")},
    **{f"linear_{name}": {**_DELTA, f"linear_{name}": value} for name, value in _LINEAR.items()},
    "mtp_hybrid_override_pattern": {**_HYBRID, "mtp_num_layers": 1, "mtp_hybrid_override_pattern": "M"},
    **{name: {**_FALCON, name: False} for name in ("use_mamba", "use_attention", "use_mlp", "conv_bias", "rmsnorm")},
    **{name: {**_FALCON, name: True} for name in ("D_has_hdim", "norm_before_gate")},
    **{name: {**_FALCON, name: 3} for name in ("d_conv", "expand", "chunk_size")},
    "moe_router_group_topk": {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "moe_shared_expert_gate": {"moe_shared_expert_intermediate_size": 9, "moe_shared_expert_gate": True},
    "window_attn_skip_freq": {"window_size": [3, 0], "window_attn_skip_freq": 2},
    "bias_activation_fusion": {"activation_func": "gelu", "bias_activation_fusion": True},
    "use_te_activation_func": {"activation_func": "gelu", "use_te_activation_func": True},
    "rope_scaling_factor": {"rope_scaling": True, "rope_scaling_factor": 4.0},
    "low_freq_factor": {"scale_factor": 8.0, "low_freq_factor": 2.0},
    "high_freq_factor": {"scale_factor": 8.0, "high_freq_factor": 2.0},
    "old_context_len": {"scale_factor": 8.0, "old_context_len": 100},
}
# Megatron-LM's word, another name of max_position_embeddings, and the section that the fields stand in.
ELSEWHERE = {"bias_gelu_fusion", "max_sequence_length", "transformer"}


def model_that_reads(field: str) -> str:
    """A model of ``llama_models`` to which a field matters."""
    is_of_latent = field in (*core_fields.OF_LATENT, "multi_latent_attention", "mtp_num_layers")
    return "deepseek_v3" if is_of_latent else "mixtral" if field.startswith("moe_") else "llama"


@pytest.mark.parametrize("field", ["softmax_scale", "no_rope_freq", *sorted(core_fields.CORE_HONOURED - ELSEWHERE)])
def test_an_honoured_field_changes_what_a_model_becomes(field: str) -> None:
    changes = TOGETHER.get(field, {field: HONOURED.get(field)})
    name = model_that_reads(field)

    def read(given: Mapping[str, Any]) -> object:
        model = {**nemo2(saved(name).config, name)["config"], "_target_": "megatron.core.GPT", **given}
        try:
            return outcome(model_in_nemo1_words(Fields(model, "model")))
        except CheckpointError as error:
            return str(error)

    assert read(changes) != read({key: value for key, value in changes.items() if key != field})


# Beside those of TOGETHER and HONOURED: an argument, and what it is set beside.
OF_MEGATRON_LM: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"linear_{name}": (value, _DELTA) for name, value in _LINEAR.items()},
    **{f"mamba_{name}": (4, _HYBRID) for name in ("num_heads", "head_dim", "num_groups", "state_dim", "chunk_size")},
    "mtp_hybrid_override_pattern": ("M", {**_HYBRID, "mtp_num_layers": 1}),
    "num_query_groups": (2, {"group_query_attention": True}),
    "group_query_attention": (False, {}),
    "max_position_embeddings": (7, {}),
    "norm_epsilon": (1e-3, {}),
    "layernorm_epsilon": (1e-3, {"norm_epsilon": None}),
    "apply_layernorm_1p": (True, {}),
    "use_rotary_position_embeddings": (True, {"position_embedding_type": "learned_absolute"}),
    "add_position_embedding": (False, {}),
    "use_rope_scaling": (True, {}),
    "rope_scaling_factor": (4.0, {"use_rope_scaling": True}),
    "rotary_seq_len_interpolation_factor": (2.0, {}),
    "untie_embeddings_and_output_weights": (False, {}),
    "num_experts": (2, {}),
    "swiglu": (False, {}),
    "squared_relu": (True, {"swiglu": False}),
    "geglu": (True, {"swiglu": False}),
    "quick_geglu": (True, {"swiglu": False}),
    "activation_func": ("squaredrelu", {"swiglu": False}),
    "openai_gelu": (True, {"swiglu": False, "bias_gelu_fusion": False}),
    "bias_gelu_fusion": (True, {"swiglu": False}),
    "onnx_safe": (True, {"swiglu": False, "bias_gelu_fusion": True}),
    "moe_router_group_topk": (2, {"moe_router_num_groups": 4}),
    "moe_shared_expert_gate": (True, {"moe_shared_expert_intermediate_size": 9}),
    "window_attn_skip_freq": (2, {"window_size": [3, 0]}),
    "virtual_pipeline_model_parallel_size": (2, {}),
    "spec": (["my.module", "my_spec"], {}),
    "kitchen_config_file": ("recipes.yaml", {}),
    "kitchen_recipe_number": (1, {}),
    "retro_add_retriever": (True, {}),
}


@pytest.mark.parametrize("argument", sorted(arguments.READ - {*core_fields.CORE_LIMITS, *core_fields.ROUTER_LIMITS}))
def test_an_argument_that_is_read_changes_what_a_model_becomes(argument: str) -> None:
    name = model_that_reads(argument)
    value, beside = OF_MEGATRON_LM.get(argument) or (HONOURED[argument], {})
    plain = {key: each for key, each in megatron_lm(saved(name).config, **beside).items() if each is not None}
    assert outcome(arguments.in_nemo_words({**plain, argument: value})) != outcome(arguments.in_nemo_words(plain))


def test_a_function_of_the_users_own_is_not_taken_for_one_of_torchs() -> None:
    model = {**nemo2(saved("llama").config, "llama")["config"], "activation_func": {"_target_": "mine.silu"}}
    assert "activation: gated mine.silu" in str(outcome(model_in_nemo1_words(Fields(model, "model"))))


def test_layers_with_a_window_are_listed_or_counted() -> None:
    for skipped, said in (("[1, 0]", "window_attn_skip_freq is '[1, 0]'"), ([1], "lists 1 of 2 layers")):
        for words in readers("mistral", {"window_attn_skip_freq": skipped}).values():
            assert said in str(outcome(words)) or "mcore_customization_config" in str(outcome(words))


def test_what_overrules_nemos_own_keys_is_refused() -> None:
    config = nemo1(saved("llama").config, mcore_customization_config={"window_size": [3, 0], "qk_layernorm": False})
    assert "mcore_customization_config.window_size: [3, 0]" in str(outcome(config))
    assert "qk_layernorm" not in str(outcome(config)), "it says what NeMo's own key says"
