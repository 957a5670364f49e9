"""A T5's translations, summaries and scores on the real tritonserver; the oracle is transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
from sentencepiece import SentencePieceProcessor
from support.measurements.task_runs import OUTPUT_LEN, Run
from support.servers.openai_endpoint import openai_endpoint
from support.servers.served import PROJECT

from evaluation import lambada, summarization, translation
from evaluation.client.served_model import open_target
from evaluation.client.tokenizer import load_tokenizer
from evaluation.tasks.scoring import Scorer
from handover.errors import ConfigError


@pytest.mark.parametrize(("beams", "name"), [(1, "ensemble"), (1, "fastertransformer"), (2, "fastertransformer")])
def test_a_t5_translates_and_summarises_as_transformers_does(
    t5: tuple[Run, Any, SentencePieceProcessor], beams: int, name: str, tmp_path: Path
) -> None:
    """Oracle: transformers' generation from the same prompts, scored as FasterTransformer's script scores."""
    run, model, tokenizer = t5
    sources = ["The Normans gave their name.", "In the 10th century", "a region in France"]
    references = ["The Normans gave", "10th century people", "in a region"]
    (run.root / "s.txt").write_text("\n".join(sources) + "\n")
    (run.root / "r.txt").write_text("\n".join(references) + "\n")
    tasks = {"translation": "translate English to German: ", "summarization": "summarize: "}
    given = {
        "data_path": run.root / "s.txt", "reference_path": run.root / "r.txt", "max_output_len": OUTPUT_LEN,
        "beam_width": beams, "model": name,
    }  # fmt: skip
    written_to, programs = run.results / "evaluation", (translation, summarization)
    if name == "ensemble":
        run.evaluate(
            "[translation,summarization]",
            *(f"evaluation.{task}.{key}={value}" for task in tasks for key, value in given.items()),
        )
    else:  # by the same programs, without main.py
        written_to = tmp_path
        options = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
        for task, program in zip(tasks, programs, strict=True):
            prompt = PROJECT / "evaluation" / "prompts" / f"{task}_t5.yaml"
            place = [f"--endpoint={run.deployment.endpoint_file}", f"--output={tmp_path / task}", f"--prompt={prompt}"]
            program.main([*place, *options])
    for task, prefix in tasks.items():
        expected = []
        for source in sources:
            ids = torch.tensor([[*tokenizer.encode(prefix + source), 1]])
            searches = {"num_beams": beams, "length_penalty": 0.0, "early_stopping": True} if beams > 1 else {}
            how = {"max_new_tokens": OUTPUT_LEN, "do_sample": False, "use_cache": False}  # see test_t5_measured
            output = model.generate(ids, **how, **searches)[0, 1:].tolist()
            written = tokenizer.decode([token for token in output if token != 1])
            # What no piece stands for is "<unk>" in transformers' texts, and "⁇" in SentencePiece's.
            expected.append(" ".join(written.split()).replace(" ⁇", "<unk>"))
        assert (written_to / task / "predictions.txt").read_text().splitlines() == expected
        metrics = json.loads((written_to / task / "metrics.json").read_text())["metrics"]
        figures = {metric["name"]: metric["value"] for metric in metrics}
        assert figures["tokens_per_s"] > 0
        if task == "translation":
            bleu = sacrebleu.corpus_bleu(expected, [references], force=True).score
            assert figures["bleu"] == pytest.approx(bleu)


@pytest.mark.parametrize("name", ["fastertransformer", "ensemble"])
def test_given_answers_of_a_t5_are_scored_as_transformers_scores_them(
    t5: tuple[Run, Any, SentencePieceProcessor], name: str
) -> None:
    """Tokens that its decoder begins with, rows of several lengths; the ensemble is given the inputs as texts."""
    run, model, tokenizer = t5
    texts = [
        "The Normans gave their name.",
        "In the 10th century",
        "a region in France",
    ]  # it knows no figures
    pairs = [
        ((*tokenizer.encode(text), 1), tuple(tokenizer.encode(answer)))
        for text, answer in zip(texts, ["to Normandy", "people", "who in the 10th and 11th"], strict=True)
    ]
    own = load_tokenizer(next(run.results.glob("model_repo/fastertransformer/1/*-gpu")))
    with Scorer(open_target(run.endpoint.grpc_url, name, batch_size=2), 600, own, 1) as scorer:
        found = scorer.score(pairs)
    for (source, target), scores in zip(pairs, found, strict=True):
        decoder = torch.tensor([[0, *target[:-1]]])
        with torch.no_grad():
            rows = model(input_ids=torch.tensor([source]), decoder_input_ids=decoder).logits[0].log_softmax(-1)
        expected = [float(row[token]) for row, token in zip(rows, target, strict=True)]
        assert scores.log_probs == pytest.approx(expected, abs=1e-4) and list(scores.argmax) == rows.argmax(-1).tolist()


def test_a_t5_answers_through_an_openai_api_as_by_grpc(
    t5: tuple[Run, Any, SentencePieceProcessor], tmp_path: Path
) -> None:
    run, *_ = t5
    (tmp_path / "s.txt").write_text("The Normans gave their name.\nIn the 10th century\na region in France\n")
    (tmp_path / "r.txt").write_text("The Normans gave\n10th century people\nin a region\n")
    directory = next(run.results.glob("model_repo/fastertransformer/1/*-gpu"))
    given = [f"--data-path={tmp_path / 's.txt'}", f"--reference-path={tmp_path / 'r.txt'}"]
    given += [f"--prompt={PROJECT / 'evaluation/prompts/translation_t5.yaml'}", f"--max-output-len={OUTPUT_LEN}"]
    with openai_endpoint(str(run.deployment.endpoint_file), tmp_path) as api:
        for name, source in (("grpc", run.deployment.endpoint_file), ("api", f"{api.url}/v1")):
            asked = [f"--endpoint={source}", f"--output={tmp_path / name}", f"--tokenizer={directory}"]
            translation.main([*asked, *given])
        data = f"--data-path={PROJECT / 'examples/data/lambada_subset.jsonl'}"
        with pytest.raises(ConfigError, match=r"(?s)is an encoder-decoder .* ask it by gRPC"):
            lambada.main([*asked, data, "--data-sha256=any"])
        with pytest.raises(ConfigError, match="which token ends an encoder's input is not known"):
            translation.main([f"--endpoint={run.endpoint.grpc_url}", *asked[1:], *given])
    by_grpc, by_api = ((tmp_path / name / "predictions.txt").read_text() for name in ("grpc", "api"))
    assert by_api == by_grpc and len(set(by_grpc.splitlines())) > 1
