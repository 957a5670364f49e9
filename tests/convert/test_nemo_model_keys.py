"""Every key of a NeMo configuration is honoured, refused by name, known to be harmless, or named."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.checkpoints.nemo_archive import NEMO, gpt_config, write_gpt

from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.megatron.arguments import in_nemo_words
from export_scripts.checkpoints.nemo import gpt_config as gpt_keys
from export_scripts.checkpoints.nemo import t5_config
from export_scripts.checkpoints.nemo.core_fields import CORE_LIMITS
from export_scripts.checkpoints.nemo.nemo2 import in_nemo1_words
from export_scripts.conversion.plan.check import inspect_source
from handover.errors import CheckpointError

SAMPLES = [path for path in sorted(NEMO.glob("*.nemo")) if not path.name.startswith("ptuning")]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_every_key_that_nemo_itself_wrote_is_known(path: Path) -> None:
    with tarfile.open(path) as tar:
        content = tar.extractfile("./model_config.yaml")
        assert content is not None
        config = yaml.safe_load(content)
    # Set, whatever its default is: a key that is off says nothing.
    config = {key: value or (value if key in ("kv_channels", "drop_layers") else 1) for key, value in config.items()}
    said = t5_config.remarks(config) if "t5" in path.name else gpt_keys.key_remarks(config)
    assert not [line for line in said if "not known" in line]
    assert not [line for line in open_source(find_archive(path)).remarks if "not known" in line]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"apply_embedding_scaling": True}, "apply_embedding_scaling: True  (it does not scale embeddings)"),
    ({"position_embedding_type": "alibi", "scale_positional_embedding": True}, "scale_positional_embedding: True  ("),
    (
        {"mcore_customization_config": {"final_logit_softcapping": 30.0}},
        "mcore_customization_config.final_logit_softcapping: 30.0  (it does not cap",
    ),
    ({"mcore_customization_config": {"parallel_attention": True}}, "mcore_customization_config.parallel_attention"),
    ({"sqrt_query_pre_attn_scalar": 14.9666}, "sqrt_query_pre_attn_scalar: 14.9666"),
    ({"hyena": {"emb_dim": 33}}, "hyena: {'emb_dim': 33}"),
    ({"name": "megatron_falcon_gpt"}, "name: megatron_falcon_gpt  (its layers are a GPT's)"),
    (
        {"mcore_customization_config": {"apply_residual_connection_post_layernorm": True}},
        "mcore_customization_config.apply_residual_connection_post_layernorm: True  (the model is read by NeMo's own",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[next(reversed(each[0])) for each in REFUSED])
def test_a_key_that_changes_the_function_is_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refused:
        inspect_source(write_gpt(tmp_path / "gpt.nemo", **changes), 1, "fp32")
    assert words in str(refused.value)


def test_a_key_that_is_off_or_harmless_is_no_matter(tmp_path: Path) -> None:
    fine = {
        "apply_embedding_scaling": False,
        "mcore_customization_config": {"new_decoder_architecture": False, "cross_entropy_fusion_impl": "te"},
        "hidden_dropout": 0.1,
        "a_key_of_tomorrow": None,
    }
    assert not inspect_source(write_gpt(tmp_path / "gpt.nemo", **fine), 1, "fp32").remarks


def test_an_unknown_key_that_is_set_is_named(tmp_path: Path) -> None:
    path = write_gpt(tmp_path / "gpt.nemo", a_key_of_tomorrow=3, mcore_customization_config={"another": "x"})
    (said,) = inspect_source(path, 1, "fp32").remarks
    assert "a_key_of_tomorrow: 3, mcore_customization_config.another: x;" in said


def test_a_class_of_the_users_own_is_named(tmp_path: Path) -> None:
    (said,) = inspect_source(write_gpt(tmp_path / "gpt.nemo", target="mine.ScaledGPTModel"), 1, "fp32").remarks
    assert "target: mine.ScaledGPTModel;" in said


def test_a_t5s_keys_are_looked_at_on_top_and_on_both_sides() -> None:
    side = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "hidden_dropout": 0.1}
    config = {"encoder": {**side, "a_key": 1}, "decoder": {**side}, "another_key": True, "seq_length": 4}
    said = "\n".join(t5_config.remarks(config))
    assert "another_key: True, encoder.a_key: 1;" in said
    with pytest.raises(CheckpointError, match="decoder.final_logit_softcapping: 30"):
        t5_config.check_expressible({**config, "decoder": {**side, "final_logit_softcapping": 30}})


@pytest.mark.parametrize("key", CORE_LIMITS)
def test_megatron_cores_keys_are_refused_wherever_they_stand(key: str) -> None:
    value = {"softmax_type": "off-by-one", "scale_factor": 8.0}.get(key, 2)
    for words in (in_nemo1_words({key: value}), in_nemo_words({key: value}), gpt_config(**{key: value})):
        with pytest.raises(CheckpointError, match=f"{key}: {value}"):
            gpt_keys.check_expressible(words)


def test_zero_centred_norms_by_megatron_cores_key() -> None:
    assert gpt_keys.has_zero_centred_norms({"mcore_gpt": True, "layernorm_zero_centered_gamma": True})
    assert not gpt_keys.has_zero_centred_norms({"layernorm_zero_centered_gamma": True}), "NeMo's own GPT ignores it"
