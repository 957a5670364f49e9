"""SQuAD: the official scripts' results on fixed predictions, prompts by hand, and the way through a server."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.servers.fake_triton import T5_INPUTS, FakeTriton, RefusalError, Tensors
from tokenizers import ByteLevelBPETokenizer

from evaluation import squad
from evaluation.arguments import SquadArguments
from evaluation.tasks.prompt_template import Template, make_template, read_template
from evaluation.tasks.squad.data import FIELDS, V1, V2, check_squad, read_dataset
from evaluation.tasks.squad.score import QuestionScore, exact_match, f1_score, normalise, summarise
from handover.errors import ConfigError, ServerError
from handover.templates import templates_file

DATA = Path(__file__).resolve().parents[1] / "data" / "squad"
PROMPTS = Path(__file__).resolve().parents[2] / "evaluation" / "prompts"
EXPECTED = json.loads((DATA / "expected.json").read_text())
END = 0


@pytest.mark.parametrize("version", [V1, V2])
def test_figures_are_those_of_the_official_script(version: str) -> None:
    dataset = read_dataset(DATA / f"v{version}.json", None)
    predictions = json.loads((DATA / f"predictions_v{version}.json").read_text())
    scores = [
        QuestionScore(
            index=index,
            id=question.id,
            has_answer=bool(question.answers),
            prompt_tokens=1,
            cut_tokens=0,
            exact=exact_match(predictions[question.id], question.answers, version),
            f1=f1_score(predictions[question.id], question.answers, version),
        )
        for index, question in enumerate(dataset.questions)
    ]
    found = {metric.name: metric for metric in summarise(scores, dataset.version)}
    expected = EXPECTED[version]
    for name, value in expected.items():
        if name.endswith("total"):
            assert found[name.replace("total", "exact")].n == value
        else:
            assert 100 * (found[name].value or 0) == pytest.approx(value), name
            assert 0 < value < 100, "the fixture must tell right from wrong"


def test_normalisation_by_hand() -> None:
    given = ["The  Cat!", "a an the", "U.S.", "Über-Maß", "anthem", "\u2019"]
    assert [normalise(text) for text in given] == ["cat", "", "us", "übermaß", "anthem", "\u2019"]


def test_f1_by_hand() -> None:
    """Prediction of 4 words, gold of 3, 2 in common: precision 1/2, recall 2/3, F1 4/7."""
    assert f1_score("red green blue blue", ["blue red white"], V1) == pytest.approx(4 / 7)
    assert (f1_score("", ["the"], V1), f1_score("", ["the"], V2), f1_score("", [], V2)) == (0.0, 1.0, 1.0)
    assert (exact_match("x", [], V2), exact_match("", [], V2)) == (0.0, 1.0)


def test_the_version_is_the_files_or_what_its_questions_say(tmp_path: Path) -> None:
    content = json.loads((DATA / "v2.0.json").read_text())
    del content["version"]
    (tmp_path / "d.json").write_text(json.dumps(content))
    assert read_dataset(tmp_path / "d.json", None).version == V2
    assert read_dataset(DATA / "v1.1.json", 3).version == V1


def test_nemos_json_lines_are_read(tmp_path: Path) -> None:
    line = {"taskname": "squad", "context": "A b.", "question": "C?", "answer": "b"}
    (tmp_path / "d.jsonl").write_text(json.dumps(line) + "\n")
    (question,) = read_dataset(tmp_path / "d.jsonl", None).questions
    assert (question.context, question.question, question.answers) == ("A b.", "C?", ("b",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not SQuAD"),
        ('{"version": "1.1"}', "there is no 'data'"),
        ('{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": "1"}]}]}]}', "there is no 'answers'"),
        ('{"data": []}', "has 0 questions"),
        ('{"data": [{"paragraphs": [{"context": "a", "qas": ['
         '{"id": "1", "question": "q", "answers": []}, {"id": "1", "question": "q", "answers": []}]}]}]}', "the id 1"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "d.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_dataset(tmp_path / "d.json", None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_dataset(tmp_path / "none.json", None)


def test_a_zero_shot_prompt_by_hand() -> None:
    template = read_template(PROMPTS / "squad_zero_shot.yaml", FIELDS)
    sample = {"context": "Rain {fell}.", "question": "What fell?"}
    assert template.render(sample) == "Rain {fell}.\n\nQuestion: What fell?\nAnswer:"
    assert template.label("Rain") == " Rain"
    assert template.read_answer(" Rain\nQuestion: x") == "Rain"
    assert template.read_answer("\n Unanswerable.\n") == ""


def test_few_shots_stand_before_the_question_with_their_answers() -> None:
    template = read_template(PROMPTS / "squad_few_shot.yaml", FIELDS)
    text = template.render({"context": "C.", "question": "Q?"})
    blocks = text.split("\n\n")
    assert len(blocks) == 4 and blocks[-1] == "Passage: C.\nQuestion: Q?\nAnswer:"
    assert blocks[0].endswith("\nAnswer: Ida Holm") and blocks[1].endswith("\nAnswer: unanswerable")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"prompt_template": "{contxt}"}, "did you mean 'context'"),
        ({"prompt_tmplate": "x"}, "did you mean 'prompt_template'"),
        ({"prompt_template": " "}, "has no prompt_template"),
        ({"prompt_template": "{question} {answer}", "examples": [{"answer": "x"}]}, "an example has no question"),
        ({"prompt_template": "<|VIRTUAL_PROMPT_0|> {question}"}, "1 marks"),
    ],
)
def test_a_malformed_prompt_is_one_clear_error(content: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_template(content, FIELDS, "p.yaml")
    assert words in str(raised.value) and "p.yaml" in str(raised.value)


def test_a_prompt_and_a_task_exclude_each_other(tmp_path: Path) -> None:
    arguments = SquadArguments("", tmp_path, DATA / "v1.1.json")
    with pytest.raises(ConfigError, match="give prompt"):
        check_squad(arguments)
    both = SquadArguments("", tmp_path, DATA / "v1.1.json", prompt=PROMPTS / "squad_t5.yaml", taskname="squad")
    with pytest.raises(ConfigError, match="taskname is squad"):
        check_squad(both)


class Reader:
    """A fake model that knows each question's answer by heart: it writes what follows the question in its book."""

    def __init__(self, directory: Path, book: dict[str, str], ends: bool = True, positions: int = 400) -> None:
        trained = ByteLevelBPETokenizer()
        texts = [DATA.joinpath("v1.1.json").read_text(), *book.values(), *map(Path.read_text, PROMPTS.glob("*.yaml"))]
        trained.train_from_iterator(texts, vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
        trained.save_model(str(directory))
        self.tokenizer, self.book, self.ends, self.directory = trained, book, ends, directory
        (directory / "config.ini").write_text(
            f"[gpt]\nvocab_size = 600\nmax_pos_seq_len = {positions}\nend_id = {END}\n"
            "num_tasks = 1\nprompt_learning_start_id = 600\nweight_data_type = fp16\n"
            "[task_0]\ntask_name = squad\nprompt_length = 3\n"
        )

    def write(self, prompt: str, wanted: int) -> list[int]:
        """What follows a prompt: the answer to the last question that it holds."""
        question = max(self.book, key=lambda each: prompt.rfind(each))
        if self.book[question] == "!":
            raise RefusalError("out of memory")
        ids = list(self.tokenizer.encode(self.book[question]).ids)[:wanted]
        return [*ids, END][:wanted] if self.ends else ids

    def answer(self, tensors: Tensors) -> Tensors:
        ids, lengths = tensors["input_ids"], tensors["input_lengths"][:, 0]
        wanted = int(tensors["request_output_len"].max())
        output = np.full((len(ids), 1, ids.shape[1] + wanted), END, np.uint32)
        counts = np.zeros((len(ids), 1), np.uint32)
        for row, length in enumerate(lengths):
            shown = [int(token) for token in ids[row, :length] if token < 600]
            line = shown + self.write(self.tokenizer.decode(shown), wanted)
            output[row, 0, : len(line)], counts[row] = line, len(line)
        return {"output_ids": output, "sequence_length": counts}

    def answer_text(self, tensors: Tensors) -> Tensors:
        texts, counts = [], []
        for (text,), (wanted,) in zip(tensors["INPUT_0"], tensors["INPUT_1"], strict=True):
            tokens = self.write(text.decode(), int(wanted))
            counts.append([len(self.tokenizer.encode(text.decode()).ids) + len(tokens)])
            texts.append(text + self.tokenizer.decode([token for token in tokens if token != END]).encode())
        return {"OUTPUT_0": np.array(texts, dtype=np.object_), "sequence_length": np.array(counts, np.uint32)}


def book_of(data: Path, wrong: int = 0) -> dict[str, str]:
    """Right answers, the first ``wrong`` of them spoilt: their first word is missing."""
    questions = read_dataset(data, None).questions
    book = {q.question: f" {(q.answers or ('unanswerable',))[0]}\n" for q in questions}
    for question in list(book)[:wrong]:
        book[question] = " " + book[question].split(maxsplit=1)[-1] if " " in book[question].strip() else " No\n"
    return book


def evaluate(url: str, output: Path, data: Path, *flags: str) -> dict[str, Any]:
    prompt = (
        () if any(flag.startswith("--taskname") for flag in flags) else (f"--prompt={PROMPTS}/squad_zero_shot.yaml",)
    )
    squad.main([f"--endpoint={url}", f"--output={output}", f"--data-path={data}", *prompt, *flags])
    content: dict[str, Any] = json.loads((output / "metrics.json").read_text())
    return content


@pytest.mark.parametrize("model", ["fastertransformer", "ensemble"])
def test_answers_are_read_and_scored_through_a_server(tmp_path: Path, model: str) -> None:
    data = DATA / "v2.0.json"
    reader = Reader(tmp_path, book_of(data, wrong=2))
    answer, inputs = (
        (reader.answer, ("input_ids",)) if model == "fastertransformer" else (reader.answer_text, ("INPUT_0",))
    )
    with FakeTriton(answer, inputs=inputs, parameters={"model_checkpoint_path": str(tmp_path)}) as fake:
        content = evaluate(fake.url, tmp_path / "out", data, f"--model={model}", "--batch-size=3")
    metrics = {metric["name"]: metric for metric in content["metrics"]}
    n = len(read_dataset(data, None).questions)
    assert metrics["exact"]["value"] == pytest.approx((n - 2) / n)
    assert metrics["NoAns_exact"]["value"] == 1.0 and metrics["HasAns_exact"]["value"] < 1.0
    assert metrics["token_identity_accuracy"]["value"] == metrics["HasAns_exact"]["value"]
    predictions = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert len(predictions) == n and sorted(predictions.values()).count("") == 3
    assert content["settings"]["shots"] == 0 and content["data"]["known_as"] == "SQuAD v2.0"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["results"]["squad"]["exact,none"] == metrics["exact"]["value"]


def test_token_identity_is_stricter_than_exact_match(tmp_path: Path) -> None:
    """FasterTransformer compares as many tokens as the first gold answer has: an article in front is a miss."""
    data = DATA / "v1.1.json"
    book = {question: text.replace(" ", " the ", 1) for question, text in book_of(data).items()}
    reader = Reader(tmp_path, book)
    with FakeTriton(reader.answer, parameters={"model_checkpoint_path": str(tmp_path)}) as fake:
        content = evaluate(fake.url, tmp_path / "out", data, "--samples=4")
    metrics = {metric["name"]: metric["value"] for metric in content["metrics"]}
    assert (metrics["exact_match"], metrics["token_identity_accuracy"]) == (1.0, 0.0)


def test_a_passage_that_is_too_long_loses_its_end_and_never_the_question(tmp_path: Path) -> None:
    data = DATA / "v1.1.json"
    reader = Reader(tmp_path, book_of(data), positions=150)
    with FakeTriton(reader.answer, parameters={"model_checkpoint_path": str(tmp_path)}) as fake:
        content = evaluate(fake.url, tmp_path / "out", data, "--samples=4", "--batch-size=1")
        prompts = [reader.tokenizer.decode(r["input_ids"][0].tolist()) for r in fake.requests]
        assert all(r["input_lengths"].max() + r["request_output_len"].max() <= 150 for r in fake.requests)
    context = read_dataset(data, 1).questions[0].context
    for prompt in prompts:
        passage, _, rest = prompt.partition("\n\nQuestion: ")
        assert context.startswith(passage.rstrip("\ufffd")) and len(passage) < len(context)
        assert rest.endswith("\nAnswer:")
    assert content["cut_contexts"] == 4 and content["failed"] == 0


def test_a_failed_request_is_no_wrong_answer(tmp_path: Path) -> None:
    data = DATA / "v1.1.json"
    book = book_of(data)
    book[next(iter(book))] = "!"
    reader = Reader(tmp_path, book)
    parameters = {"model_checkpoint_path": str(tmp_path)}
    with FakeTriton(reader.answer, parameters=parameters) as fake, pytest.raises(ServerError, match="1 of 3 samples"):
        evaluate(fake.url, tmp_path / "out", data, "--samples=3", "--batch-size=1")
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())["metrics"]
    assert {(metric["value"], metric["n"], metric["failed"]) for metric in metrics} == {(1.0, 2, 1)}
    with (tmp_path / "out" / "samples.csv").open(newline="") as stream:
        (first, *_) = csv.DictReader(stream)
    assert (first["exact"], first["f1"], first["token_identity"]) == ("", "", "") and "memory" in first["error"]


TASK = {
    "taskname": "squad",
    "prompt_template": "<|VIRTUAL_PROMPT_0|>{context}<|VIRTUAL_PROMPT_1|> {question} {answer}",
    "virtual_token_splits": [2, 1],
    "truncate_field": "context",
    "answer_field": "answer",
}


@pytest.mark.parametrize("brings_table", [False, True])
def test_a_p_tuned_task_is_asked_with_its_own_template(tmp_path: Path, brings_table: bool) -> None:
    data = DATA / "v1.1.json"
    reader = Reader(tmp_path, book_of(data))
    (tmp_path / "task_templates.json").write_bytes(templates_file([TASK]))
    table = np.arange(12, dtype=np.float16).reshape(3, 4)
    table.tofile(tmp_path / "model.prompt_table.squad.weight.bin")
    flags = ["--taskname=squad", f"--use-request-prompt-embedding={brings_table}", "--samples=2", "--batch-size=2"]
    with FakeTriton(reader.answer, parameters={"model_checkpoint_path": str(tmp_path)}) as fake:
        content = evaluate(fake.url, tmp_path / "out", data, *flags)
        (request,) = fake.requests
    assert {metric["value"] for metric in content["metrics"]} == {1.0}
    questions = read_dataset(data, 2).questions
    lines = {
        tuple(row[:length])
        for row, length in zip(request["input_ids"].tolist(), request["input_lengths"][:, 0], strict=True)
    }
    encode = reader.tokenizer.encode
    assert lines == {(600, 601, *encode(q.context).ids, 602, *encode(f" {q.question}").ids) for q in questions}
    if brings_table:
        assert request["request_prompt_embedding"].tolist() == [table.tolist()] * 2
        assert (
            request["request_prompt_lengths"].tolist() == [[3]] * 2
            and request["request_prompt_type"].tolist() == [[3]] * 2
        )
    else:
        assert request["prompt_learning_task_name_ids"].tolist() == [[0]] * 2


def test_a_task_that_the_checkpoint_lacks_is_named_with_those_that_it_has(tmp_path: Path) -> None:
    reader = Reader(tmp_path, {"q": " a"})
    (tmp_path / "task_templates.json").write_bytes(templates_file([TASK]))
    parameters = {"model_checkpoint_path": str(tmp_path)}
    with (
        FakeTriton(reader.answer, parameters=parameters) as fake,
        pytest.raises(ConfigError, match="no template of a task") as error,
    ):
        evaluate(fake.url, tmp_path / "out", DATA / "v1.1.json", "--taskname=squat")
    assert "'squad'" in error.value.hint and not fake.requests


def test_a_t5_reads_the_whole_prompt_and_its_end(tmp_path: Path) -> None:
    data = DATA / "v1.1.json"
    reader = Reader(tmp_path, {question: text.strip() for question, text in book_of(data).items()})
    (tmp_path / "config.ini").write_text("[encoder]\nvocab_size = 600\n[decoder]\nvocab_size = 600\neos_token_id = 0\n")

    def answer(tensors: Tensors) -> Tensors:
        ids, lengths, wanted = (
            tensors["input_ids"],
            tensors["sequence_length"][:, 0],
            int(tensors["max_output_len"].max()),
        )
        assert all(int(row[length - 1]) == END for row, length in zip(ids, lengths, strict=True))
        output, counts = np.zeros((len(ids), 1, wanted), np.int32), np.zeros((len(ids), 1), np.int32)
        for row, length in enumerate(lengths):
            tokens = reader.write(reader.tokenizer.decode(ids[row, : length - 1].tolist()), wanted)
            output[row, 0, : len(tokens)], counts[row] = tokens, len(tokens)
        return {"output_ids": output, "sequence_length": counts}

    with FakeTriton(answer, inputs=T5_INPUTS, parameters={"model_checkpoint_path": str(tmp_path)}) as fake:
        squad.main(
            [
                f"--endpoint={fake.url}",
                f"--output={tmp_path / 'out'}",
                f"--data-path={data}",
                f"--prompt={PROMPTS}/squad_t5.yaml",
            ]
        )
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())["metrics"]
    assert metrics[0]["name"] == "exact_match" and metrics[0]["value"] == 1.0


def test_a_template_writes_an_answer_as_it_would_follow_the_prompt() -> None:
    assert Template("{question}:{answer}").label("x") == "x"
    assert Template("{question}: {answer}").label("x") == " x"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" Paris\nQuestion:", "Paris"),
        ('\n\n"I have no idea', ""),
        ("\nParis", ""),
        ("  Paris. \n", "Paris."),
        ("Paris###\n", "Paris"),
        ("###Paris", ""),
    ],
)
def test_an_answer_ends_before_the_first_stop_as_lm_evaluation_harness_cuts_it(text: str, answer: str) -> None:
    stops = ("\n", "", "###")
    assert Template("{question}: {answer}", stop=stops).read_answer(text) == answer
    harness = text
    for stop in filter(None, stops):  # its models' generate_until: s.split(term)[0], then its filters strip
        harness = harness.split(stop)[0]
    assert harness.strip() == answer
