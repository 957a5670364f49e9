"""The five-stage command for real: several ranks, and kill -9 of each process in the middle."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas
import pytest
from support.servers.served import deaths_by_signal

PROJECT = Path(__file__).resolve().parents[2]
NEMO = PROJECT / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"
FIVE = "stages=[convert,export,deploy,evaluate,benchmark]"
LONG = "benchmark.repeats=100"  # some seconds, in the middle of which a process is killed


def command(root: Path, *arguments: str) -> list[str]:
    return [
        *(sys.executable, str(PROJECT / "main.py"), "cluster_type=interactive", f"base_results_dir={root}", FIVE),
        *(f"export.model.checkpoint_path={NEMO}", "export.run.model_train_name=tiny", "evaluation.lambada.samples=10"),
        *("benchmark.batch_sizes=[1,2]", "benchmark.lengths=[[8,8]]", *arguments),
    ]


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(root, *arguments), cwd=root, capture_output=True, text=True, check=False, timeout=180)


def processes_of(root: Path) -> list[str]:
    """Command lines that mention the run's directory, the test itself left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(root) in line:
                found.append(f"{entry.name} {line}")
    return found


def family(pid: int) -> dict[int, str]:
    """A process and all its descendants, with the name of each one's program."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(entry.name)] = (entry / "cmdline").read_bytes().split(b"\0")[0].decode().rpartition("/")[2]
            except OSError:
                continue
    members = {pid}
    while grown := {child for child, parent in parents.items() if parent in members} - members:
        members |= grown
    return {member: names.get(member, "") for member in members}


def shared_memory_of(root: Path) -> list[str]:
    """Regions in /dev/shm of the run's servers: those with a prefix that their logs name."""
    logs = [path.read_text() for path in root.rglob("server.log")]
    prefixes = tuple(re.findall(r'"shm-region-prefix-name":"(slipway-[0-9a-f]{12}-)"', "".join(logs)))
    assert prefixes, "no server of the run has logged its prefix"
    return sorted(path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefixes))


def assert_nothing_is_left(root: Path, pids: Collection[int] = (), seconds: float = 30) -> None:
    """No process of the run, no shared memory, and no word of one that crashed."""
    deadline = time.monotonic() + seconds

    def left() -> list[str]:
        numbers = [str(pid) for pid in pids if Path(f"/proc/{pid}/exe").exists()]
        return processes_of(root) + numbers + shared_memory_of(root)

    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left() == [] and deaths_by_signal(root) == []


def figures(root: Path, tensor_para_size: int) -> dict[str, float]:
    """LAMBADA figures of the five-stage run at a tensor parallelism."""
    precision = ("export.model.weight_data_type=fp32", "export.triton_deployment.data_type=fp32")
    result = run(root, f"export.model.tensor_model_parallel_size={tensor_para_size}", *precision)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_nothing_is_left(root)
    results = root / "tiny" / f"export_tp{tensor_para_size}_pp1_fp32_fp32"
    assert not list(root.rglob("__pycache__")), "serving adds nothing to what was published"
    assert str(results / "report") in result.stdout and "lambada_openai_accuracy" in result.stdout
    table = pandas.read_csv(results / "benchmark" / "static" / "benchmark.csv")
    assert list(table["batch_size"]) == [1, 2] and not table["errors"].any()
    assert (results / "report" / "report.html").is_file() and (results / "report" / "report.md").is_file()
    metrics = json.loads((results / "evaluation" / "lambada" / "metrics.json").read_text())
    return {m["name"]: m["value"] for m in metrics["metrics"]}


@pytest.mark.long
def test_four_ranks_score_as_one(tmp_path: Path) -> None:
    """A demonstration's card holds for one and for two, below."""
    assert figures(tmp_path, 4) == pytest.approx(figures(tmp_path, 1), rel=1e-4)


@pytest.mark.parametrize(
    ("demo", "tensor_para_size"),
    [
        pytest.param("gpt3_demo", 1, marks=pytest.mark.long),
        ("llama_demo", 2),
        pytest.param("moe_demo", 2, marks=pytest.mark.long),
    ],
)
def test_a_demonstration_reaches_the_figures_of_its_model_card(
    demo: str, tensor_para_size: int, tmp_path: Path
) -> None:
    """Oracle: Hugging Face's model on the same weights and texts (examples/score_with_huggingface.py)."""
    arguments = [
        f"base_results_dir={tmp_path}",
        "cluster_type=interactive",
        "stages=[convert,export,deploy,evaluate]",
        f"export.run.model_train_name={demo}",
    ]
    arguments.append(f"export.model.tensor_model_parallel_size={tensor_para_size}")
    precision = ["export.model.weight_data_type=fp32", "export.triton_deployment.data_type=fp32"]
    launched = [sys.executable, str(PROJECT / "main.py"), *arguments, *precision]
    result = subprocess.run(launched, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    card = json.loads((PROJECT / "examples" / demo / "model_card.json").read_text())
    expected = card["lambada"]["lambada_subset.jsonl"]
    results = tmp_path / demo / f"export_tp{tensor_para_size}_pp1_fp32_fp32" / "evaluation" / "lambada"
    served = {m["name"]: m["value"] for m in json.loads((results / "metrics.json").read_text())["metrics"]}
    assert served.keys() == {name for name in expected if name.endswith(("accuracy", "greedy", "perplexity"))}
    for name, value in served.items():
        assert value == pytest.approx(expected[name], rel=1e-4 if name.endswith("perplexity") else 1e-9), name
    assert_nothing_is_left(tmp_path)


@pytest.mark.long
def test_the_llama_and_its_adapter_reach_their_figures_in_one_report(tmp_path: Path) -> None:
    """Oracle: Hugging Face's model with the adapter merged (examples/score_with_huggingface.py); see demo-llama."""
    demo = PROJECT / "examples" / "llama_demo"
    given = ["cluster_type=interactive", "stages=[convert,export,deploy,evaluate]", "export.model.format=huggingface"]
    given += ["export.run.model_train_name=llama_demo", f"export.adapters={demo / 'adapters'}"]
    given += ["export.model.weight_data_type=fp32", "export.triton_deployment.data_type=fp32"]
    given += ["deployment.adapter=[null,verse]", "evaluation=[lambada,parity]"]
    launched = [sys.executable, str(PROJECT / "main.py"), f"base_results_dir={tmp_path}", *given]
    result = subprocess.run(launched, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    results, card = tmp_path / "llama_demo/export_tp1_pp1_fp32_fp32", json.loads((demo / "model_card.json").read_text())
    for name, known in (("lambada", card), ("lambada_verse", card["adapters"]["verse"])):
        metrics = json.loads((results / "evaluation" / name / "metrics.json").read_text())["metrics"]
        for metric in metrics:
            expected = known["lambada"]["lambada_subset.jsonl"][metric["name"]]
            rel = 1e-4 if metric["name"].endswith("perplexity") else 1e-9
            assert metric["value"] == pytest.approx(expected, rel=rel), metric["name"]
    report = (results / "report" / "report.md").read_text()
    assert "Parity with adapter verse holds against Hugging Face" in report
    assert "| last_token_accuracy | llama_demo |" in report and "| last_token_accuracy | verse |" in report
    assert_nothing_is_left(tmp_path)


@contextmanager
def running_benchmark(root: Path) -> Iterator[subprocess.Popen[str]]:
    """The five-stage command, in the middle of a benchmark that takes a while."""
    arguments = command(root, LONG)
    with subprocess.Popen(arguments, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout
            assert any(re.search(r"benchmark +running", line) for line in process.stdout), "it never came so far"
            time.sleep(0.5)
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of results in which one test after the other finds finished what comes before the benchmark."""
    return tmp_path_factory.mktemp("begun")


def results_of(root: Path) -> Path:
    return root / "tiny" / "export_tp1_pp1_fp16_fp16"


def test_ctrl_c_stops_everything_and_says_how_to_continue(begun: Path) -> None:
    with running_benchmark(begun) as process:
        members = family(process.pid)
        assert {"tritonserver", "triton_python_backend_stub"} <= set(members.values())
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=180)
    assert process.returncode == 130 and "run the same command again to continue" in output
    assert "Traceback" not in output
    assert_nothing_is_left(begun, members)


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("tritonserver", marks=pytest.mark.long),
        pytest.param("triton_python_backend_stub", marks=pytest.mark.long),
        "main.py",
    ],
)
def test_kill_9_in_the_middle_leaves_nothing_and_a_rerun_continues(begun: Path, victim: str) -> None:
    results = results_of(begun)
    shutil.rmtree(results / "benchmark", ignore_errors=True)
    with running_benchmark(begun) as process:
        members = family(process.pid)
        pid = process.pid if victim == "main.py" else next(p for p, name in members.items() if name == victim)
        os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
    if victim != "main.py":
        assert process.returncode == 1
        assert "the server died while benchmark ran" in output
        assert "failed" in (results / "report" / "report.md").read_text()
    assert_nothing_is_left(begun, members)
    assert not (results / "benchmark" / "static").exists()
    again = run(begun)
    assert again.returncode == 0, again.stdout + again.stderr
    states = re.findall(r"\] (\w+) +(done|skipped)", again.stdout)
    assert states == [
        *(("convert", "skipped"), ("export", "skipped"), ("deploy", "done"), ("evaluate", "skipped")),
        *(("benchmark", "done"), ("report", "done")),
    ]
    assert_nothing_is_left(begun)


def test_a_sweep_goes_on_after_a_failed_point_meets_in_one_report_and_resumes(tmp_path: Path) -> None:
    arguments = ("export.model.tensor_model_parallel_size=1,5", "-m")
    quick = ("stages=[convert,export,deploy,benchmark]", *arguments)
    first, second = (run(tmp_path, *quick) for _ in range(2))
    for done in (first, second):
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert "1 point of the sweep failed: TP 5" in done.stderr
    assert second.stdout.count("benchmark  skipped") == 1
    for directory in sorted((tmp_path / "sweeps").iterdir()):
        table = pandas.read_csv(directory / "points.csv")
        assert list(table["point"].unique()) == ["TP 1", "TP 5"]
        assert table["tokens_per_s"].notna().tolist() == [True] * 2 + [False]
        assert table["error"].dropna().str.contains("tensor_para_size 5 does not divide").tolist() == [True]
        assert "1 of 2 points are measured" in (directory / "report.html").read_text()
    assert not processes_of(tmp_path)


def test_the_exit_status_is_the_gates_and_the_report_shows_what_it_was_held_against(
    begun: Path, tmp_path: Path
) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("thresholds: {lambada.last_token_accuracy: {at_least: 1.5}}\n")
    first = run(begun, f"evaluation.gate.thresholds={limits}")
    assert first.returncode == 1 and "NO-GO" in first.stdout, first.stdout + first.stderr
    results = results_of(begun)
    assert "Gate: NO-GO" in (results / "report" / "report.html").read_text()
    limits.write_text(
        "thresholds:\n"
        "  lambada.last_token_accuracy: {max_drop: 0}\n"
        "  static.8-8_batch1.latency_mean_ms: {max_rise_percent: 0}\n"
    )
    again = run(begun, f"evaluation.gate.thresholds={limits}", f"evaluation.gate.baseline={results}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("skipped") == 5  # only the report and the gate have anything to do
    page, text = ((results / "report" / name).read_text() for name in ("report.html", "report.md"))
    assert "The gate says GO." in page and "+0.00 points, equal" in page
    assert "| Baseline | Change |" in text
    assert json.loads((results / "gate" / "gate.json").read_text())["verdict"] == "GO"
    limits.write_text("thresholds: {lambada.last_token_acuracy: {at_least: 0.1}}\n")
    assert run(begun, f"evaluation.gate.thresholds={limits}").returncode == 3
    refused = run(begun, "evaluation.gate.baseline=/nowhere")
    assert refused.returncode == 1 and "evaluation.gate.baseline: there is no directory /nowhere" in refused.stderr
