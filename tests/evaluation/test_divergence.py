"""The served model over texts against its streamed source: figures, verdicts and causes.

Served by the real engine behind a fake Triton, or by a stand-in for an OpenAI API over transformers' model.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.measurements.parity_runs import RANKS, SIZE, serve, shards_of
from support.servers import openai_stand_in
from support.servers.fake_triton import Tensors
from support.servers.openai_stand_in import NAME, StandIn, serving
from support.tiny_models import llama_models
from support.tiny_models.huggingface_models import HEADS, HIDDEN, VOCAB, save
from support.tiny_models.llama_hub_models import save_llama

from evaluation.divergence.arguments import DivergenceArguments
from evaluation.divergence.corpus import make_passages, read_documents
from evaluation.divergence.figures import Divergence, bootstrap, compare
from evaluation.divergence.reference import open_reference
from evaluation.divergence.run import main
from evaluation.divergence.streamed import Scores
from evaluation.divergence.weights import compare_weights
from evaluation.tasks.metric import FAILS, HOLDS, INCONCLUSIVE
from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.user_files import NOTHING_GIVEN
from export_scripts.convert import convert
from handover.errors import ConfigError, ServerError

INPUTS = ("input_ids", "is_return_context_log_probs", "num_context_top_log_probs")
QKV = "model.layers.1.attention.query_key_value.weight.{}.bin"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpt2")
    save("gpt2", directory / "source")
    shards_of(directory / "source", directory / "shards")
    rng = np.random.default_rng(5)
    lines = [json.dumps({"input_ids": rng.integers(3, VOCAB, 200).tolist()}) + "\n" for _ in range(3)]
    (directory / "texts.jsonl").write_text("".join(lines))
    return directory


def run(url: str, gpt2: Path, output: Path, **changes: Any) -> dict[str, Any]:
    given = {"data_path": gpt2 / "texts.jsonl", "references": gpt2 / "references", "samples": 24, **changes}
    arguments = DivergenceArguments(url, output, given.pop("checkpoint", gpt2 / "source"), **given)
    found: dict[str, Any] = {}
    try:
        main(arguments.to_argv())
    except ServerError as error:
        found["error"] = f"{error.problem}; {error.hint}"
    return found | dict(json.loads((output / "summary.json").read_text()))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as stream:
        return list(csv.DictReader(stream))


def test_a_sound_model_holds_and_every_table_is_there(gpt2: Path, tmp_path: Path) -> None:
    with serve(gpt2 / "shards", inputs=INPUTS) as fake:
        summary = run(fake.url, gpt2, tmp_path / "out")
        assert all(
            request["num_context_top_log_probs"].max() == 20 for request in fake.requests[1:]
        )  # one asks for room
    assert summary["verdict"] == HOLDS and summary["mean_kl"] < 1e-7 and summary["top1_flips"] == 0
    assert summary["cause"] == "" and "4 layers" in summary["reasons"][-1]
    assert 0.1 < summary["untold_mass"] < 0.9  # 20 of 96 tokens are told
    assert summary["perplexity"] == pytest.approx(summary["source_perplexity"], rel=1e-4)
    places = rows(tmp_path / "out" / "places.csv")
    lengths = [int(row["tokens"]) for row in rows(tmp_path / "out" / "by_length.csv")]
    assert lengths == [3, 6, 12, 24] and {int(row["position"]) for row in places} == set(range(1, 24))
    assert [int(row["from_position"]) for row in rows(tmp_path / "out" / "by_position.csv")] == [1, 2, 4, 8, 16]
    assert len(rows(tmp_path / "out" / "passages.csv")) == 24
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["verdict"] == HOLDS and "streamed" in metrics["source"]["computed_by"]


def test_swapped_heads_fail_and_the_layer_with_other_weights_is_named(gpt2: Path, tmp_path: Path) -> None:
    shards = shutil.copytree(gpt2 / "shards", tmp_path / "shards")
    weight = np.fromfile(shards / QKV.format(1), "<f4").reshape(HIDDEN, 3, HEADS // RANKS, SIZE)
    weight[:, 0, [0, 1]] = weight[:, 0, [1, 0]]
    weight.tofile(shards / QKV.format(1))
    with serve(shards, inputs=INPUTS) as fake:
        summary = run(fake.url, gpt2, tmp_path / "out")
    assert summary["verdict"] == FAILS and summary["cause"] == "weights"
    assert "the cause is the weights: layer 1 of" in summary["reasons"][-1]
    layers = {row["layer"]: float(row["difference"]) / float(row["limit"]) for row in rows(tmp_path / "out/layers.csv")}
    assert list(layers) == ["embedding", "0", "1", "head"]
    assert layers["1"] > 10 and max(layers["embedding"], layers["0"], layers["head"]) < 1


def test_an_engine_that_computes_something_else_with_sound_weights_is_the_cause(gpt2: Path, tmp_path: Path) -> None:
    """It reads another token in the place of one, and its files are the checkpoint's."""
    with serve(gpt2 / "shards", inputs=INPUTS) as fake:
        answer = fake.answer

        def shifted(tensors: Tensors) -> Any:
            return answer({**tensors, "input_ids": np.where(tensors["input_ids"] == 9, 8, tensors["input_ids"])})

        def mixed(tensors: Tensors) -> Tensors:
            found, sent = shifted(tensors), answer(tensors)
            assert isinstance(found, dict) and isinstance(sent, dict)
            return {**found, "output_ids": sent["output_ids"]}

        fake.answer = mixed
        summary = run(fake.url, gpt2, tmp_path / "out")
    assert summary["verdict"] == FAILS and summary["cause"] == "kernels"
    assert "the cause is what the server computes: 4 layers" in summary["reasons"][-1]


def test_bf16_holds_by_what_bf16_does_to_this_checkpoint(gpt2: Path, tmp_path: Path) -> None:
    with serve(gpt2 / "shards", inputs=INPUTS, data_type="bf16") as fake:
        summary = run(fake.url, gpt2, tmp_path / "out")
    assert summary["verdict"] == HOLDS and summary["source"]["served_formats"] == "bf16"
    assert summary["mean_kl"] > 1e-6  # in fp32 it would have failed


def test_a_norm_that_bf16_hides_is_found_by_its_layer(gpt2: Path, tmp_path: Path) -> None:
    """It is one in two hundred off: less than the texts show, and not what rounding to bf16 makes of the checkpoint."""
    shards = shards_of(gpt2 / "source", tmp_path / "shards", "bf16")
    with serve(shards, inputs=INPUTS, data_type="bf16") as fake:
        assert run(fake.url, gpt2, tmp_path / "sound")["verdict"] == HOLDS
    path = shards / "model.layers.0.input_layernorm.weight.bin"
    numbers = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.bfloat16)
    path.write_bytes((numbers.float() * 1.005).bfloat16().view(torch.uint8).numpy().tobytes())
    with serve(shards, inputs=INPUTS, data_type="bf16") as fake:
        summary = run(fake.url, gpt2, tmp_path / "out")
    assert summary["verdict"] == FAILS and len(summary["reasons"]) == 1
    assert "the cause is the weights: layer 0 of" in summary["reasons"][0]


def test_a_quantized_directory_is_held_to_what_its_quantization_does(gpt2: Path, tmp_path: Path) -> None:
    """Without the name of it nothing is concluded from texts that differ; another quantization's error is too much."""
    save_llama("llama", tmp_path / "source", torch.bfloat16)
    served = tmp_path / "served"
    arguments = ConvertArguments(tmp_path / "source", served, weight_data_type="bf16", format="huggingface")
    convert(replace(arguments, quantization="fp8"))
    given = {"checkpoint": tmp_path / "source", "served_weights": served, "references": tmp_path / "references"}
    with serve(served, "Llama", INPUTS, "bf16") as fake:
        unknown = run(fake.url, gpt2, tmp_path / "unknown", **given)
        known = run(fake.url, gpt2, tmp_path / "known", quantization="fp8", **given)
    assert unknown["verdict"] == INCONCLUSIVE and unknown["cause"] == "number format"
    assert known["verdict"] == HOLDS and known["source"]["served_formats"] == "bf16 with fp8 weights"
    assert all(float(row["difference"]) < 1e-5 for row in rows(tmp_path / "known" / "layers.csv"))
    assert not list((tmp_path / "references").rglob("weights*"))


@pytest.mark.parametrize(("name", "exact"), [("falcon_h1", "A_log"), ("deepseek_v3", "e_score_correction_bias")])
def test_what_the_engine_reads_in_fp32_may_be_stored_in_bf16(name: str, exact: str, tmp_path: Path) -> None:
    """The rates of states and a bias of a router are rounded to the type of the served files, as all others are."""
    llama_models.save(name, tmp_path / "source")
    served = shutil.copytree(tmp_path / "source", tmp_path / "served")
    (file,) = served.glob("*.safetensors")
    state = {key: value.to(torch.bfloat16) for key, value in load_file(file).items()}
    save_file(state, file, {"format": "pt"})
    reference = open_reference(tmp_path / "source", tmp_path / "references", NOTHING_GIVEN)
    rows = [tuple(range(3, 40)), tuple(range(90, 60, -1))]
    assert compare_weights(reference, served, rows).are_sound
    for key in state:
        if exact in key:
            state[key] = state[key] + 0.5 * torch.arange(len(state[key]))
    save_file(state, file, {"format": "pt"})
    assert compare_weights(reference, served, rows).are_sound is False


def log_probs_of(model: Any, ids: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
    return found


@pytest.fixture(scope="module")
def model(gpt2: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(gpt2 / "source", dtype=torch.float32).eval()


@pytest.mark.parametrize("scale", [1.0, 1.2])
def test_by_an_api_that_tells_all_the_divergence_is_torchs(
    scale: float, model: Any, gpt2: Path, tmp_path: Path
) -> None:
    def forward(ids: Any) -> torch.Tensor:
        return (scale * log_probs_of(model, ids)).log_softmax(-1)

    with serving(StandIn(forward=forward, max_model_len=24)) as served:
        summary = run(served.url, gpt2, tmp_path / "out", model=NAME, top=VOCAB, served_weights=gpt2 / "shards")
    assert summary["untold_mass"] < 1e-5
    assert summary["verdict"] == (HOLDS if scale == 1 else FAILS)
    passages = make_passages(read_documents(gpt2 / "texts.jsonl"), None, 24, 24, VOCAB)
    whole = []
    for row in passages:
        source, other = log_probs_of(model, row)[:-1], forward(row)[:-1]
        whole.append(torch.nn.functional.kl_div(other, source, reduction="none", log_target=True).sum(-1))
    kl = torch.cat(whole).numpy()
    assert summary["mean_kl"] == pytest.approx(kl.mean(), rel=1e-3, abs=1e-6)
    exact = [(log_probs_of(model, row).exp() - forward(row).exp())[:-1].abs().sum(-1) / 2 for row in passages]
    for bound in ("least_variation", "most_variation"):
        assert summary[bound] == pytest.approx(float(torch.cat(exact).mean()), rel=1e-3, abs=1e-5)
    assert summary["max_kl"] == pytest.approx(kl.max(), rel=1e-3, abs=1e-5)
    assert summary["kl_99_9"] == pytest.approx(np.percentile(kl, 99.9), rel=1e-3, abs=1e-5)
    found = np.array([float(row["kl"]) for row in rows(tmp_path / "out" / "places.csv")])
    assert np.abs(found - kl).max() < 1e-5
    if scale != 1:
        assert summary["cause"] == "kernels"


def test_what_tells_five_log_probabilities_is_compared_by_five(model: Any, gpt2: Path, tmp_path: Path) -> None:
    """OpenAI's own limit; more is refused. The formats are not told: bf16 is what it looks like, and that is said."""

    class Five(StandIn):
        def rows(self, ids: Any) -> Any:
            assert int(self.asked[-1].get("logprobs") or 0) <= 5, "refused"
            return super().rows(ids)

    half = model.to(torch.bfloat16)
    try:
        with serving(StandIn(forward=lambda ids: log_probs_of(half, ids).float(), max_model_len=24)) as served:
            summary = run(served.url, gpt2, tmp_path / "out", model=NAME, top=5)
            assert {body["logprobs"] for body in served.asked if body.get("echo") and len(body["prompt"]) > 3} == {5}
    finally:
        model.to(torch.float32)
    assert summary["verdict"] == INCONCLUSIVE and "precision=bf16" in json.dumps(summary["reasons"])


def test_fewer_log_probabilities_than_were_asked_for_are_compared_with_as_many(
    model: Any, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may take the number that is asked for, and tell one: then a bound from more is no measure of it."""
    scores = openai_stand_in._scores

    def told(served: Any, body: Any, ids: Any, made: Any, top: int, echo: bool) -> Any:
        return scores(served, body, ids, made, min(top, 1), echo)

    monkeypatch.setattr(openai_stand_in, "_scores", told)
    half, ratios = model.to(torch.bfloat16), list[str]()
    try:
        with serving(StandIn(forward=lambda ids: log_probs_of(half, ids).float(), max_model_len=24)) as served:
            for top in (1, 20):
                summary = run(served.url, gpt2, tmp_path / str(top), model=NAME, precision="bf16", top=top)
                ratios += re.findall(r"([\d.e-]+) times", summary["reasons"][0])
    finally:
        model.to(torch.float32)
    assert len(ratios) == 2 and ratios[0] == ratios[1]


def test_logits_in_place_of_log_probabilities_fail(model: Any, gpt2: Path, tmp_path: Path) -> None:
    """Some servers can be told to give logits: they are so large that no divergence from below is left of them."""
    with serving(StandIn(forward=lambda ids: log_probs_of(model, ids) + 20, max_model_len=24)) as served:
        summary = run(served.url, gpt2, tmp_path / "out", model=NAME, precision="fp32")
    assert summary["verdict"] == FAILS and "more than 1" in summary["reasons"][0]


def test_an_api_that_names_tokens_by_their_texts_is_refused(gpt2: Path, tmp_path: Path) -> None:
    with serving(StandIn(extensions=frozenset())) as served, pytest.raises(ConfigError, match="by id"):
        run(served.url, gpt2, tmp_path / "out", model=NAME)


def drawn(rng: np.random.Generator, count: int, vocab: int) -> npt.NDArray[np.float64]:
    logits = rng.normal(0, 2, (count, vocab))
    found: npt.NDArray[np.float64] = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return found


@pytest.mark.parametrize("told", [1, 3, 8, 16])
def test_a_bound_from_some_log_probabilities_is_never_above_the_divergence(told: int) -> None:
    """And comes nearer with each that is told; of all it is exact."""
    rng, vocab, kept = np.random.default_rng(told), 16, 10
    source, other = drawn(rng, 300, vocab), drawn(rng, 300, vocab)
    tokens = rng.integers(0, vocab, 300)

    def scores(whole: npt.NDArray[np.float64], most: int) -> Scores:
        ids = np.argsort(-whole, 1)[:, :most].astype(np.int32)
        top = np.take_along_axis(whole, ids, 1).astype(np.float32)
        return Scores(whole[np.arange(300), tokens].astype(np.float32), ids, top)

    exact = (np.exp(source) * (source - other)).sum(1)
    some = compare(scores(source, kept), scores(other, told), tokens).kl
    every = compare(scores(source, vocab), scores(other, told), tokens)
    assert (some <= exact + 1e-5).all() and (every.kl <= exact + 1e-5).all() and (some <= every.kl + 1e-5).all()
    if told == vocab:
        assert np.abs(every.kl - exact).max() < 1e-5 and every.rest.max() < 1e-5
    _check_bounds(compare(scores(source, kept), scores(other, told), tokens), source, other, told)
    _check_bounds(every, source, other, told)


def jensen_shannon(p: Any, q: Any) -> Any:
    first, second = torch.tensor(p), torch.tensor(q)
    middle = ((first + second) / 2).log()
    parts = (torch.nn.functional.kl_div(middle, each, reduction="none").sum(1) for each in (first, second))
    return sum(parts).numpy() / 2  # type: ignore[union-attr]


def _check_bounds(found: Divergence, source: Any, other: Any, told: int) -> None:
    """The bounded distances, by their definitions and torch, lie between their bounds, which meet where all is told."""
    p, q = np.exp(source), np.exp(other)
    exact = {"variation": np.abs(p - q).sum(1) / 2, "jensen_shannon": jensen_shannon(p, q)}
    for name, value in exact.items():
        least, most = getattr(found, name).T
        assert (least <= value + 1e-6).all() and (value <= most + 1e-6).all()
        if told == p.shape[1] and found.rest.max() < 1e-5:
            assert np.abs(most - least).max() < 1e-5


def test_the_bounds_are_reached() -> None:
    """Two servers that tell the same: one is the source in what it does not tell, the other has nothing of it."""
    source, tokens = np.log([[0.6, 0.3, 0.1, 1e-30]]), np.array([0])
    top = source.astype(np.float32)
    told = Scores(top[:, 0], np.array([[0, 1]], np.int32), top[:, :2])
    whole = Scores(top[:, 0], np.array([[0, 1, 2, 3]], np.int32), top)
    found = compare(whole, told, tokens)
    for last, bound in (([0.1, 1e-30], 0), ([1e-30, 0.1], 1)):
        p, q = np.exp(source), np.array([[0.6, 0.3, *last]])
        assert found.variation[0, bound] == pytest.approx(np.abs(p - q).sum() / 2, abs=1e-6)
        assert found.jensen_shannon[0, bound] == pytest.approx(jensen_shannon(p, q)[0], abs=1e-6)


def test_an_interval_holds_the_mean_as_often_as_it_says() -> None:
    """Places of a passage go together, as those of a text do: an interval over single places would be far too short."""
    rng, hits = np.random.default_rng(0), 0
    passages = np.repeat(np.arange(40), 20)
    for _ in range(100):
        values = rng.normal(0, 1, 40)[passages] + rng.normal(0, 0.1, 800)
        found = bootstrap(lambda at, values=values: float(values[at].mean()), passages)  # type: ignore[misc]
        hits += found.low <= 0 <= found.high
    assert 88 <= hits <= 99


def test_the_packages_texts_are_cut_into_four_lengths_of_all_texts() -> None:
    class Bytes:
        unknown = ""

        def encode(self, text: str) -> list[int]:
            return [1, *self.encode_part(text)]

        def encode_part(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, ids: Any) -> str:
            return bytes(ids).decode()

    documents = read_documents(None)
    assert len(documents) == 3 and 250_000 < sum(map(len, documents)) < 400_000
    passages = make_passages(documents, Bytes(), 64, 12, 256)
    assert [len(row) for row in passages] == [8] * 3 + [16] * 3 + [32] * 3 + [64] * 3
    assert all(row[0] == 1 for row in passages)
    whole = make_passages(documents, Bytes(), 64, None, 256)
    texts = b"".join(text.encode() for text in sorted(map(str, documents)))
    assert sum(len(row) - 1 for row in whole) >= len(texts) - 3
