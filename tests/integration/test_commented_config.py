"""A config.ini that a person has edited, with comments in every line as in FasterTransformer's examples."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
from support.servers.served import PROJECT

NEMO = PROJECT / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"


def run(root: Path, stages: str, *overrides: str) -> None:
    argv = [
        *(sys.executable, str(PROJECT / "main.py"), "cluster_type=interactive", f"base_results_dir={root}"),
        *(f"stages={stages}", f"export.model.checkpoint_path={NEMO}", "export.run.model_train_name=tiny"),
        *("evaluation.lambada.samples=4", "benchmark.batch_sizes=[1]", "benchmark.lengths=[[8,8]]", *overrides),
    ]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def commented(text: str) -> str:
    """Put a comment of one of several forms behind every line and before every section."""
    forms = (" ; as it was trained", "   ;for the embedding", "\t; 0 ; 1 = 2", " ; [gpt]")
    lines = [line + forms[number % len(forms)] if line else line for number, line in enumerate(text.splitlines())]
    return "; edited by hand\n" + "\n".join(lines).replace("head_num = ", "head_num=") + "\n# the end\n"


def metrics(results: Path) -> object:
    return json.loads((results / "evaluation" / "lambada" / "metrics.json").read_text())["metrics"]


@pytest.mark.long
def test_a_store_whose_config_ini_has_comments_is_served_evaluated_and_measured(tmp_path: Path) -> None:
    run(tmp_path, "[convert,export,deploy,evaluate]")
    (results,) = (tmp_path / "tiny").glob("export_*")
    expected = metrics(results)
    (config,) = {file.resolve() for file in (results / "model_repo" / "fastertransformer" / "1").glob("*/config.ini")}
    text = commented(config.read_text())
    assert re.search(r"^vocab_size = \d+ +;", text, re.MULTILINE)
    for file in (results / "model_repo").rglob("config.ini"):  # the hard links to the checkpoint's are replaced
        file.unlink()
        file.write_text(text)
    run(tmp_path, "[deploy,evaluate,benchmark]", "deployment.edited_files=['*/config.ini']", "force=[evaluate]")
    assert metrics(results) == expected
    table = pandas.read_csv(results / "benchmark" / "static" / "benchmark.csv")
    assert list(table["batch_size"]) == [1] and not table["errors"].any()
