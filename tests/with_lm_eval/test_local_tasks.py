"""GSM8K, HumanEval, MMLU-Pro and IFEval on local files: the harness's own tasks, and its figures on ``hf``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from support.measurements.harness_tasks import PROJECT
from support.servers.served import Deployment

from evaluation import harness
from evaluation.harness import ServedLM
from evaluation.tasks.harness_files import PRESETS, write_tasks
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.errors import ConfigError

OWN = Path(lm_eval.tasks.__file__).parent
DATA_KEYS = {"task", "dataset_path", "dataset_name", "dataset_kwargs"}


def lines(path: Path, documents: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents in the form of the hub's: what made-up texts ask is of no account, a small model answers nothing."""
    root = tmp_path_factory.mktemp("data")
    sums = [
        {"question": f"Ann has {n} hens and {n} cows. How many?", "answer": f"{n}+{n}\n#### {2 * n}"} for n in range(9)
    ]
    lines(root / "gsm8k" / "train.jsonl", sums[:6])
    lines(root / "gsm8k" / "test.jsonl", sums[6:])
    asked = [
        {"question": f"What is {n} + 1?", "options": ["7", str(n + 1)], "answer": "B", "answer_index": 1}
        | {"category": category, "cot_content": "A: Let's think step by step. The answer is (B).", "question_id": n}
        for n in range(7)
        for category in ("math", "law")
    ]
    lines(root / "mmlu_pro" / "validation.jsonl", asked[:10])
    lines(root / "mmlu_pro" / "test.jsonl", asked[10:])
    wishes = [
        ("punctuation:no_comma", {"num_words": None}),
        ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}),
        ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}),
    ]
    documents = [
        {"key": key, "prompt": f"Tell of the sea, {name}.", "instruction_id_list": [name], "kwargs": [wish]}
        for key, (name, wish) in enumerate(wishes)
    ]
    lines(root / "ifeval" / "train.jsonl", documents)
    programs = [
        {"task_id": f"made/{n}", "entry_point": "double", "prompt": f"def double(x):\n    return {n} * x\n# Then"}
        | {"test": "def check(double):\n    assert double(4) == 8", "canonical_solution": ""}
        for n in (1, 2)
    ]
    lines(root / "humaneval" / "test.jsonl", programs)
    return root


CODE_EVAL = """
import subprocess
import sys

import datasets
import evaluate


class CodeEval(evaluate.Metric):
    def _info(self):
        kinds = {"predictions": datasets.Sequence(datasets.Value("string")), "references": datasets.Value("string")}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(kinds))

    def _compute(self, predictions, references, k):
        programs = [f"{made[0]}\\n{test}" for made, test in zip(predictions, references, strict=True)]
        ended = [subprocess.run([sys.executable, "-Ic", each], capture_output=True) for each in programs]
        return {f"pass@{k[0]}": sum(each.returncode == 0 for each in ended) / len(ended)}, {}
"""
"""In the place of the hub's ``evaluate-metric/code_eval``, which no network is asked for here: the same figure of one
answer a problem, by a Python of its own."""


@pytest.fixture
def sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nltk's table for English that knows no abbreviations, in the place of the one that a network has."""
    import nltk

    table = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "english"
    table.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (table / name).write_text("")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])


def test_the_tasks_are_the_harness_own_but_for_their_data(data: Path, tmp_path: Path) -> None:
    assert write_tasks(data, OWN, tmp_path) == ["gsm8k_file", "humaneval_file", "ifeval_file", "mmlu_pro_file"]
    made = {path.stem: load_yaml(path, resolve_func=False) for path in tmp_path.glob("*.yaml")}
    subjects = [path.stem for path in OWN.glob("mmlu_pro/mmlu_pro_*.yaml")]
    assert len(subjects) == 14 and sorted(made.pop("mmlu_pro_file")["task"]) == sorted(f"{s}_file" for s in subjects)
    assert len(made) == 17
    for name, content in made.items():
        (own,) = OWN.glob(f"*/{name.removesuffix('_file')}.yaml")
        expected = load_yaml(own, resolve_func=False)
        unlike = {key for key in content | expected if content.get(key) != expected.get(key)}
        assert unlike <= DATA_KEYS and content["task"] == name


@pytest.fixture
def code_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metric where the command is started, which is looked at before the hub."""
    (tmp_path / "code_eval").mkdir()
    (tmp_path / "code_eval" / "code_eval.py").write_text(CODE_EVAL)
    monkeypatch.chdir(tmp_path)


def test_figures_are_those_of_hf_on_the_same_weights(
    data: Path, deployment: Deployment, tmp_path: Path, sentences: None, code_eval: None
) -> None:
    convert(
        ConvertArguments(PROJECT / "examples/gpt3_demo/checkpoints", tmp_path / "hf", 1, "fp32", format="huggingface")
    )
    (definitions := tmp_path / "tasks").mkdir()
    write_tasks(data, OWN, definitions)
    manager = TaskManager(include_path=str(definitions), include_defaults=False)
    tasks = ["gsm8k_file", "humaneval_file", "mmlu_pro_math_file", "mmlu_pro_law_file", "ifeval_file"]
    found = {}
    for name, model in (
        ("hf", HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", max_length=512)),
        ("served", ServedLM(str(deployment.endpoint_file), max_length=512)),
    ):
        results = simple_evaluate(
            model, tasks=tasks, task_manager=manager, log_samples=True, bootstrap_iters=0, num_fewshot=2,
            gen_kwargs="max_gen_toks=12", confirm_run_unsafe_code=True,
        )  # fmt: skip
        answers = {
            task: sorted((s["doc_id"], s["filter"], str(s["resps"]), str(s["arguments"])) for s in samples)
            for task, samples in results["samples"].items()
        }
        found[name] = results["results"], answers
    assert set(found["hf"][0]) == set(tasks)
    assert found["served"] == found["hf"]
    assert found["hf"][0]["humaneval_file"]["pass@1,create_test"] == 0.5  # of two problems the second is solved
    assert all(len(answers) >= 2 for answers in found["hf"][1].values())
    assert all(len(said) > len("[['.']]") for _, _, said, _ in found["hf"][1]["ifeval_file"])  # something was said


def test_programs_run_only_where_that_is_confirmed(
    data: Path, deployment: Deployment, tmp_path: Path, code_eval: None
) -> None:
    (definitions := tmp_path / "tasks").mkdir()
    write_tasks(data, OWN, definitions)
    manager = TaskManager(include_path=str(definitions), include_defaults=False)
    with pytest.raises(ValueError, match="marked as unsafe"):
        simple_evaluate(ServedLM(str(deployment.endpoint_file)), tasks=["humaneval_file"], task_manager=manager)


def test_the_command_takes_the_directory(data: Path, monkeypatch: pytest.MonkeyPatch, sentences: None) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: called.append([*sys.argv, *names(sys.argv[-1])]))
    words = ["run", "--model", "slipway", f"--data={data}", "--tasks", "gsm8k_file"]
    monkeypatch.setattr(sys, "argv", ["harness", *words])
    harness.main(words)
    assert called[0][:6] == ["harness", "run", "--model", "slipway", "--tasks", "gsm8k_file"]
    assert {"gsm8k_file.yaml", "humaneval_file.yaml", "mmlu_pro_file.yaml", "ifeval_file.yaml"} <= set(called[0][8:])


def names(directory: str) -> list[str]:
    return [path.name for path in Path(directory).iterdir()]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], f"a directory of one of: {', '.join(PRESETS)}"),
        (["gsm8k/test.jsonl"], "has no train.jsonl"),
        (["gsm8k/test.jsonl", "gsm8k/train.parquet"], "files of both kinds"),
    ],
)
def test_data_that_is_not_there_is_named(files: list[str], expected: str, tmp_path: Path) -> None:
    for name in files:
        lines(tmp_path / name, [])
    with pytest.raises(ConfigError) as refused:
        write_tasks(tmp_path, OWN, tmp_path)
    assert expected in str(refused.value) and not list(tmp_path.glob("*.yaml"))
