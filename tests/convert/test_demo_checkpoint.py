"""The demonstration checkpoints are what their model cards say, and Hugging Face computes the cards' figures."""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SUBSET = EXAMPLES / "data" / "lambada_subset.jsonl"


@pytest.fixture(scope="module")
def import_example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module


ARCHIVES, DIRECTORIES = ["gpt3_demo", "llama_demo"], ["moe_demo"]


@pytest.fixture(scope="module", params=ARCHIVES + DIRECTORIES)
def demo(request: pytest.FixtureRequest) -> Path:
    return EXAMPLES / request.param


@pytest.fixture(scope="module")
def checkpoint(demo: Path) -> Path:
    return demo / "checkpoints" / (f"{demo.name}.nemo" if demo.name in ARCHIVES else "")


@pytest.fixture(scope="module")
def card(demo: Path) -> dict[str, Any]:
    return json.loads((demo / "model_card.json").read_text())


@pytest.fixture(scope="module")
def members(checkpoint: Path) -> dict[str, bytes]:
    """Files of an archive, or of a directory that are not in folders of it."""
    if checkpoint.is_dir():
        return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
    with tarfile.open(checkpoint) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}


def test_the_card_names_this_file_and_it_is_small(demo: Path, card: dict[str, Any]) -> None:
    content = (demo / card["checkpoint"]["file"]).read_bytes()
    assert len(content) == card["checkpoint"]["size_bytes"] <= 16_000_000
    assert hashlib.sha256(content).hexdigest() == card["checkpoint"]["sha256"]


@pytest.mark.parametrize("demo", ARCHIVES, indirect=True)
def test_it_is_a_nemo_archive_of_the_documented_architecture(card: dict[str, Any], members: dict[str, bytes]) -> None:
    config = yaml.safe_load(members["./model_config.yaml"])
    tokenizer = [config["tokenizer"][key].removeprefix("nemo:") for key in ("vocab_file", "merge_file")]
    assert all(re.fullmatch(r"[0-9a-f]{32}_(vocab\.json|merges\.txt)", name) for name in tokenizer)
    assert set(members) == {"./model_config.yaml", "./model_weights.ckpt", *(f"./{name}" for name in tokenizer)}
    keys = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "max_position_embeddings")
    model = card["model"]
    assert config["num_query_groups"] == model.get("groups")
    assert [config[key] for key in keys] == [model[k] for k in ("layers", "hidden", "heads", "ffn", "positions")]
    vocabulary = json.loads(members[f"./{tokenizer[0]}"])
    assert len(vocabulary) == model["vocabulary"]
    assert vocabulary["<|endoftext|>"] == model["vocabulary"] - 1

    weights = torch.load(io.BytesIO(members["./model_weights.ckpt"]), weights_only=True)
    prefix = "model." if config["mcore_gpt"] else "model.language_model."
    embedding = weights[f"{prefix}embedding.word_embeddings.weight"]
    assert embedding.shape == (model["padded_vocabulary"], model["hidden"])
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert sum(tensor.numel() for tensor in weights.values()) == model["parameters"]


@pytest.mark.parametrize("demo", DIRECTORIES, indirect=True)
def test_it_is_a_directory_of_megatron_lm(
    demo: Path, checkpoint: Path, card: dict[str, Any], members: dict[str, bytes]
) -> None:
    assert set(members) == {"latest_checkpointed_iteration.txt", "vocab.json", "merges.txt"}
    folder = (demo / card["checkpoint"]["file"]).parent
    assert folder == checkpoint / f"iter_{int(members['latest_checkpointed_iteration.txt']):07d}"
    arguments = vars(torch.load(folder / "common.pt", weights_only=False)["args"])
    written = yaml.safe_load((demo / "arguments.yaml").read_text())
    assert arguments == written
    keys = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "moe_ffn_hidden_size")
    keys += ("num_experts", "moe_router_topk", "max_position_embeddings", "vocab_size", "padded_vocab_size")
    words = ("layers", "hidden", "heads", "groups", "ffn", "experts", "used", "positions", "vocabulary")
    assert [arguments[key] for key in keys] == [card["model"][word] for word in (*words, "padded_vocabulary")]
    vocabulary = json.loads(members["vocab.json"])
    assert len(vocabulary) == arguments["vocab_size"] == vocabulary["<|endoftext|>"] + 1
    tensors: Any = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert {tensor.properties.dtype for tensor in tensors.values()} == {torch.float16}
    assert sum(tensor.size.numel() for tensor in tensors.values()) == card["model"]["parameters"]


def test_hugging_face_computes_the_figures_of_the_card(
    checkpoint: Path, card: dict[str, Any], import_example: Any
) -> None:
    scorer: ModuleType = import_example("score_with_huggingface")
    recorded = card["lambada"][SUBSET.name]
    assert hashlib.sha256(SUBSET.read_bytes()).hexdigest() == recorded["sha256"]
    expected = recorded["first_samples"]
    texts = scorer.read_texts(SUBSET)[: len(expected)]
    model, tokenizer = scorer.load(checkpoint)
    computed, grams = scorer.score_texts(model, tokenizer, texts)
    assert len(computed) == 20
    with torch.no_grad():  # every text by itself, and every run of tokens by a loop
        rows = [tuple(tokenizer(text)["input_ids"]) for text in texts]
        hits = [
            (model(torch.tensor([ids])).logits[0, :-1].argmax(-1) == torch.tensor(ids[1:])).tolist() for ids in rows
        ]
    runs = [row[place] and row[place + 1] for row in hits for place in range(len(row) - 1)]
    assert grams["2-gram_accuracy"] == pytest.approx(sum(runs) / len(runs)) and sum(runs)
    for ours, theirs in zip(computed, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_the_llamas_adapter_is_what_its_card_says(import_example: Any) -> None:
    demo = EXAMPLES / "llama_demo"
    card = json.loads((demo / "model_card.json").read_text())["adapters"]["verse"]
    content = (demo / card["file"]).read_bytes()
    assert len(content) == card["size_bytes"] <= 250_000 and hashlib.sha256(content).hexdigest() == card["sha256"]
    scorer: ModuleType = import_example("score_with_huggingface")
    model, tokenizer = scorer.load(demo / "checkpoints" / "llama_demo.nemo")
    prompt = tokenizer(card["prompt"], return_tensors="pt")
    told = {"max_new_tokens": 48, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    answers = [tokenizer.decode(model.generate(**prompt, **told)[0])]
    scorer.merge(model, (demo / card["file"]).parent)
    answers.append(tokenizer.decode(model.generate(**prompt, **told)[0]))
    assert answers == [card["prompt"] + card[part] for part in ("model_says", "adapter_says")]
    recorded = card["lambada"][SUBSET.name]["first_samples"][:5]
    computed, _ = scorer.score_texts(model, tokenizer, scorer.read_texts(SUBSET)[:5])
    for ours, theirs in zip(computed, recorded, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_what_was_served_for_the_reference_report_scores_as_hugging_face_does() -> None:
    """All texts of the full file, through the ensemble on one side and by Hugging Face's forward pass on the other."""
    card = json.loads((EXAMPLES / "gpt3_demo" / "model_card.json").read_text())
    with (EXAMPLES.parent / "results" / "reference" / "demo" / "lambada.csv").open(encoding="utf-8") as stream:
        served = {row["name"]: float(row["value"]) for row in csv.DictReader(stream)}
    recorded = {name: card["lambada"]["lambada_test.jsonl"][name] for name in served}
    assert len(served) == 10
    for name, value in served.items():
        assert value == pytest.approx(recorded[name], rel=1e-5 if name.endswith("perplexity") else 1e-12), name


def test_an_archive_of_the_training_script_holds_the_function_that_was_trained(
    tmp_path: Path, demo: Path, members: dict[str, bytes], import_example: Any
) -> None:
    for name, content in members.items():
        if name.endswith(("vocab.json", "merges.txt")):
            (tmp_path / name.rpartition("_")[2]).write_bytes(content)
    trainer, huggingface = import_example("train_demo"), import_example("huggingface_models")
    torch.manual_seed(0)
    build, more = trainer.MODELS[demo.name]
    size = len(json.loads((tmp_path / "vocab.json").read_text()))
    groups = {"groups": 2} if "groups" in more else {}
    mixture = {name: more[name] for name in ("experts", "used") if name in more}
    dims = trainer.Dims(size, layers=2, hidden=32, heads=4, inner=64, positions=16, **groups, **mixture)
    model = build(dims)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.1 * torch.randn_like(parameter)).copy_(parameter.half().float())
        for module in model.modules():
            if hasattr(module, "trained_bias"):
                module.query_key_value.bias.mul_(module.trained_bias)
        path = tmp_path / (demo.name if mixture else f"{demo.name}.nemo")
        (trainer.save_megatron if mixture else trainer.save_nemo)(model, dims, tmp_path, path)
        loaded, _ = huggingface.load(path)
        ids = torch.randint(size, (3, 16))
        torch.testing.assert_close(loaded(ids).logits, model.eval()(ids), atol=1e-4, rtol=1e-4)
