"""Conversion to Hugging Face: the bytes that transformers saved come back, and transformers computes the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models.huggingface_models import logits, save
from support.tiny_models.t5_models import huggingface_t5, logits_of

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.write.journal import FILE_NAME as JOURNAL
from export_scripts.conversion.write.journal import GROWING
from export_scripts.convert import convert
from handover.errors import CheckpointError
from handover.manifest import Manifest

INPUT_IDS = np.array([[11, 3, 95, 0, 42, 17, 17, 8], [1, 2, 3, 90, 60, 30, 20, 5]])
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2_untied": ("gpt2", {"tie_word_embeddings": False}),
    "opt": ("opt", {}),
    "opt_post_norm": ("opt", {"do_layer_norm_before": False}),
    "bloom": ("bloom", {}),
    "xglm": ("xglm", {}),
    "gptj": ("gptj", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox_serial": ("gpt_neox", {"use_parallel_residual": False}),
}
# Through FasterTransformer's shards these come back as another architecture, or with other numbers of equal effect.
OTHERWISE = {
    "xglm": "GPT2LMHeadModel",
    "gpt_bigcode": "GPT2LMHeadModel",
}


def to_huggingface(source: Path, output: Path, data_type: str = "fp32", **more: Any) -> Path:
    convert(ConvertArguments(source, output, 1, data_type, format="huggingface", **more))
    return output


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def loaded(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory).eval()


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, "rope_parameters: proportional"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
        ("opt", {"activation_function": "silu"}, "activation_function: silu"),
    ],
)
def test_what_no_shards_can_hold_is_copied_key_by_key(
    family: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save(family, tmp_path / "source", **changes)
    output = to_huggingface(tmp_path / "source", tmp_path / "hf")
    assert np.array_equal(logits(loaded(output), INPUT_IDS), logits(loaded(tmp_path / "source"), INPUT_IDS))
    with pytest.raises(CheckpointError, match=named) as refused:
        convert(ConvertArguments(tmp_path / "source", tmp_path / "1-gpu", 1, "fp32"))
    assert refused.value.hint == "export.model.format=huggingface keeps it"


def test_a_t5_with_another_largest_distance_is_copied_key_by_key(tmp_path: Path) -> None:
    huggingface_t5(relative_attention_max_distance=16).save_pretrained(tmp_path / "source")
    to_huggingface(tmp_path / "source", tmp_path / "hf")
    about = json.loads((tmp_path / "hf/config.json").read_text())
    assert about["relative_attention_max_distance"] == 16
    given, made = tensors(tmp_path / "source"), tensors(tmp_path / "hf")
    assert made.keys() == given.keys() and all(torch.equal(made[key], given[key]) for key in given)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("data_type", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_model_of_transformers_comes_back_byte_for_byte(
    name: str, data_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    family, changes = MODELS[name]
    model = save(family, tmp_path / "source", dtype=dtype, **changes)
    output = to_huggingface(tmp_path / "source", tmp_path / "hf", data_type)
    given, made = tensors(tmp_path / "source"), tensors(output)
    assert made.keys() == given.keys()
    assert all(torch.equal(made[key], given[key]) and made[key].dtype == dtype for key in given)
    assert json.loads((output / "config.json").read_text())["architectures"] == [type(model).__name__]
    assert np.array_equal(logits(loaded(output), INPUT_IDS), logits(loaded(tmp_path / "source"), INPUT_IDS))


@pytest.mark.parametrize("name", MODELS)
def test_shards_of_two_ranks_become_what_transformers_saved(name: str, tmp_path: Path) -> None:
    """The tables of targets are held against transformers here: no source of Hugging Face goes through them."""
    family, changes = MODELS[name]
    model = save(family, tmp_path / "source", **changes)
    convert(ConvertArguments(tmp_path / "source", tmp_path / "2-gpu", 2, "fp32"))
    output = to_huggingface(tmp_path / "2-gpu", tmp_path / "hf")
    again = loaded(output)
    assert np.abs(logits(again, INPUT_IDS) - logits(model, INPUT_IDS)).max() < 1e-5
    assert type(again).__name__ == OTHERWISE.get(name, type(model).__name__)
    if name in OTHERWISE:
        return
    given, made = tensors(tmp_path / "source"), tensors(output)
    assert made.keys() == given.keys()
    differing = {key for key in given if not torch.equal(made[key], given[key])}
    assert {key for key in differing if not key.endswith(unlike(name))} == set()


def unlike(name: str) -> tuple[str, ...]:
    """Ends of the names of tensors that shards do not hold as they were."""
    if name == "gpt_neox":  # the two biases are one sum
        return ("attention.dense.bias", "mlp.dense_4h_to_h.bias")
    return ("embed_positions.weight",) if name.startswith("opt") else ()  # two rows that no position uses


def test_a_directory_that_was_written_is_a_source_again(tmp_path: Path) -> None:
    save("gptj", tmp_path / "source")
    output = to_huggingface(tmp_path / "source", tmp_path / "hf")
    for source in (tmp_path / "source", output):
        convert(ConvertArguments(source, tmp_path / f"of_{source.name}", 2, "fp16"))
    shards = {path.name: path.read_bytes() for path in (tmp_path / "of_source").glob("*.bin")}
    assert shards
    assert shards == {path.name: path.read_bytes() for path in (tmp_path / "of_hf").glob("*.bin")}


def test_files_of_a_limited_size_have_an_index(tmp_path: Path) -> None:
    model = save("gpt2", tmp_path / "source")
    output = to_huggingface(tmp_path / "source", tmp_path / "hf", largest_file_bytes=30_000)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in output.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    for name in files:
        held = load_file(output / name)
        assert set(held) == {key for key, where in index["weight_map"].items() if where == name}
        assert sum(tensor.nbytes for tensor in held.values()) <= 30_000
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors(output).values())
    assert np.array_equal(logits(loaded(output), INPUT_IDS), logits(model, INPUT_IDS))


def test_a_model_in_pytorchs_file_becomes_safetensors(tmp_path: Path) -> None:
    model = save("gpt2", tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "source" / "pytorch_model.bin")
    output = to_huggingface(tmp_path / "source", tmp_path / "hf", "fp16")
    expected = {key: value.half() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    made = tensors(output)
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[key], expected[key]) for key in expected)


def test_a_projected_embedding_stays_apart_from_its_projection(tmp_path: Path) -> None:
    """OPT-350m's: FasterTransformer's shards hold the product, its own architecture both factors."""
    save("opt", tmp_path / "source", word_embed_proj_dim=16, do_layer_norm_before=False)
    given, made = tensors(tmp_path / "source"), tensors(to_huggingface(tmp_path / "source", tmp_path / "hf"))
    assert {"model.decoder.project_in.weight", "model.decoder.project_out.weight"} <= given.keys() == made.keys()
    assert all(torch.equal(made[key], given[key]) for key in given)


T5S: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5_v1_1": {"is_untied": True, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "ul2": {"is_untied": True, "feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
}


@pytest.mark.parametrize("name", T5S)
@pytest.mark.parametrize("is_by_shards", [False, True])
def test_t5_comes_back_from_its_directory_and_from_shards(name: str, is_by_shards: bool, tmp_path: Path) -> None:
    from transformers import T5ForConditionalGeneration

    model = huggingface_t5(**T5S[name])
    model.save_pretrained(tmp_path / "source")
    source = tmp_path / "source"
    if is_by_shards:
        source = tmp_path / "2-gpu"
        convert(ConvertArguments(tmp_path / "source", source, 2, "fp32"))
    output = to_huggingface(source, tmp_path / "hf")
    given, made = tensors(tmp_path / "source"), tensors(output)
    assert made.keys() == given.keys()
    assert all(torch.equal(made[key], given[key]) for key in given)
    again = T5ForConditionalGeneration.from_pretrained(output).eval()
    assert np.abs(logits_of(again) - logits_of(model)).max() < 1e-6


def test_scaled_logits_of_a_head_of_its_own_are_refused(tmp_path: Path) -> None:
    """FasterTransformer's T5 can have both; transformers scales the logits of a tied head alone."""
    huggingface_t5().save_pretrained(tmp_path / "source")
    convert(ConvertArguments(tmp_path / "source", tmp_path / "1-gpu", 1, "fp32"))
    (tmp_path / "1-gpu" / "manifest.json").unlink()
    head = np.fromfile(tmp_path / "1-gpu" / "lm_head.weight.bin", "<f4")
    head[5] += 1
    head.tofile(tmp_path / "1-gpu" / "lm_head.weight.bin")
    with pytest.raises(CheckpointError, match="lm_head.weight differs from the embedding, and logits are scaled"):
        to_huggingface(tmp_path / "1-gpu", tmp_path / "hf")


def large_source(path: Path) -> Path:
    """A GPT-2 of 0.4 GB, of more parts than one."""
    save("gpt2", path, vocab_size=120_000, n_embd=512, n_layer=4, n_positions=64, n_head=8)
    return path


def test_a_conversion_that_was_killed_in_a_file_continues_there(tmp_path: Path) -> None:
    source, output = large_source(tmp_path / "source"), tmp_path / "hf"
    arguments = ConvertArguments(source, output, 1, "fp32", processes=2, format="huggingface")
    process = subprocess.Popen(
        [sys.executable, "-m", "export_scripts.convert", *arguments.to_argv()], stderr=subprocess.DEVNULL
    )
    growing = output / f"model.safetensors{GROWING}"
    while not (output / JOURNAL).is_file() or (output / JOURNAL).read_text().count('"offset"') < 2:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert growing.is_file()
    assert not (output / "model.safetensors").exists(), "what is not whole does not have the name that is loaded"
    lines = [json.loads(line) for line in (output / JOURNAL).read_text().split("\n")[1:]]
    parts = [line for line in lines if "offset" in line]
    damaged, kept = parts[0], parts[1]
    with growing.open("r+b") as file:
        file.seek(damaged["offset"] + 1000)
        file.write(b"damaged")
    inode = growing.stat().st_ino

    convert(arguments)
    convert(ConvertArguments(source, tmp_path / "whole", 1, "fp32", format="huggingface"))
    assert (output / "model.safetensors").stat().st_ino == inode, f"{kept} was kept"
    names = {path.name for path in output.iterdir()}
    assert names == {path.name for path in (tmp_path / "whole").iterdir()}
    assert all((output / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in names)
    assert Manifest.read(output).problems(output) == []


def test_a_format_that_is_not_written_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "export_scripts.convert", f"--checkpoint={tmp_path}", "--output=x", "--format=gguf"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert "--format=gguf is not written" in done.stderr
    assert "legal: fastertransformer, huggingface" in done.stderr


def test_random_weights_are_made_for_shards_alone(tmp_path: Path) -> None:
    from export_scripts.conversion.plan.random_weights import plan_random

    description = tmp_path / "model_config.yaml"
    sizes = "num_layers: 2\nhidden_size: 16\nnum_attention_heads: 2\nmax_position_embeddings: 8\nvocab_size: 300\n"
    description.write_text(sizes)
    assert plan_random(description, 1, "fp32"), "as shards they would be made"
    with pytest.raises(CheckpointError, match="are made for FasterTransformer's shards alone") as refusal:
        to_huggingface(description, tmp_path / "hf", random_weights=True)
    assert "leave export.model.format out" in str(refusal.value.hint)
    assert not (tmp_path / "hf").exists()


def test_what_concerns_shards_alone_is_not_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("opt", tmp_path / "source", word_embed_proj_dim=16, do_layer_norm_before=False, activation_function="gelu")
    to_huggingface(tmp_path / "source", tmp_path / "hf")
    said = capsys.readouterr().err
    assert "FasterTransformer" not in said and "NVIDIA" not in said
    assert " times " not in said
    convert(ConvertArguments(tmp_path / "source", tmp_path / "1-gpu", 1, "fp32"))
    said = capsys.readouterr().err
    assert "NVIDIA's library computes its tanh form" in said
    assert "project_out.weight, computed in fp32" in said


def test_a_given_tokenizer_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    save("gpt2", tmp_path / "source")
    given = tmp_path / "given"
    given.mkdir()
    (given / "vocab.json").write_text('{"<|endoftext|>": 7, "a": 3, "b": 4, "ab": 5}')
    (given / "merges.txt").write_text("#version: 0.2\na b\n")
    output = to_huggingface(tmp_path / "source", tmp_path / "hf", tokenizer=given)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer("abba<|endoftext|>").input_ids == [5, 4, 3, 7]
    assert (output / "vocab.json").read_bytes() == (given / "vocab.json").read_bytes()


def test_a_configuration_without_architectures_is_kept_so(tmp_path: Path) -> None:
    model = save("gpt2", tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key[0] != "a"}))
    output = to_huggingface(tmp_path / "source", tmp_path / "hf")
    assert "architectures" not in json.loads((output / "config.json").read_text())
    assert np.array_equal(logits(loaded(output), INPUT_IDS), logits(model, INPUT_IDS))


def test_t5s_sentencepiece_model_comes_back_with_its_end_token_and_sentinels(tmp_path: Path) -> None:
    """Its sentinels count down from the end of the published vocabularies: <extra_id_0> is 32099 of 32100."""
    import sentencepiece
    from transformers import AutoTokenizer

    source = tmp_path / "source"
    huggingface_t5(vocab_size=200).save_pretrained(source)
    with (source / "spiece.model").open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["abcdefgh hgfedcba", "the cat sat on the mat"] * 10),
            model_writer=model,
            vocab_size=60,
            hard_vocab_limit=False,
            minloglevel=5,
            **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        )
    convert(ConvertArguments(source, tmp_path / "1-gpu", 1, "fp32"))
    output = to_huggingface(tmp_path / "1-gpu", tmp_path / "hf")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(source / "spiece.model"))
    tokenizer = AutoTokenizer.from_pretrained(output)
    for text in ("the cat sat on the mat", "", "  abc  hgf ? "):
        assert tokenizer(text).input_ids == [*pieces.encode(text), 1]
    size = pieces.get_piece_size()
    assert tokenizer("the <extra_id_0>").input_ids == [*pieces.encode("the"), size + 99, 1]
    assert tokenizer.convert_tokens_to_ids("<extra_id_99>") == size
