"""Which line of an error a table shows; the texts are what stages.json held after runs that failed."""

from __future__ import annotations

import pytest

from handover.reasons import reason_of

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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
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
