"""NeMo's and Megatron-LM's checkpoints as Hugging Face directories: transformers computes what training's code did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.megatron_checkpoints import LAYERS as GPT2_LAYERS
from support.checkpoints.megatron_checkpoints import POSITIONS as GPT2_POSITIONS
from support.checkpoints.megatron_checkpoints import write as write_megatron
from support.checkpoints.megatron_core import core_forward
from support.checkpoints.nemo_archive import HEAD_SIZE, HEADS, NEMO, VOCAB, write_gpt, write_nemo
from support.checkpoints.nemo_positions import IDS, turned, without_positions, write
from support.shards.gpt2_checkpoint import random_gpt2
from support.tiny_models.t5_models import (
    DECODER_IDS,
    ENCODER_IDS,
    VOCABULARY,
    Saving,
    huggingface_t5,
    logits_of,
    nemo_states,
    plain_from_huggingface,
    relative_config,
)
from support.tiny_models.t5_models import HEADS as T5_HEADS
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.errors import CheckpointError

DEMO = Path(__file__).resolve().parents[2] / "examples" / "gpt3_demo" / "checkpoints" / "gpt3_demo.nemo"
SENTENCES = ("Thank you for inviting me.", "  two spaces, naïve café\n½ 你好 🙂", "", "don't 12345")
T5_FORMS = [
    (Saving(), "geglu", "gated-gelu", True),
    (Saving(tensor=2, has_fused_gate=True), "swiglu", "gated-silu", False),
    (Saving(tensor=2, pipeline=4), "relu", "relu", True),
]


def to_huggingface(source: Path, output: Path, data_type: str = "fp32", **more: Any) -> Path:
    convert(ConvertArguments(source, output, 1, data_type, format="huggingface", **more))
    return output


def logits(directory: Path, ids: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        computed: np.ndarray = model(torch.from_numpy(ids)).logits.numpy()
    return computed


def config_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


@pytest.mark.parametrize(
    "name", ["gpt122_tp1_pp1", "gpt_tp2_pp1", "gpt_tp1_pp2", "gpt_untied", "gpt_O2_bf16", "gpt_spm"]
)
def test_transformers_computes_nemos_logits(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The logits beside the archives are those that NeMo's own code computed."""
    output = to_huggingface(NEMO / f"{name}.nemo", tmp_path / "hf")
    ids, expected = (np.load(NEMO / f"{name}.{part}.npy") for part in ("input_ids", "logits"))
    rows = config_of(output)["vocab_size"]
    assert int(ids.max()) < rows <= expected.shape[-1]
    limit = 0.1 if "bf16" in name else 1e-5 * max(1, np.abs(expected).max())  # that one was computed in bf16
    assert np.abs(logits(output, ids) - expected[..., :rows]).max() < limit
    if rows < expected.shape[-1]:
        said = capsys.readouterr().err
        assert f"{expected.shape[-1] - rows} rows of padding of the {expected.shape[-1]} are left out" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_demonstration_checkpoint_is_what_its_card_computed(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DEMO.parents[2]))
    scorer = __import__("score_with_huggingface")
    model, tokenizer = scorer.load(DEMO)
    source = DEMO if ranks == 1 else cut_in_two(tmp_path / "two.nemo")
    output = to_huggingface(source, tmp_path / "hf")
    ids = np.array([tokenizer("Thank you for inviting me to the party, she said.")["input_ids"]])
    with torch.no_grad():
        expected = model.float()(torch.from_numpy(ids)).logits.numpy()
    rows = config_of(output)["vocab_size"]
    assert rows == 8000
    assert np.abs(logits(output, ids) - expected[..., :rows]).max() < 1e-5
    ours = AutoTokenizer.from_pretrained(output)
    assert [ours(text).input_ids for text in SENTENCES] == [tokenizer(text)["input_ids"] for text in SENTENCES]
    assert ours.eos_token == "<|endoftext|>"


def test_the_document_shows_what_the_demonstration_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = (DEMO.parents[3] / "docs/sources.md").read_text()
    path = to_huggingface(DEMO, tmp_path / "hf", "bf16")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("convert: ")]
    assert f"```\n{chr(10).join(said)}\n```" in document
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    words = tokenizer("Once upon a time", return_tensors="pt")
    assert f"`{tokenizer.decode(model.float().generate(**words, max_new_tokens=20)[0])}`" in document


def cut_in_two(path: Path) -> Path:
    """The demonstration as two training ranks of Megatron would have saved it."""
    import io
    import tarfile

    import yaml

    with tarfile.open(DEMO) as tar:
        files = {member.name.removeprefix("./"): tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]
    config = {**yaml.safe_load(files.pop("model_config.yaml")), "tensor_model_parallel_size": 2}
    state = torch.load(io.BytesIO(files.pop("model_weights.ckpt")), weights_only=True)
    columns = ("attention.dense.weight", "dense_4h_to_h.weight")
    rows = (
        "word_embeddings.weight",
        "query_key_value.weight",
        "query_key_value.bias",
        "h_to_4h.weight",
        "h_to_4h.bias",
    )

    def share(key: str, value: torch.Tensor, rank: int) -> torch.Tensor:
        axis = 1 if key.endswith(columns) else 0 if key.endswith(rows) else None
        return value if axis is None else value.chunk(2, axis)[rank].clone()

    states = {
        f"mp_rank_{rank:02d}/model_weights.ckpt": {key: share(key, value, rank) for key, value in state.items()}
        for rank in range(2)
    }
    return write_nemo(path, config, states, files=files)


@pytest.mark.parametrize("grid", [(1, 1), (2, 2)])
def test_megatron_lms_ranks_become_the_model_that_they_were_cut_of(grid: tuple[int, int], tmp_path: Path) -> None:
    model = random_gpt2(n_layer=GPT2_LAYERS, n_positions=GPT2_POSITIONS)
    output = to_huggingface(write_megatron(tmp_path / "gpt", model, 3.0, grid), tmp_path / "hf")
    made = load_file(output / "model.safetensors")
    given = {key: value for key, value in model.state_dict().items() if key in made}
    assert len(given) == len(made)
    rows = made["transformer.wte.weight"].shape[0]
    assert all(torch.equal(made[key], given[key][: len(made[key])]) for key in made)
    assert rows == config_of(output)["vocab_size"]


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_rotary_gpt_becomes_gptneox(is_tied: bool, tmp_path: Path) -> None:
    state = without_positions()
    if not is_tied:
        state["model.output_layer.weight"] = torch.randn(VOCAB, HEADS * HEAD_SIZE)
    settings = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": is_tied}
    output = to_huggingface(write(tmp_path / "g.nemo", state, **settings), tmp_path / "hf")
    config = config_of(output)
    assert (config["model_type"], config["tie_word_embeddings"]) == ("gpt_neox", is_tied)
    ids = IDS % config["vocab_size"]
    expected = core_forward(state, ids, HEADS, 0, turned(HEAD_SIZE))[..., : config["vocab_size"]]
    assert np.abs(logits(output, ids) - expected).max() < 1e-4


def test_norms_that_are_stored_less_one_are_written_whole(tmp_path: Path) -> None:
    source = write_gpt(tmp_path / "g.nemo", normalization="layernorm1p")
    plain = to_huggingface(write_gpt(tmp_path / "p.nemo"), tmp_path / "plain")
    made, stored = (load_file(path / "model.safetensors") for path in (to_huggingface(source, tmp_path / "hf"), plain))
    for key in made:
        is_norm = "ln_" in key and key.endswith("weight")
        assert torch.equal(made[key], stored[key] + 1 if is_norm else stored[key]), key


def test_the_exact_gelu_stays_the_exact_one(tmp_path: Path) -> None:
    fused = to_huggingface(write_gpt(tmp_path / "f.nemo"), tmp_path / "fused")
    exact = to_huggingface(write_gpt(tmp_path / "e.nemo", bias_activation_fusion=False), tmp_path / "exact")
    assert [config_of(path)["activation_function"] for path in (fused, exact)] == ["gelu_new", "gelu"]


@pytest.mark.parametrize(("saving", "activation", "kind", "is_untied"), T5_FORMS)
def test_nemos_t5_with_rms_norm_becomes_t5(
    saving: Saving, activation: str, kind: str, is_untied: bool, tmp_path: Path
) -> None:
    model = huggingface_t5(is_multilingual=True, is_untied=is_untied, feed_forward_proj=kind, num_decoder_layers=4)
    states = nemo_states(plain_from_huggingface(model), T5_HEADS, saving)
    source = write_nemo(tmp_path / "t5.nemo", relative_config(saving, activation), states, files=VOCABULARY)
    output = to_huggingface(source, tmp_path / "hf")
    again = AutoModelForSeq2SeqLM.from_pretrained(output).eval()
    assert config_of(output)["decoder_start_token_id"] == 2  # [CLS]
    assert np.abs(logits_of(again) - logits_of(model)).max() < 1e-5
    assert ENCODER_IDS.size and DECODER_IDS.size


def test_nemos_t5_keeps_its_largest_distance(tmp_path: Path) -> None:
    model = huggingface_t5(
        is_multilingual=True, feed_forward_proj="gated-gelu", num_decoder_layers=4, relative_attention_max_distance=6
    )
    states = nemo_states(plain_from_huggingface(model), T5_HEADS, Saving())
    config = relative_config(Saving(), "geglu", relative_attention_max_distance=6)
    source = write_nemo(tmp_path / "t5.nemo", config, states, files=VOCABULARY)
    again = AutoModelForSeq2SeqLM.from_pretrained(to_huggingface(source, tmp_path / "hf")).eval()
    assert np.abs(logits_of(again) - logits_of(model)).max() < 1e-5
    with pytest.raises(CheckpointError, match=r"encoder.relative_attention_max_distance: 6  \("):
        convert(ConvertArguments(source, tmp_path / "1-gpu", 1, "fp32"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("t5_abs.nemo", ["T5ForConditionalGeneration: normalization: layernorm", "position_embedding_type: absolute"]),
        ("alibi", ["BloomForCausalLM: has_pre_decoder_layernorm: False", "GPT2LMHeadModel: positions: alibi"]),
    ],
)
def test_what_transformers_cannot_express_is_refused_by_field_and_value(
    source: str, words: list[str], tmp_path: Path
) -> None:
    path = NEMO / source
    if source == "alibi":
        path = write(tmp_path / "g.nemo", without_positions(), position_embedding_type="alibi")
    with pytest.raises(CheckpointError, match="no architecture of transformers can express") as refused:
        to_huggingface(path, tmp_path / "hf")
    assert all(word in str(refused.value) for word in words)
    assert not (tmp_path / "hf").exists()


def test_prompt_tables_are_not_dropped_silently(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    folder.mkdir()
    for name in ("gpt122_tp1_pp1.nemo", "ptuning_mlp.nemo"):
        (folder / name).write_bytes((NEMO / name).read_bytes())
    with pytest.raises(CheckpointError, match="no place for .* tensors beside the model: model.prompt_table"):
        to_huggingface(folder, tmp_path / "hf")


@pytest.mark.parametrize("damage", ["nan", "overflow"])
def test_a_number_that_cannot_be_written_is_named(damage: str, tmp_path: Path) -> None:
    from support.checkpoints.nemo_archive import gpt_state

    state = gpt_state()
    key = "model.language_model.encoder.layers.1.mlp.dense_h_to_4h.weight"
    state[key][3, 1] = float("nan") if damage == "nan" else 1e6
    what = "holds 1 values that are NaN or infinite" if damage == "nan" else "overflows fp16"
    with pytest.raises(CheckpointError, match=f"transformer.h.1.mlp.c_fc.weight {what}"):
        to_huggingface(write_gpt(tmp_path / "g.nemo", state), tmp_path / "hf", "fp16")
    assert not (tmp_path / "hf" / "manifest.json").exists()
    assert not list((tmp_path / "hf").glob("*.safetensors"))


def test_sentencepiece_gives_its_own_ids_through_autotokenizer(tmp_path: Path) -> None:
    import tarfile

    import sentencepiece

    output = to_huggingface(NEMO / "gpt_spm.nemo", tmp_path / "hf")
    with tarfile.open(NEMO / "gpt_spm.nemo") as tar:
        model = next(tar.extractfile(member).read() for member in tar if member.name.endswith(".model"))  # type: ignore[union-attr]
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    for text in SENTENCES:
        assert tokenizer(text).input_ids == pieces.encode(text), text
    assert (output / "tokenizer.model").read_bytes() == model
