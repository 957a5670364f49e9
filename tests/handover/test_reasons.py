"""Which line of an error a table shows; the texts are what stages.json held after runs that failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from handover.reasons import OUR_PROGRAMS, reason_of
from launcher.run.process import Child

TRUNCATED = """convert: exit status 1
    convert    0/292 tensors
    convert: gpt3_demo.nemo is not a tar archive, or it is truncated or damaged (unexpected end of data)
      hint: copy it again
    srun: error: node1: task 0: Exited with exit code 1
    srun: launch/slurm: _step_signal: Terminating StepId=27837.0"""
SERVER = """the server died while benchmark ran
    ready      a generation came back after 3.1 s
    deploy: generation failed: rank 1 is lost: it has hung up
      last lines of /results/server.log:
        I1122 18:00:01.000000 1 server.cc:674] waiting for in-flight requests
    deploy: rank 2 is lost
    srun: error: node2: task 1: Exited with exit code 1
    srun: launch/slurm: _step_signal: Terminating StepId=27838.0
    slurmstepd: error: *** STEP 27838.0 ON node1 CANCELLED AT 2026-11-22T18:00:02 ***"""
TRACEBACK = """report: exit status 1
    Traceback (most recent call last):
      File "/opt/slipway/evaluation/report/write.py", line 7, in <module>
        import rich
    ModuleNotFoundError: No module named 'rich'
    srun: error: node1: task 0: Exited with exit code 1"""
ANNOUNCED = """convert: exit status 1
    convert: note: NeMo GPT with legacy keys, for FasterTransformer's gpt
          convert      60%  175/292 tensors
    convert: the disk is full: /r/1-gpu.partial could not be written (No space left on device)
      hint: free some space
    srun: error: node1: task 0: Exited with exit code 1"""
KILLED_AFTER_ANNOUNCING = """convert: exit status 137, killed by SIGKILL
    convert: note: NeMo GPT with legacy keys, for FasterTransformer's gpt
          convert      60%  175/292 tensors
    srun: error: node1: task 0: Killed"""
KILLED_TASK = """the server ended: exit status 137, killed by SIGKILL
          serving    vLLM 0.32.0  http://127.0.1.1:16777/v1
    srun: error: node2: task 1: Killed
    srun: launch/slurm: _step_signal: Terminating StepId=875729.0
    slurmstepd-node1: error: *** STEP 875729.0 ON node1 CANCELLED AT 2026-11-27T21:41:15 ***
          stopping   SIGTERM
    srun: Force Terminated StepId=875729.0"""
CANCELLED = """benchmark: exit status 143, killed by SIGTERM
    srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
    slurmstepd-node1: error: *** STEP 26790.2 ON node1 CANCELLED AT 2026-11-26T10:00:00 ***
    benchmark: no server answers at node1:8001
    srun: error: node1: task 0: Terminated"""
LOST_NODE = """the server died while benchmark ran
    deploy: rank 1 of 4 ended with exit status 1
      last lines of /results/deployment/server.rank1.log:
        fastertransformer: rank 1 of 4: rank 2 is lost: no heartbeat for 20 s
    srun: error: node1: task 1: Exited with exit code 1"""
ANOTHERS_END = """the server ended: exit status 1
    deploy: rank 1 of 4 ended with exit status 1
    deploy: rank 2 of 4 was killed by SIGKILL"""
STEP_REFUSED = """convert: exit status 1
    srun: warning: can't run 1 processes on 2 nodes, setting nnodes to 1
    srun: error: cons_tres: something about it
    srun: error: Unable to create step for job 26849: this node lacks support for cpu binding
    srun: error: node1: task 0: Exited with exit code 1"""
NO_MEMORY = """the server died while evaluate ran
    deploy: rank 1 of 2 was killed by SIGKILL
    slurmstepd-node1: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may have been killed.
    srun: error: node1: task 0: Out Of Memory"""
IMAGE = """convert: exit status 1
    pyxis: importing docker image: registry.example/image
    slurmstepd: error: pyxis: failed to import docker image
    slurmstepd: error: pyxis: printing enroot log file:
    slurmstepd: error: pyxis:     [INFO] Querying registry for permission grant
    slurmstepd: error: pyxis:     [ERROR] URL https://registry.example/v2/ returned error code: 401 Unauthorized
    slurmstepd: error: pyxis: couldn't start container
    slurmstepd: error: Failed to invoke spank plugin stack"""
LIBRARY = """evaluate: exit status 1
    huggingface/tokenizers: The current process just got forked, after parallelism has already been used.
    libibverbs: Warning: couldn't load driver
    evaluate: answer 7 has no log probabilities"""
LIBRARY_AND_TRACEBACK = """evaluate: exit status 1
    huggingface/tokenizers: The current process just got forked, after parallelism has already been used.
    Traceback (most recent call last):
      File "/opt/slipway/evaluation/lambada.py", line 7, in <module>
    KeyError: 'x'"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ANNOUNCED, "convert: the disk is full: /r/1-gpu.partial could not be written (No space left on device)"),
        (KILLED_AFTER_ANNOUNCING, "convert: exit status 137, killed by SIGKILL"),
        (KILLED_TASK, "srun: error: node2: task 1: Killed"),
        (CANCELLED, "benchmark: no server answers at node1:8001"),
        (LOST_NODE, "deploy: rank 2 is lost: no heartbeat for 20 s"),
        (ANOTHERS_END, "deploy: rank 2 of 4 was killed by SIGKILL"),
        (
            STEP_REFUSED,
            "srun: error: Unable to create step for job 26849: this node lacks support for cpu binding",
        ),
        (NO_MEMORY, NO_MEMORY.splitlines()[2].strip()),
        (IMAGE, IMAGE.splitlines()[5].strip()),
        (LIBRARY, "evaluate: answer 7 has no log probabilities"),
        (LIBRARY_AND_TRACEBACK, "KeyError: 'x'"),
        (
            TRUNCATED,
            "convert: gpt3_demo.nemo is not a tar archive, or it is truncated or damaged (unexpected end of data)",
        ),
        (SERVER, "deploy: generation failed: rank 1 is lost: it has hung up"),
        (TRACEBACK, "ModuleNotFoundError: No module named 'rich'"),
        (
            "convert: exit status 127\n    bash: line 1: module: command not found",
            "bash: line 1: module: command not found",
        ),
        ("evaluate: exit status 1\n    srun: error: Unable to create step", "srun: error: Unable to create step"),
        (
            "evaluate needs /x.nemo, which is not there\n  hint: run the stage",
            "evaluate needs /x.nemo, which is not there",
        ),
        ("benchmark: exit status 137, killed by SIGKILL\n", "benchmark: exit status 137, killed by SIGKILL"),
        ("", ""),
    ],
)
def test_the_first_error_of_the_process_that_failed(error: str, reason: str) -> None:
    assert reason_of(error) == reason


def test_every_script_of_the_project_is_known_by_the_name_in_its_errors() -> None:
    folders = ("deployment", "evaluation", "export_scripts", "launcher")
    root = Path(__file__).resolve().parents[2]
    texts = [file.read_text() for folder in folders for file in (root / folder).rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'exit_status\(main, "([^"]+)"\)', text)}
    assert len(named) > 15 and {*named, "slipway"} == set(OUR_PROGRAMS)


def test_an_error_is_kept_when_the_output_of_others_follows_it(tmp_path: Path) -> None:
    """As of a rank whose fellows go on to print for a while."""
    script = "echo 'convert: the disk is full' >&2; for i in $(seq 100); do echo line $i; done; exit 1"
    child = Child(["/bin/sh", "-c", script], {}, tmp_path / "log", quiet=True)
    assert child.wait(240) == 1
    shown = "".join(f"    {line}\n" for line in child.last_lines.splitlines())
    assert "line 100" in shown and reason_of(f"convert: exit status 1\n{shown}") == "convert: the disk is full"
