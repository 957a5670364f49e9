"""The runner's contract, with real processes: success, failure, skip, resume, interrupts, hostile paths, services."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from handover import provenance
from handover.manifest import WORK_FILE, Manifest
from launcher.plan.plan import Command, Resources, StagePlan, partial
from launcher.run import artefact
from launcher.run.artefact import begin, is_current, run_fingerprint
from launcher.run.place import Place
from launcher.run.results import StageResult, failure_status
from launcher.run.work_directory import lock_of
from launcher.runner import run_job

PROJECT = Path(__file__).resolve().parents[2]
WRITE = "import pathlib, sys; d = pathlib.Path(sys.argv[1]); d.mkdir(parents=True, exist_ok=True); "
HOSTILE_NAMES = ["plain", "with space", 'quote\'s "both"', "$(touch x); touch x", "new\nline", "-rf", "ümläut*?"]


def python(code: str, *arguments: str | Path) -> Command:
    return Command(("python3", "-c", code, *map(str, arguments)))


def writes(output: Path, name: str = "result.txt", content: str = "done") -> Command:
    return python(WRITE + "(d / sys.argv[2]).write_text(sys.argv[3])", partial(output), name, content)


def plan_of(root: Path, stage: str, *commands: Command, inputs: Sequence[Path] = ()) -> StagePlan:
    output = root / stage
    return StagePlan(
        stage=stage,
        name=stage,
        commands=commands or (writes(output),),
        resources=Resources(),
        inputs=tuple(inputs),
        output=output,
        log=root / "logs" / f"{stage}.log",
    )


def run(*plans: StagePlan, force: Sequence[str] = ()) -> list[StageResult]:
    return run_job(plans, Place().wrap, force)


def states(results: Sequence[StageResult]) -> list[str]:
    return [result.state for result in results]


def test_success_publishes_with_a_manifest_and_leaves_nothing_else(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "convert")
    assert states(run(plan)) == ["done"]
    assert (plan.output / "result.txt").read_text() == "done"
    assert [record.path for record in Manifest.read(plan.output).files] == ["result.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["convert", "logs"]


def test_a_failure_stops_the_rest_but_not_what_always_runs(tmp_path: Path) -> None:
    fails = plan_of(tmp_path, "convert", python("import sys; sys.exit('the reason')"))
    report = replace(plan_of(tmp_path, "report"), always=True)
    results = run(fails, plan_of(tmp_path, "export"), report)
    assert states(results) == ["failed", "not run", "done"]
    assert "the reason" in results[0].error and "exit status 1" in results[0].error
    assert failure_status(results) == 1
    assert not fails.output.exists() and not (tmp_path / "export").exists()
    assert "the reason" in fails.log.read_text()


def test_a_command_that_writes_nothing_is_a_failure(tmp_path: Path) -> None:
    results = run(plan_of(tmp_path, "convert", python("pass")))
    assert states(results) == ["failed"] and "wrote nothing" in results[0].error


def test_a_file_that_the_manifest_does_not_list_is_a_failure(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "convert")
    code = WRITE + "from handover.manifest import Manifest; Manifest('x', ()).write(d); (d / 'stray').touch()"
    results = run(replace(plan, commands=(python(code, partial(plan.output)),)))
    assert states(results) == ["failed"] and "stray" in results[0].error


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_paths_and_arguments_reach_the_command_unchanged(tmp_path: Path, name: str) -> None:
    root = tmp_path / name
    plan = plan_of(root, "convert", writes(root / "convert", content=name))
    assert states(run(StagePlan.from_json(plan.to_json()))) == ["done"]
    assert (plan.output / "result.txt").read_text() == name
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_an_unchanged_stage_is_skipped_until_forced_or_its_input_changes(tmp_path: Path) -> None:
    source = tmp_path / "source.nemo"
    source.write_text("one")
    plan = plan_of(tmp_path, "convert", inputs=[source])
    assert states(run(plan)) == ["done"]
    assert states(run(plan)) == ["skipped"]
    assert states(run(plan, force=["convert"])) == ["done"]
    source.write_text("another")
    assert states(run(plan)) == ["done"]
    kept = [path for path in tmp_path.iterdir() if ".replaced-" in path.name]
    assert len(kept) == 2, "an artefact that is made again never deletes the one before"


def test_code_that_changed_since_is_remarked_and_nothing_is_redone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path, "convert")
    run(plan)
    assert states(run(plan)) == ["skipped"]
    assert "commit" not in capsys.readouterr().out
    now = provenance.made_by()
    monkeypatch.setattr(artefact, "made_by", lambda: {**now, "code": "sha256:edited"})
    assert states(run(plan)) == ["skipped"]
    assert f"the code was edited since (commit {now['commit'][:8]})" in capsys.readouterr().out
    monkeypatch.setattr(artefact, "made_by", lambda: {**now, "code": "sha256:other", "commit": "0123456789"})
    assert states(run(plan)) == ["skipped"]
    assert f"made by commit {now['commit'][:8]}, now 01234567" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["plan.py", "kernels.c"])
def test_the_digest_of_the_code_is_of_its_text_and_not_of_its_commit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for text in ("a = 1", "a = 1", "a = 2"):
        (tmp_path / "launcher").mkdir(exist_ok=True)
        (tmp_path / "launcher" / name).write_text(text)
        monkeypatch.setattr(provenance, "_ROOT", tmp_path)
        digests.append(provenance.code_digest())
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_results_go_on_at_another_place(tmp_path: Path, how: str) -> None:
    def plans(root: Path) -> list[StagePlan]:
        convert = plan_of(root, "convert", inputs=[tmp_path / "source.nemo"])
        return [convert, plan_of(root, "export", inputs=[convert.output])]

    (tmp_path / "source.nemo").write_text("weights")
    old, new = tmp_path / "old", tmp_path / "a" / "new place"
    assert states(run(*plans(old))) == ["done", "done"]
    new.parent.mkdir()
    shutil.move(old, new) if how == "moved" else shutil.copytree(old, new)
    assert states(run(*plans(new))) == ["skipped", "skipped"]
    assert sorted(path.name for path in new.iterdir()) == ["convert", "export", "logs"]


def nul_filled(content: bytes) -> bytes:
    """What a loss of power leaves of a file whose size was on disk already."""
    return bytes(len(content))


def half_nul_filled(content: bytes) -> bytes:
    return content[: len(content) // 2] + bytes(len(content) - len(content) // 2)


# A large file is read in parts, of which the last is damaged.
@pytest.mark.in_ci(when=lambda at: at.size_bytes == 20 or at.damage is half_nul_filled)
@pytest.mark.parametrize("damage", [nul_filled, half_nul_filled, None])
@pytest.mark.parametrize("size_bytes", [20, 3 << 20])
def test_a_damaged_output_is_made_again(
    tmp_path: Path, size_bytes: int, damage: Callable[[bytes], bytes] | None
) -> None:
    output = tmp_path / "convert"
    plan = plan_of(tmp_path, "convert", python(WRITE + f"(d / 'x').write_bytes(b'x' * {size_bytes})", partial(output)))
    run(plan)
    assert is_current(plan)
    if damage:
        (output / "x").write_bytes(damage((output / "x").read_bytes()))
    else:
        (output / "x").unlink()
    assert not is_current(plan)
    assert states(run(plan)) == ["done"]


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    results = run(plan_of(tmp_path, "export", inputs=[tmp_path / "ft"]))
    assert states(results) == ["failed"] and str(tmp_path / "ft") in results[0].error


def test_a_directory_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "convert")
    plan.output.mkdir()
    (plan.output / "thesis.txt").write_text("mine")
    results = run(plan)
    assert states(results) == ["failed"] and "not made by Slipway" in results[0].error
    assert (plan.output / "thesis.txt").read_text() == "mine"


def test_a_partial_directory_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "convert")
    partial(plan.output).mkdir()
    (partial(plan.output) / "thesis.txt").write_text("mine")
    assert states(run(plan)) == ["failed"]
    assert (partial(plan.output) / "thesis.txt").read_text() == "mine"


def test_neither_a_lock_nor_a_name_makes_a_directory_ours(tmp_path: Path) -> None:
    """Only the mark in it does: a lock may stay behind by a kill, and names can be anybody's."""
    plan = plan_of(tmp_path, "convert")
    partial(plan.output).mkdir()
    (partial(plan.output) / "thesis.txt").write_text("mine")
    lock_of(plan.output).write_text('{"pid": 1, "fingerprint": "' + run_fingerprint(plan) + '", "commands_done": 1}')
    assert states(run(plan)) == ["failed"]
    assert (partial(plan.output) / "thesis.txt").read_text() == "mine"
    assert not lock_of(plan.output).exists()


@pytest.mark.parametrize("mark", ["", "\0" * 40, "null", '{"fingerprint": "f", "commands_done": []}'])
def test_work_of_ours_whose_mark_is_damaged_is_begun_anew(tmp_path: Path, mark: str) -> None:
    plan = plan_of(tmp_path, "convert")
    failing = replace(plan, commands=(writes(plan.output, "old"), python("import sys; sys.exit(3)")))
    assert states(run(failing)) == ["failed"]
    (partial(plan.output) / WORK_FILE).write_text(mark)
    assert states(run(plan)) == ["done"]
    assert sorted(path.name for path in plan.output.iterdir()) == ["manifest.json", "result.txt"]


def test_what_is_not_whole_when_it_is_published_is_made_again_by_the_next_run(tmp_path: Path) -> None:
    """Work that was done is taken up as done, but not for ever if it turns out to be damaged."""
    plan = plan_of(tmp_path, "convert")
    with_manifest = f"sys.path.insert(0, {str(PROJECT)!r}); from handover.manifest import Manifest, record_files; "
    makes = WRITE + with_manifest + "(d / 'x').write_text('x'); Manifest('x', record_files(d)).write(d)"
    loses = WRITE + "p = d.with_name('lost'); (p.exists() or (d / 'x').unlink()); p.touch()"
    losing = replace(plan, commands=(python(makes, partial(plan.output)), python(loses, partial(plan.output))))
    assert states(run(losing)) == ["failed"]
    assert states(run(losing)) == ["done"]


def test_a_run_that_skips_clears_what_a_killed_one_left(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "convert")
    assert states(run(plan)) == ["done"]
    code = (
        f"import os; from launcher.run.artefact import begin; from launcher.plan.plan import StagePlan\n"
        f"with begin(StagePlan.from_json({plan.to_json()!r})): os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=False)
    (tmp_path / ".convert.partial.0a1b2c3d.slipway-tmp").mkdir()
    (plan.output / WORK_FILE).touch()
    assert lock_of(plan.output).exists() and partial(plan.output).exists()
    assert states(run(plan)) == ["skipped"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["convert", "logs"]
    assert not (plan.output / WORK_FILE).exists()


def test_a_second_run_at_the_same_time_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "convert")
    with begin(plan):
        code = "import sys; from launcher.runner import main; sys.exit(main(sys.argv[1:]))"
        file = tmp_path / "plan.json"
        file.write_text(plan.to_json())
        other = subprocess.run(
            [sys.executable, "-c", code, str(file)], cwd=PROJECT, capture_output=True, text=True, check=False
        )
    assert other.returncode == 1 and "another run is making" in other.stderr


def start_runner(tmp_path: Path, *plans: StagePlan) -> subprocess.Popen[str]:
    files = []
    for plan in plans:
        files.append(tmp_path / f"{plan.stage}.plan.json")
        files[-1].write_text(plan.to_json())
    command = [sys.executable, "-m", "launcher.runner", *map(str, files)]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(path: Path, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


SLEEPS = WRITE + "import os, time; (d / 'pid').write_text(str(os.getpid())); time.sleep(60)"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_only_partial_work_and_no_process(tmp_path: Path, how: signal.Signals) -> None:
    plan = plan_of(tmp_path, "convert")
    hanging = replace(plan, commands=(writes(plan.output), python(SLEEPS, partial(plan.output))))
    runner = start_runner(tmp_path, hanging)
    wait_for(partial(plan.output) / "pid")
    pid = int((partial(plan.output) / "pid").read_text() or 0)
    runner.send_signal(how)
    runner.communicate(timeout=180)
    deadline = time.monotonic() + 240
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)
    assert not plan.output.exists()


def test_the_next_run_continues_at_the_command_that_was_cut_off(tmp_path: Path) -> None:
    output = tmp_path / "convert"
    count = python(WRITE + "p = d / 'count'; p.write_text(p.read_text() + 'x' if p.exists() else 'x')", partial(output))
    hangs_once = python(
        SLEEPS.replace("import os", "import os\nif (d / 'pid').exists(): sys.exit()\nimport os"), partial(output)
    )
    plan = plan_of(tmp_path, "convert", count, hangs_once)
    runner = start_runner(tmp_path, plan)
    wait_for(partial(output) / "pid")
    runner.kill()
    runner.communicate(timeout=180)
    assert lock_of(output).exists() and not output.exists()
    assert states(run(plan)) == ["done"]
    assert (output / "count").read_text() == "x", "the finished command is not run again"
    assert not lock_of(output).exists() and not partial(output).exists()


def test_work_of_another_plan_is_not_continued(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "convert")
    old = replace(plan, commands=(python(WRITE + "(d / 'old').touch(); sys.exit(3)", partial(plan.output)),))
    assert states(run(old)) == ["failed"]
    assert states(run(plan)) == ["done"]
    assert not (plan.output / "old").exists()


FAKE_SERVER = """
import json, os, pathlib, signal, sys, time
d = pathlib.Path(sys.argv[1])
def stop(*_):
    (d / "stopped").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
(d / "endpoint.json").write_text(json.dumps({"host": "fake", "pid": os.getpid(), "run": os.environ["SLIPWAY_RUN"]}))
time.sleep(float(sys.argv[2]))
sys.exit("the fake server died")
"""


def fake_server(root: Path, lives_s: float = 60) -> StagePlan:
    """Stands in for deployment.serve at the runner's boundary: it publishes an endpoint and waits."""
    plan = plan_of(root, "deploy", python(FAKE_SERVER, root / "deploy", str(lives_s)))
    return replace(plan, service=True)


def client(root: Path, stage: str, code: str = "pass") -> StagePlan:
    plan = plan_of(root, stage)
    check = f"assert not pathlib.Path({str(root / 'deploy' / 'stopped')!r}).exists(); {code}; (d / 'x').touch()"
    return replace(plan, commands=(python(WRITE + check, partial(plan.output)),), needs_server=True)


def test_a_service_runs_until_its_last_client_is_done(tmp_path: Path) -> None:
    server = fake_server(tmp_path)
    after = replace(
        plan_of(
            tmp_path,
            "report",
            python(
                WRITE + "(d / 'y').touch(); sys.exit(not pathlib.Path(sys.argv[2]).exists())",
                partial(tmp_path / "report"),
                server.output / "stopped",
            ),
        ),
        always=True,
    )
    results = run(server, client(tmp_path, "evaluate"), client(tmp_path, "benchmark"), after)
    assert states(results) == ["done"] * 4
    pid = json.loads((server.output / "endpoint.json").read_text())["pid"]
    assert not is_running(pid)


@pytest.mark.parametrize(("grace_s", "ends"), [(0.2, False), (20.0, True)])
def test_a_service_has_the_time_to_end_that_its_plan_says(tmp_path: Path, grace_s: float, ends: bool) -> None:
    """As for requests in flight: deployment.exit_timeout_s of any length, and what ends around the server."""
    code = FAKE_SERVER.replace("    (d /", "    time.sleep(1)\n    (d /")
    server = replace(fake_server(tmp_path), commands=(python(code, tmp_path / "deploy", "60"),), grace_s=grace_s)
    assert states(run(server, client(tmp_path, "evaluate"))) == ["done", "done"]
    assert (server.output / "stopped").exists() is ends


def test_what_prepares_a_service_comes_first(tmp_path: Path) -> None:
    server = fake_server(tmp_path)
    prepare = python("import pathlib, sys; pathlib.Path(sys.argv[1]).touch()", server.output / "tuned")
    prepared = replace(server, commands=(prepare, *server.commands))
    tuned = f"assert pathlib.Path({str(server.output / 'tuned')!r}).exists()"
    assert states(run(prepared, client(tmp_path, "evaluate", tuned))) == ["done", "done"]


def test_a_service_that_cannot_be_prepared_is_not_started(tmp_path: Path) -> None:
    server = fake_server(tmp_path)
    unprepared = replace(server, commands=(python("import sys; sys.exit('no GPU')"), *server.commands))
    results = run(unprepared, client(tmp_path, "evaluate"))
    assert states(results) == ["failed", "not run"] and "no GPU" in results[0].error
    assert not (server.output / "endpoint.json").exists()


def test_a_service_is_stopped_when_a_client_fails(tmp_path: Path) -> None:
    server = fake_server(tmp_path)
    results = run(server, client(tmp_path, "evaluate", "sys.exit(9)"), client(tmp_path, "benchmark"))
    assert states(results) == ["done", "failed", "not run"]
    assert (server.output / "stopped").exists()


def test_an_independent_client_that_fails_stops_no_other(tmp_path: Path) -> None:
    fails = replace(client(tmp_path, "evaluate", "sys.exit(9)"), independent=True)
    results = run(fake_server(tmp_path), fails, client(tmp_path, "benchmark"))
    assert states(results) == ["done", "failed", "done"]
    assert failure_status(results) == 9 and "exit status 9" in results[1].error
    assert (tmp_path / "deploy" / "stopped").exists()


def test_a_client_is_not_run_once_the_server_has_died(tmp_path: Path) -> None:
    hangs = replace(client(tmp_path, "evaluate", "import time; time.sleep(60)"), independent=True)
    results = run(fake_server(tmp_path, lives_s=1.0), hangs, client(tmp_path, "benchmark"))
    assert states(results) == ["done", "failed", "not run"]


def test_no_server_is_started_when_its_clients_are_current(tmp_path: Path) -> None:
    plans = [fake_server(tmp_path), client(tmp_path, "evaluate")]
    assert states(run(*plans)) == ["done", "done"]
    assert states(run(*plans)) == ["skipped", "skipped"]


def test_a_server_that_dies_fails_the_client_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    results = run(fake_server(tmp_path, lives_s=1.0), client(tmp_path, "evaluate", "import time; time.sleep(60)"))
    assert states(results) == ["done", "failed"]
    assert "the server died while evaluate ran" in results[1].error and "the fake server died" in results[1].error
    assert time.monotonic() - started < 20


def test_a_server_that_cannot_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    server = fake_server(tmp_path)
    results = run(
        replace(server, commands=(python("import sys; sys.exit('no such port')"),)), client(tmp_path, "evaluate")
    )
    assert states(results) == ["failed", "not run"] and "no such port" in results[0].error


def test_an_interrupt_stops_the_server(tmp_path: Path) -> None:
    server = fake_server(tmp_path)
    runner = start_runner(
        tmp_path, server, client(tmp_path, "evaluate", "(d / 'pid').touch(); import time; time.sleep(60)")
    )
    wait_for(partial(tmp_path / "evaluate") / "pid")
    runner.send_signal(signal.SIGINT)
    runner.communicate(timeout=180)
    assert (server.output / "stopped").exists()
    assert not is_running(json.loads((server.output / "endpoint.json").read_text())["pid"])


def test_a_killed_runner_takes_its_server_along(tmp_path: Path) -> None:
    server = fake_server(tmp_path)
    runner = start_runner(
        tmp_path, server, client(tmp_path, "evaluate", "(d / 'pid').touch(); import time; time.sleep(60)")
    )
    wait_for(partial(tmp_path / "evaluate") / "pid")
    os.kill(runner.pid, signal.SIGKILL)
    runner.communicate(timeout=180)
    wait_for(server.output / "stopped")


def test_a_server_without_clients_runs_until_it_is_stopped(tmp_path: Path) -> None:
    server = fake_server(tmp_path)
    runner = start_runner(tmp_path, server)
    wait_for(server.output / "endpoint.json")
    runner.send_signal(signal.SIGINT)
    output, _ = runner.communicate(timeout=180)
    assert runner.returncode == 0 and "the server was stopped" in output
    assert (server.output / "stopped").exists()


@pytest.mark.parametrize(("code", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_the_exit_status_of_the_command_that_failed_comes_through(tmp_path: Path, code: str, status: int) -> None:
    results = run(plan_of(tmp_path, "convert", python(f"import os, sys; {code}")), plan_of(tmp_path, "export"))
    assert failure_status(results) == status


@pytest.mark.parametrize("status", [1, 3])
def test_a_verdict_that_is_not_go_is_published_and_its_status_comes_through(tmp_path: Path, status: int) -> None:
    plan = replace(plan_of(tmp_path, "gate"), always=True)
    says = python(WRITE + "(d / 'gate.json').write_text(sys.argv[2]); sys.exit(int(sys.argv[2]))")
    says = replace(says, argv=(*says.argv, str(partial(plan.output)), str(status)))
    results = run(replace(plan, commands=(says,)))
    assert states(results) == ["failed"] and failure_status(results) == status
    assert (plan.output / "gate.json").read_text() == str(status)
    assert [record.path for record in Manifest.read(plan.output).files] == ["gate.json"]
    assert not partial(plan.output).exists()


def test_a_gate_that_could_not_decide_publishes_nothing_and_leaves_the_last_verdict(tmp_path: Path) -> None:
    plan = replace(plan_of(tmp_path, "gate"), always=True)
    run(replace(plan, commands=(writes(plan.output, "gate.json", "GO"),)))
    results = run(replace(plan, commands=(python("import sys; sys.exit('no limits')"),)))
    assert states(results) == ["failed"] and (plan.output / "gate.json").read_text() == "GO"
