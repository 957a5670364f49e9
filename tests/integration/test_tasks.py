"""The evaluations beside LAMBADA on the real tritonserver, as a user runs them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from support.nemo_archive import write_nemo
from support.openai_endpoint import openai_endpoint
from support.served import PROJECT
from support.t5_models import huggingface_t5
from support.task_runs import OUTPUT_LEN, SQUAD, TEMPLATE, Run, predictions_of

from evaluation import lambada, translation
from evaluation.client.served_model import open_target
from evaluation.client.tokenizer import load_tokenizer
from evaluation.tasks.scoring import Scorer
from evaluation.tasks.squad.data import read_dataset
from handover.errors import ConfigError

DEMO = PROJECT / "examples" / "gpt3_demo" / "checkpoints" / "gpt3_demo.nemo"
TABLE = torch.from_numpy(np.random.default_rng(0).normal(0, 0.5, (3, 256)).astype(np.float16)).float()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The demonstration checkpoint with a prompt table beside it, as NeMo's p-tuning saves one."""
    root = tmp_path_factory.mktemp("tuned")
    (root / "source").mkdir()
    shutil.copy(DEMO, root / "source")
    state = {"prompt_table": {"prompt_table.squad.prompt_embeddings.weight": TABLE}}
    config = {"virtual_prompt_style": "p-tuning", "task_templates": [TEMPLATE]}
    write_nemo(root / "source" / "tuned.nemo", config, {"model_weights.ckpt": state}, files={})
    run = Run(root, root / "source")
    yield run
    run.deployment.stop()


def test_lambada_and_squad_in_one_command(tuned: Run) -> None:
    small = (f"evaluation.squad.data_path={SQUAD}", f"evaluation.squad.tokens_to_generate={OUTPUT_LEN}")
    found = tuned.evaluate("[lambada,squad]", "evaluation.lambada.samples=5", *small)
    n = len(read_dataset(SQUAD, None).questions)
    assert (found["lambada"]["samples"], found["squad"]["samples"], found["squad"]["failed"]) == (5, n, 0)
    names = [metric["name"] for metric in found["squad"]["metrics"]]
    assert names[:2] == ["exact", "f1"] and names[-1] == "token_identity_accuracy"
    stages = json.loads((tuned.results / "logs" / "stages.json").read_text())
    assert [entry["stage"] for entry in stages] == ["evaluate", "evaluate", "report"]
    report = (tuned.results / "report" / "report.md").read_text()
    assert "Accuracy: lambada" in report and "Accuracy: squad" in report and "HasAns_f1" in report
    by_ids = predictions_of(tuned)
    tuned.evaluate("squad", *small, "evaluation.squad.model=ensemble")
    assert predictions_of(tuned) == by_ids


def greedy(model: Any, embeddings: torch.Tensor) -> list[int]:
    """Continue [T, hidden] by Hugging Face's model."""
    tokens: list[int] = []
    for _ in range(OUTPUT_LEN):
        with torch.no_grad():
            tokens.append(int(model(inputs_embeds=embeddings[None]).logits[0, -1].argmax()))
        embeddings = torch.cat((embeddings, model.transformer.wte.weight[tokens[-1:]].detach()))
    return tokens


def test_a_p_tuned_task_answers_with_its_table_however_it_is_asked(tuned: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: Hugging Face's GPT-2 on the table's rows and the tokens of the template, filled in by hand."""
    monkeypatch.syspath_prepend(str(PROJECT / "examples"))
    from huggingface_models import load_nemo

    given = (f"evaluation.squad.data_path={SQUAD}", f"evaluation.squad.tokens_to_generate={OUTPUT_LEN}")
    task = (*given, "evaluation.squad.taskname=squad", "evaluation.squad.prompt=null", "evaluation.squad.samples=3")
    tuned.evaluate("squad", *task)
    named = predictions_of(tuned)
    tuned.evaluate("squad", *task, "evaluation.squad.use_request_prompt_embedding=true")
    assert predictions_of(tuned) == named
    model, tokenizer = load_nemo(DEMO)
    wte = model.transformer.wte.weight.detach()
    for question in read_dataset(SQUAD, 3).questions:
        ids = tokenizer(f" {question.context} {question.question}")["input_ids"]
        expected = tokenizer.decode(greedy(model, torch.cat((TABLE, wte[ids]))))
        assert named[question.id] == expected.strip()


def test_a_task_that_was_not_tuned_is_refused_before_anything_runs(tuned: Run) -> None:
    given = ("evaluation=squad", f"evaluation.squad.data_path={SQUAD}", "evaluation.squad.prompt=null")
    refused = tuned.main("[deploy,evaluate]", *given, "evaluation.squad.taskname=squat")
    assert refused.returncode == 1 and "running" not in refused.stdout
    assert "has no p-tuned task squat" in refused.stderr and "did you mean 'squad'?" in refused.stderr


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Any, SentencePieceProcessor]]:
    root = tmp_path_factory.mktemp("t5")
    (root / "source").mkdir()
    pieces = root / "source" / "spiece"
    lines = (PROJECT / "examples" / "data" / "lambada_subset.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"].replace("\n", " ") for line in lines]
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(pieces), vocab_size=400, pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1, minloglevel=2,
    )  # fmt: skip
    tokenizer = SentencePieceProcessor(model_file=f"{pieces}.model")
    model = huggingface_t5(vocab_size=tokenizer.get_piece_size(), pad_token_id=0, eos_token_id=1)
    model.save_pretrained(root / "source")
    run = Run(root, root / "source", "export=t5/export_t5", "export.run.results_dir=${base_results_dir}/tiny/results")
    yield run, model, tokenizer
    run.deployment.stop()


@pytest.mark.parametrize(("beams", "name"), [(1, "ensemble"), (1, "fastertransformer"), (2, "fastertransformer")])
def test_a_t5_translates_and_summarises_as_transformers_does(
    t5: tuple[Run, Any, SentencePieceProcessor], beams: int, name: str
) -> None:
    """Oracle: transformers' generation from the same prompts, scored as FasterTransformer's script scores."""
    run, model, tokenizer = t5
    sources = ["The Normans gave their name.", "In the 10th century", "a region in France"]
    references = ["The Normans gave", "10th century people", "in a region"]
    (run.root / "s.txt").write_text("\n".join(sources) + "\n")
    (run.root / "r.txt").write_text("\n".join(references) + "\n")
    tasks = {"translation": "translate English to German: ", "summarization": "summarize: "}
    given = [f"evaluation.{task}.{key}" for task in tasks for key in (
        f"data_path={run.root / 's.txt'}", f"reference_path={run.root / 'r.txt'}", f"max_output_len={OUTPUT_LEN}",
        f"beam_width={beams}", f"model={name}",
    )]  # fmt: skip
    found = run.evaluate("[translation,summarization]", *given)
    for task, prefix in tasks.items():
        expected = []
        for source in sources:
            ids = torch.tensor([[*tokenizer.encode(prefix + source), 1]])
            searches = {"num_beams": beams, "length_penalty": 0.0, "early_stopping": True} if beams > 1 else {}
            how = {"max_new_tokens": OUTPUT_LEN, "do_sample": False, "use_cache": False}  # see test_families
            output = model.generate(ids, **how, **searches)[0, 1:].tolist()
            written = tokenizer.decode([token for token in output if token != 1])
            # What no piece stands for is "<unk>" in transformers' texts, and "⁇" in SentencePiece's.
            expected.append(" ".join(written.split()).replace(" ⁇", "<unk>"))
        assert (run.results / "evaluation" / task / "predictions.txt").read_text().splitlines() == expected
        figures = {metric["name"]: metric["value"] for metric in found[task]["metrics"]}
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
