"""The proof of the weights, against what FasterTransformer's own converter wrote and its C++ loader opens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.shards.family_shards import write_family
from support.shards.ft_checkpoint_maker import LISTINGS, make_ft_checkpoint
from support.shards.random_t5 import random_t5
from support.tiny_models.huggingface_models import build
from transformers import T5EncoderModel

from backends.fastertransformer.engine.settings import find_checkpoint
from deployment.proof import weights
from deployment.proof.served_models import ServedModel, find_served_models, read_config
from deployment.proof.weights import prove_weights
from export_scripts.arguments import ExportArguments
from export_scripts.repository.model_repository import build_repository
from ft_format.config_ini import ConfigIni, render
from ft_format.families import gpt
from handover.errors import ArtefactError
from handover.manifest import Manifest, record_files

SHARD = "model.layers.1.mlp.dense_4h_to_h.weight.0.bin"
OTHER = "model.layers.2.mlp.dense_4h_to_h.weight.0.bin"


def expected_shards(
    config: dict[str, str], size: int, tasks: dict[str, int] | None = None, untied: bool = False
) -> dict[str, int]:
    sections: dict[str, dict[str, object]] = {"gpt": {**config, "num_tasks": len(tasks or {})}}
    for number, (name, length) in enumerate((tasks or {}).items()):
        sections[f"task_{number}"] = {"task_name": name, "prompt_length": length}
    ini = ConfigIni(render(sections).encode(), "config.ini", ArtefactError)
    return weights.expected_shards(ini, gpt.FAMILY, size, lambda name: untied)


def export(directory: Path, kind: str = "fp32/1") -> Path:
    data_type, size = kind.split("/")
    build_repository(
        ExportArguments(
            ft_checkpoint=make_ft_checkpoint(directory / f"{size}-gpu", kind),
            output=directory / "repo",
            model_name="tiny",
            tensor_para_size=int(size),
            pipeline_para_size=1,
            data_type=data_type,
            int8_mode=0,
            enable_custom_all_reduce=0,
            max_batch_size=4,
        )
    )
    return directory / "repo"


def prove(repository: Path) -> int:
    (model,) = find_served_models(repository)
    return prove_weights(model, repository)


def shards_of(repository: Path) -> Path:
    (model,) = find_served_models(repository)
    return model.checkpoint


def replace_file(path: Path, content: bytes) -> None:
    path.unlink()  # a hard link to the checkpoint: writing through it would alter both
    path.write_bytes(content)


@pytest.mark.parametrize("kind", sorted(LISTINGS))
def test_the_list_is_what_fasterTransformers_converter_writes(kind: str) -> None:  # noqa: N802
    size = int(kind.split("/")[1])
    assert expected_shards(LISTINGS[kind]["config"], size) == LISTINGS[kind]["sizes"]


# What follows is read off ParallelGptWeight.cc: hidden 8, inter 32, one layer, two ranks, fp16.
TINY = {"head_num": "2", "size_per_head": "4", "inter_size": "32", "num_layer": "1", "vocab_size": "10",
        "max_pos_seq_len": "6", "weight_data_type": "fp16"}  # fmt: skip


def test_an_untied_head_is_one_more_matrix() -> None:
    more = expected_shards(TINY, 2, untied=True).items() - expected_shards(TINY, 2).items()
    assert dict(more) == {"model.lm_head.weight.bin": 10 * 8 * 2}


def test_variants_of_gpt_have_their_own_files() -> None:
    config = {**TINY, "has_positional_encoding": "0", "has_pre_decoder_layernorm": "True",
              "has_post_decoder_layernorm": "no"}  # fmt: skip
    plain, variant = expected_shards(TINY, 2), expected_shards(config, 2)
    assert plain.keys() - variant.keys() == {
        "model.wpe.bin", "model.final_layernorm.weight.bin", "model.final_layernorm.bias.bin",
    }  # fmt: skip
    assert dict(variant.items() - plain.items()) == {
        "model.pre_decoder_layernorm.weight.bin": 16,
        "model.pre_decoder_layernorm.bias.bin": 16,
    }


def test_adapters_are_split_like_the_feed_forward() -> None:
    config = {**TINY, "has_adapters": "true", "adapter_inter_size": "12"}
    more = dict(expected_shards(config, 2).items() - expected_shards(TINY, 2).items())
    assert len(more) == 2 * (1 + 3 * 2)
    assert more["model.layers.0.after_ffn_adapter.dense_h_to_4h.weight.1.bin"] == 8 * 6 * 2
    assert more["model.layers.0.after_ffn_adapter.dense_h_to_4h.bias.0.bin"] == 6 * 2
    assert more["model.layers.0.after_attention_adapter.dense_4h_to_h.bias.bin"] == 8 * 2


def test_prompt_tables_are_weights_too() -> None:
    tasks = {"squad": 5, "empty": 0}
    tuning = expected_shards({**TINY, "prompt_learning_type": "3"}, 2, tasks)
    assert dict(tuning.items() - expected_shards(TINY, 2).items()) == {"model.prompt_table.squad.weight.bin": 80}
    prefix = expected_shards({**TINY, "prompt_learning_type": "2"}, 2, tasks)
    assert dict(prefix.items() - expected_shards(TINY, 2).items()) == {
        "model.prefix_prompt.squad.weight.0.bin": 5 * 2 * 8 // 2 * 2,
        "model.prefix_prompt.squad.weight.1.bin": 5 * 2 * 8 // 2 * 2,
    }
    assert expected_shards(TINY, 2, tasks) == expected_shards(TINY, 2)  # type 0: FasterTransformer opens none


@pytest.mark.parametrize(
    ("change", "size", "said"),
    [
        ({"head_num": ""}, 2, "head_num =  is not a whole number of at least 1"),
        ({"inter_size": "many"}, 2, "inter_size = many is not a whole number of at least 1"),
        ({"weight_data_type": "int8"}, 2, "int8"),
        ({}, 3, "does not divide head_num 2"),
    ],
)
def test_a_config_that_tells_no_sizes_is_refused(change: dict[str, str], size: int, said: str) -> None:
    with pytest.raises(ArtefactError, match=said):
        expected_shards({**TINY, **change}, size)


@pytest.mark.parametrize("kind", ["fp32/1", "fp16/2", "fp16/4"])
def test_an_exported_repository_is_proved_by_digest(tmp_path: Path, kind: str) -> None:
    assert prove(export(tmp_path, kind)) == len(LISTINGS[kind]["sizes"])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    repository = export(tmp_path, "fp16/2")
    (shards_of(repository) / "model.layers.3.attention.dense.weight.1.bin").unlink()
    with pytest.raises(ArtefactError) as refused:
        prove(repository)
    assert "model.layers.3.attention.dense.weight.1.bin  missing" in refused.value.problem
    assert refused.value.problem.startswith("1 of 76 shards")


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    repository = export(tmp_path)
    path = shards_of(repository) / SHARD
    replace_file(path, path.read_bytes()[:-4])
    with pytest.raises(ArtefactError, match=f"{SHARD}  65532 bytes instead of 65536"):
        prove(repository)


def test_an_altered_byte_is_found(tmp_path: Path) -> None:
    repository = export(tmp_path)
    path = shards_of(repository) / SHARD
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    replace_file(path, bytes(content))
    with pytest.raises(ArtefactError, match=f"{SHARD}  content differs from its digest"):
        prove(repository)


def test_swapped_shards_are_both_named(tmp_path: Path) -> None:
    repository = export(tmp_path)
    one, two = shards_of(repository) / SHARD, shards_of(repository) / OTHER
    first, second = one.read_bytes(), two.read_bytes()
    replace_file(one, second)
    replace_file(two, first)
    with pytest.raises(ArtefactError) as refused:
        prove(repository)
    assert f"{SHARD}  content is that of {OTHER}" in refused.value.problem
    assert f"{OTHER}  content is that of {SHARD}" in refused.value.problem


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    repository = export(tmp_path)
    (shards_of(repository) / "model.wte.bin").unlink()
    replace_file(shards_of(repository) / "model.wpe.bin", b"")
    replace_file(shards_of(repository) / OTHER, bytes(65536))
    with pytest.raises(ArtefactError) as refused:
        prove(repository)
    assert [line.split()[0] for line in refused.value.problem.splitlines()[1:]] == [
        OTHER, "model.wpe.bin", "model.wte.bin",
    ]  # fmt: skip


def test_without_the_checkpoints_manifest_the_repositorys_is_used(tmp_path: Path) -> None:
    repository = export(tmp_path)
    (shards_of(repository) / "manifest.json").unlink()
    assert prove(repository) == 52
    replace_file(shards_of(repository) / SHARD, bytes(65536))
    with pytest.raises(ArtefactError, match=SHARD):
        prove(repository)


def test_a_foreign_repository_is_proved_by_name_and_size(tmp_path: Path) -> None:
    repository = export(tmp_path)
    (shards_of(repository) / "manifest.json").unlink()
    (repository / "manifest.json").unlink()
    assert prove(repository) == 0
    (shards_of(repository) / SHARD).unlink()
    with pytest.raises(ArtefactError, match=f"{SHARD}  missing"):
        prove(repository)


def test_a_head_that_was_recorded_is_missing_not_tied(tmp_path: Path) -> None:
    from support.shards.ft_checkpoint_maker import seal

    repository = export(tmp_path)
    head = shards_of(repository) / "model.lm_head.weight.bin"
    head.write_bytes(bytes(262144))
    seal(shards_of(repository))
    assert prove(repository) == 53
    head.unlink()
    with pytest.raises(ArtefactError, match=r"model\.lm_head\.weight\.bin  missing"):
        prove(repository)


def test_shards_for_another_tensor_para_size_are_refused(tmp_path: Path) -> None:
    repository = export(tmp_path, "fp16/2")
    config = repository / "fastertransformer" / "config.pbtxt"
    text = config.read_text().replace('key: "tensor_para_size"\n  value {\n    string_value: "2"',
                                      'key: "tensor_para_size"\n  value {\n    string_value: "1"')  # fmt: skip
    config.write_text(text)
    with pytest.raises(ArtefactError, match="made for tensor_para_size 2"):
        prove(repository)


@pytest.mark.parametrize("form", ["1/1-gpu", "1-gpu", "", "absolute", "gone"])
def test_shards_are_proved_where_the_engine_opens_them(tmp_path: Path, form: str) -> None:
    repository = export(tmp_path).rename(tmp_path / "moved repo")
    inside = repository / "fastertransformer" / "1" / "1-gpu"
    path = {"absolute": str(tmp_path / "1-gpu"), "gone": str(tmp_path / "repo" / "1-gpu")}.get(form, form)
    config = repository / "fastertransformer" / "config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "1/1-gpu"', f'string_value: "{path}"'))
    expected = tmp_path / "1-gpu" if form == "absolute" else inside
    assert shards_of(repository).samefile(expected)
    engine_opens = find_checkpoint(path, repository / "fastertransformer", "1", 1)
    assert engine_opens == shards_of(repository)
    assert prove(repository) == 52


def test_fasterTransformers_own_backend_opens_the_path_as_it_is(tmp_path: Path) -> None:  # noqa: N802
    repository = export(tmp_path)
    (model,) = find_served_models(repository, follows_moves=False)
    assert model.checkpoint == repository / "fastertransformer" / "1" / "1-gpu"
    config = repository / "fastertransformer" / "config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "1/1-gpu"', 'string_value: "/nowhere/1-gpu"'))
    with pytest.raises(ArtefactError, match=r"/nowhere/1-gpu/config\.ini is missing"):
        find_served_models(repository, follows_moves=False)


def test_config_ini_may_have_comments_and_tasks(tmp_path: Path) -> None:
    (tmp_path / "config.ini").write_text(
        "[gpt]\nmax_pos_seq_len=2048 ;for position embedding tables\nhead_num = 12\nnum_tasks=2\n"
        "[task_0]\ntask_name=sentiment\nprompt_length=10\n[task_1]\ntask_name=squad\nprompt_length=16"
    )
    family, config, tasks = read_config(tmp_path)
    assert family == "gpt" and config["max_pos_seq_len"] == "2048"
    assert tasks == {"sentiment": 10, "squad": 16}


@pytest.mark.parametrize(
    ("sections", "family", "key"),
    [("[gptj]\nhead_num=16\n", "gptj", "head_num"), ("[gptneox]\nhead_num=64\n", "gptneox", "head_num"),
     ("[encoder]\nd_model=8\n[decoder]\nd_model=9\n[structure]\nt5_with_bias=1\n", "t5", "d_model"),
     ("[encoder]\nd_model=8\n", "t5", "d_model")],
)  # fmt: skip
def test_every_family_has_its_section(tmp_path: Path, sections: str, family: str, key: str) -> None:
    (tmp_path / "config.ini").write_text(sections)
    found, config, tasks = read_config(tmp_path)
    assert (found, tasks) == (family, {}) and key in config
    (tmp_path / "config.ini").write_text("[bert]\nhead_num = 12\n")
    with pytest.raises(ArtefactError, match="none of the sections gpt, gptj, gptneox, llama, decoder, encoder"):
        read_config(tmp_path)


def build_encoder() -> Any:
    return T5EncoderModel(random_t5().config).eval()


OTHER_FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "GPT-J": (lambda: build("gptj"), "model.layers.1.mlp.dense_4h_to_h.weight.1.bin"),
    "GPT-NeoX": (lambda: build("gpt_neox", hidden_act="gelu_new"), "model.layers.0.mlp.attention.bias.sum.bin"),
    "T5": (random_t5, "decoder.block.1.layer.1.EncDecAttention.k.weight.0.bin"),
    "T5-Encoder": (build_encoder, "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight.1.bin"),
}


@pytest.mark.parametrize("model_type", OTHER_FAMILIES)
def test_shards_of_every_family_are_proved_without_a_manifest(tmp_path: Path, model_type: str) -> None:
    """The files are those that tests/support writes from transformers' weights, by FasterTransformer's converters."""
    make, shard = OTHER_FAMILIES[model_type]
    shards = write_family(make(), tmp_path / "fastertransformer" / "1", 2)
    parameters = {"tensor_para_size": "2", "model_type": model_type}
    (tmp_path / "fastertransformer" / "config.pbtxt").write_text(
        'name: "fastertransformer" backend: "fastertransformer" '
        + " ".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in parameters.items())
    )
    assert prove(tmp_path) == 0, "no digest vouches for a shard"
    content = (shards / shard).read_bytes()
    for damage, words in ((b"", "0 bytes instead of"), (content + b"\0", "bytes instead of"), (None, "missing")):
        (shards / shard).unlink()
        if damage is not None:
            (shards / shard).write_bytes(damage)
        with pytest.raises(ArtefactError, match=rf"1 of \d+ shards .*\n  {re.escape(shard)}  .*{words}"):
            prove(tmp_path)
    (shards / shard).write_bytes(content)
    Manifest("ft_checkpoint", record_files(shards), made_by={"version": "test"}).write(shards)
    assert prove(tmp_path) == len(list(shards.glob("*.bin")))
    (shards / shard).write_bytes(bytes(reversed(content)))
    with pytest.raises(ArtefactError, match=re.escape(shard) + "  content differs"):
        prove(tmp_path)


def test_a_repository_without_the_engine_is_refused(tmp_path: Path) -> None:
    repository = export(tmp_path)
    (repository / "fastertransformer" / "config.pbtxt").unlink()
    with pytest.raises(ArtefactError, match="no model with backend 'fastertransformer'"):
        find_served_models(repository)


def test_a_served_model_knows_its_parallelism(tmp_path: Path) -> None:
    (model,) = find_served_models(export(tmp_path, "fp16/4"))
    assert isinstance(model, ServedModel)
    assert (model.tensor_para_size, model.max_batch_size, model.name) == (4, 4, "fastertransformer")
    assert replace(model, parameters={"tensor_para_size": "2"}).tensor_para_size == 2


def test_a_tokenizer_that_is_not_where_the_server_would_look_is_named_with_its_place(tmp_path: Path) -> None:
    """FasterTransformer backend's GPT-NeoX store has the parameter, relative to where it was first served from."""
    repository = export(tmp_path)
    config, file = repository / "preprocessing" / "config.pbtxt", repository / "preprocessing" / "1" / "vocab.json"
    usual = config.read_text()

    def point_to(path: str) -> None:
        config.write_text(usual + f'parameters {{ key: "tokenizer_path" value {{ string_value: "{path}" }} }}\n')

    point_to("all_models/gptneox/preprocessing/1/vocab.json")
    with pytest.raises(ArtefactError, match="tokenizer_path = 'all_models/.*working directory") as refused:
        find_served_models(repository)
    assert str(file) in refused.value.hint
    for good in (str(file), "../preprocessing/1/vocab.json"):
        point_to(good)
        assert len(find_served_models(repository)) == 1
