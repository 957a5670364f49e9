"""A run by its command signs, verifies, reports, and shows no secret in plans, logs and results."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from support.runs.signing_keys import PASSWORD, Keys

from evaluation.report import write
from handover.errors import ConfigError
from handover.signatures.arguments import TrustArguments
from handover.signatures.hashed import FileDigests
from handover.signatures.trust import read_statement, verify
from launcher.config.secrets import check_command_line

PROJECT = Path(__file__).resolve().parents[2]
CONVERSION = "gpt3_demo/ft_tp1_fp16/1-gpu"
REPOSITORY = "gpt3_demo/export_tp1_pp1_fp16_fp16/model_repo"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KEY_PASSWORD": PASSWORD}
    command = [sys.executable, "main.py", "cluster_type=interactive", *words]
    return subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Path:
    root = tmp_path_factory.mktemp("results")
    found = run("stages=[convert,export]", f"base_results_dir={root}", *signing(keys))
    assert found.returncode == 0, found.stdout + found.stderr
    assert PASSWORD not in found.stdout + found.stderr
    return root


def signing(keys: Keys) -> list[str]:
    return [f"signing.key={keys.locked}", "signing.password_env=KEY_PASSWORD", f"signing.trusted={keys.locked_public}"]


def test_a_run_signs_and_no_secret_is_anywhere(results: Path, keys: Keys) -> None:
    trusted = TrustArguments(signing_trusted=keys.locked_public, signing_require=True)
    for name in (CONVERSION, REPOSITORY):
        assert "as it was signed" in verify(results / name, trusted, FileDigests())
    files = [path for path in results.rglob("*") if path.is_file()]
    assert any("--signing-key=" in path.read_text() for path in files if path.suffix == ".json")  # plans are there
    secrets = [PASSWORD, *(line[:40] for line in keys.locked.read_text().splitlines()[1:3])]
    assert not [path for path in files for secret in secrets if secret.encode() in path.read_bytes()]


def test_a_changed_repository_is_not_served(results: Path, keys: Keys, tmp_path: Path) -> None:
    shutil.copytree(results, tmp_path / "results")
    config = tmp_path / "results" / REPOSITORY / "ensemble" / "config.pbtxt"
    config.write_text(config.read_text().replace("gpt", "GPT") + "\n")
    words = [
        f"base_results_dir={tmp_path / 'results'}",
        "signing.require=true",
        f"signing.trusted={keys.locked_public}",
    ]
    found = run("stages=[deploy]", *words)
    assert found.returncode == 1 and "ensemble/config.pbtxt  has another content" in found.stdout + found.stderr
    assert not list((tmp_path / "results").rglob("server.log"))


def test_a_wrong_setting_stops_before_anything_is_written(tmp_path: Path) -> None:
    found = run("stages=[convert]", f"base_results_dir={tmp_path / 'results'}", "signing.key=/no/key.pem")
    assert found.returncode == 1 and "signing.key: /no/key.pem cannot be read" in found.stdout + found.stderr
    assert not (tmp_path / "results").exists()


def test_a_password_in_place_of_its_variables_name_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="signing.password_env does not name a variable") as refused:
        check_command_line([f"signing.password_env={PASSWORD}"])
    assert PASSWORD not in str(refused.value)


def test_the_commands_of_the_page_check_each_link(
    results: Path, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_PASSWORD", PASSWORD)
    run_results = tmp_path / "run"
    shutil.copytree((results / REPOSITORY).parent, run_results)
    write.main(report_arguments(run_results, keys.locked))
    blocks = re.findall(r"```bash\n(.*?)```", (PROJECT / "docs" / "signatures.md").read_text(), re.DOTALL)
    python = tmp_path / "model_signing"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -m model_signing "$@"\n')
    python.chmod(0o755)
    named = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CHECKPOINT": str(PROJECT / "examples/gpt3_demo/checkpoints/gpt3_demo.nemo"),
        "CONVERSION": str(results / CONVERSION),
        "REPOSITORY": str(results / REPOSITORY),
        "REPORT": str(run_results / "report"),
        "PUBLIC": str(keys.locked_public),
    }
    script = "set -euo pipefail\n" + "\n".join(blocks)
    found = subprocess.run(["bash", "-c", script], env={**os.environ, **named}, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("Verification succeeded") == 3 and found.stderr.count("Verified OK") == 4
    assert "gpt3_demo.nemo: OK" in found.stdout and "evaluation/lambada/metrics.json: OK" in found.stdout
    wrong = {**os.environ, **named, "PUBLIC": str(keys.others_public)}
    assert subprocess.run(["bash", "-c", script], env=wrong, capture_output=True).returncode


def report_arguments(run_results: Path, key: Path) -> list[str]:
    """Leave a result of an evaluation, and name what its report is made of."""
    task = run_results / "evaluation" / "lambada"
    task.mkdir(parents=True)
    metric = {"name": "acc", "value": 0.5, "unit": "fraction", "stderr": 0.1, "n": 20, "failed": 0}
    metric |= {"definition": "share of last words that are predicted", "better": "higher"}
    content = {"task": "lambada", "metrics": [metric], "samples": 20, "failed": 0, "model": {"model": "demo"}}
    (task / "metrics.json").write_text(json.dumps({**content, "data": {"file": "l.jsonl", "known_as": "LAMBADA"}}))
    given = {"results": run_results, "output": run_results / "report", "stages": run_results / "logs" / "stages.json"}
    words = [f"--{name}={path}" for name, path in given.items()]
    password = ["--signing-password-env=KEY_PASSWORD"] if key.name == "locked.pem" else []
    return [*words, "--title=demo", f"--signing-key={key}", *password]


def test_a_report_is_signed_with_the_digests_of_what_it_reports(results: Path, keys: Keys, tmp_path: Path) -> None:
    run_results = tmp_path / "run"
    shutil.copytree((results / REPOSITORY).parent, run_results)
    write.main(report_arguments(run_results, keys.key))
    output = run_results / "report"
    assert "as it was signed" in verify(output, TrustArguments(signing_trusted=keys.public), FileDigests())
    definition = read_statement(output / "provenance.intoto.json", keys.public)["predicate"]["buildDefinition"]
    reported = {each["name"] for each in definition["resolvedDependencies"]}
    assert {"evaluation/lambada/metrics.json", "model_repo/model.sig", "model_repo/manifest.json"} <= reported
    text = (output / "bom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    card = json.loads(text)["metadata"]["component"]["modelCard"]
    (figure,) = card["quantitativeAnalysis"]["performanceMetrics"]
    assert (figure["type"], figure["value"], figure["slice"]) == ("lambada acc", "0.5", "LAMBADA (n=20)")
    ends = [float(figure["confidenceInterval"][name]) for name in ("lowerBound", "upperBound")]
    assert ends == pytest.approx([0.5 - 1.96 * 0.1, 0.5 + 1.96 * 0.1])
