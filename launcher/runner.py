"""Run the plans of one job, one after another: check, skip, execute, verify, publish.

Standard library only. ``python3 -m launcher.runner PLAN.json ...`` is what a job host runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from handover.durable import remove_temporaries
from handover.endpoint import FILE_NAME as ENDPOINT_FILE
from handover.endpoint import REPLICA_JOBS_VARIABLE
from handover.errors import ArtefactError, ServerError, SlipwayError, worded
from launcher.plan.plan import Command, Resources, StagePlan
from launcher.run import artefact, console, work_directory
from launcher.run.bcprun import BcpNodes
from launcher.run.place import Place
from launcher.run.process import describe_status, indented, run_quietly
from launcher.run.results import StageResult, failure_status, write_results
from launcher.run.service import Service
from launcher.run.srun import SlurmSteps
from launcher.run.steps import Step

PLACES = (Place, BcpNodes, SlurmSteps)
"""Where a job's runner may be told that its commands run."""
Wrap = Callable[[Command, Resources, Mapping[str, str]], tuple[str, ...]]

_POLL_S = 0.2
_COMMAND_GRACE_S = 10.0
_DEATH_NOTICE_S = 3.0
_SIGNAL_NOTICE_S = 0.5
_FAREWELL_S = 60.0


class CommandError(SlipwayError):
    """A command failed.

    Attributes:
        status: what a shell would make of its exit status: 128 and the signal where it was killed.
    """

    def __init__(self, problem: str, status: int) -> None:
        super().__init__(problem)
        self.status = status if status > 0 else 128 - status


class TimeUp(KeyboardInterrupt):
    """Slurm's notice that the time limit of the job is near."""


def run_job(
    plans: Sequence[StagePlan],
    wrap: Wrap,
    force: Collection[str] = (),
    stages_file: Path | None = None,
    stop_signals: Sequence[signal.Signals] = (signal.SIGTERM,),
) -> list[StageResult]:
    """Run plans in order; a failure leaves the rest not run, but for those that run always.

    An independent plan that fails stops nothing, unless it was the server that died.

    Args:
        plans: of one job. A service is stopped after the last plan that needs it.
        wrap: turns a command into the argv that starts it here.
        force: stages to redo although their output is current.
        stages_file: kept up to date with the results.
        stop_signals: what ends a command here, see ``Place.stop_signals``.

    Returns:
        One result a plan. An interrupt (Ctrl-C, SIGTERM, SIGUSR2) is raised again once everything is stopped.
    """
    job = _Job(plans, wrap, force, stages_file, stop_signals)
    previous = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGUSR2)}
    try:
        job.run()
    finally:
        job.stop_server()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return job.results


def _interrupt(number: int, frame: FrameType | None) -> None:
    for other in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(other, signal.SIG_IGN)  # one is enough: a second must not interrupt the stopping
    raise TimeUp if number == signal.SIGUSR2 else KeyboardInterrupt


class _Job:
    """The state of a job while it runs."""

    def __init__(
        self,
        plans: Sequence[StagePlan],
        wrap: Wrap,
        force: Collection[str],
        stages_file: Path | None,
        stop_signals: Sequence[signal.Signals],
    ) -> None:
        self.plans, self.wrap, self.force, self.stages_file = plans, wrap, force, stages_file
        self.stop_signals = stop_signals
        self.results = [
            StageResult(plan.stage, plan.name, log=str(plan.log), output=str(plan.output)) for plan in plans
        ]
        self.is_record_lost = False  # stages.json could not be written
        self.is_cut_off = False  # a plan failed that those after it need
        self.server: Service | None = None

    def run(self) -> None:
        for index, plan in enumerate(self.plans):
            if self.is_cut_off and not plan.always:
                self._report(index)
                continue
            if plan.always:
                self.stop_server()
            self._run_one(index)
            if self.is_cut_off or not any(later.needs_server for later in self.plans[index + 1 :]):
                self.stop_server()

    def _run_one(self, index: int) -> None:
        """Run one plan; a failure cuts off those after it, unless nothing needs what the plan makes."""
        plan, result = self.plans[index], self.results[index]
        started = time.monotonic()
        note = ""
        try:
            result.state, note = self._execute(index)
        except (SlipwayError, OSError) as error:
            result.state, result.error = "failed", str(worded(error) if isinstance(error, OSError) else error)
            result.exit_status = error.status if isinstance(error, CommandError) else 1
            self.is_cut_off |= isinstance(error, ServerError) or not plan.independent
        except TimeUp:
            result.state, result.error, result.exit_status = "failed", str(_out_of_time(plan)), 1
            raise
        except KeyboardInterrupt:
            result.state = "interrupted"
            raise
        finally:
            result.elapsed_s = time.monotonic() - started
            self._report(index, note or (str(plan.output) if result.state == "done" else ""))

    def _execute(self, index: int) -> tuple[str, str]:
        """Bring one plan to its end; returns state and a remark."""
        plan = self.plans[index]
        if plan.service:
            return self._serve(index)
        if not plan.always and plan.stage not in self.force and artefact.is_current(plan):
            fingerprint, remark = artefact.run_fingerprint(plan), artefact.code_remark(plan)
            work_directory.clear(plan.output)
            return "skipped", f"unchanged since {fingerprint[:8]}{remark}  (force=[{plan.stage}] to redo)"
        missing = artefact.missing_inputs(plan)
        if missing:
            raise ArtefactError(f"{plan.stage} needs {missing[0]}, which is not there", "run the stage that makes it")
        with artefact.begin(plan) as work:
            self._announce(index)
            for command in plan.commands[work.commands_done :]:
                self._run_command(plan, command)
                work.finish_command()
            kept = work.publish()
        return "done", f"{plan.output}" + (f"  (the one before is in {kept.name})" if kept else "")

    def _start(self, plan: StagePlan, command: Command, **variables: str) -> Step:
        env = {**plan.env, **variables}
        return Step(self.wrap(command, plan.resources, env), env, plan.log, self.stop_signals)

    def _run_command(self, plan: StagePlan, command: Command) -> None:
        child = self._start(plan, command)
        try:
            while (status := child.wait(_POLL_S)) is None:
                self._check_server(plan)
        finally:
            child.stop(_COMMAND_GRACE_S)
        if status:
            if status < 0 or status > 128:
                time.sleep(_SIGNAL_NOTICE_S)  # Slurm signals first the step, then us; ours says why
            self._check_server(plan, patience_s=_DEATH_NOTICE_S)
            raise CommandError(f"{plan.stage}: {describe_status(status)}\n{indented(child.last_lines)}", status)

    def _check_server(self, plan: StagePlan, patience_s: float = 0) -> None:
        """Raise if the plan needs the server and that is going down.

        A client may notice before the server's supervisor does, hence the patience. The supervisor withdraws
        the endpoint file first; its exit, with the reason, comes once the server is cleared away.
        """
        if not (plan.needs_server and self.server):
            return
        deadline = time.monotonic() + patience_s
        while self.server.is_published() and self.server.wait(0) is None:
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)
        self.server.wait(self.server.grace_s)
        raise ServerError(f"the server died while {plan.stage} ran\n{indented(self.server.last_lines)}")

    def _serve(self, index: int) -> tuple[str, str]:
        plan = self.plans[index]
        clients = [later for later in self.plans[index + 1 :] if later.needs_server]
        if clients and all(artefact.is_current(c) and c.stage not in self.force for c in clients):
            if plan.output.is_dir():  # of a server that was killed while it told where it is
                remove_temporaries(plan.output)
            return "skipped", "nothing after it needs a server"
        self._announce(index)
        plan.output.mkdir(parents=True, exist_ok=True)
        *preparations, command = plan.commands
        for preparation in preparations:
            self._run_command(plan, preparation)
        server = self.server = Service(partial(self._start, plan, command), plan.output / ENDPOINT_FILE, plan.grace_s)
        if not clients:
            return self._serve_until_stopped(server, plan)
        while not server.is_published():
            if (status := server.wait(_POLL_S)) is not None:
                self.server = None
                raise ServerError(f"the server did not start: {describe_status(status)}\n{indented(server.last_lines)}")
        return "done", f"{server.endpoint}"

    def _serve_until_stopped(self, server: Service, plan: StagePlan) -> tuple[str, str]:
        """Wait for Ctrl-C or SIGTERM: that is how a server without clients in this run is meant to end."""
        if plan.is_replica:
            server.restart_at_hangup()
        try:
            while (status := server.wait(_POLL_S)) is None:
                pass
        except TimeUp:
            raise
        except KeyboardInterrupt:
            self.stop_server()
            return "done", "the server was stopped"
        if status:
            raise ServerError(f"the server ended: {describe_status(status)}\n{indented(server.last_lines)}")
        return "done", "the server ended"

    def stop_server(self) -> None:
        """Stop the service, if it runs."""
        if self.server:
            server, self.server = self.server, None
            server.stop()

    def _announce(self, index: int) -> None:
        self.results[index].state = "running"
        self._report(index, f"log {self.plans[index].log}")

    def _report(self, index: int, note: str = "") -> None:
        console.stage_line(index + 1, len(self.plans), self.results[index], note)
        if not self.stages_file:
            return
        try:
            write_results(self.stages_file, self.results)
        except OSError as error:  # what became of a stage does not depend on whether it can be noted down
            if not self.is_record_lost:
                console.say_error(f"how the stages end cannot be recorded: {worded(error)}")
            self.is_record_lost = True


def _out_of_time(plan: StagePlan) -> SlipwayError:
    return SlipwayError(
        f"{plan.stage}: stopped, because the job's time limit is near",
        f"raise the stage's run.time_limit (now {plan.resources.time_limit}); "
        "the same command then continues with what was cut off",
    )


def main(argv: Sequence[str]) -> int:
    """Run the plans in the given files on this host."""
    parser = argparse.ArgumentParser(prog="launcher.runner", description=main.__doc__)
    parser.add_argument("plans", nargs="+", type=Path, help="plan files, in order")
    place = partial(Place.read, places=PLACES)
    parser.add_argument("--place", type=place, default=Place(), help="how commands are started, as JSON")
    parser.add_argument("--force", default="", help="stages to redo, with commas")
    parser.add_argument("--stages-file", type=Path, help="file for the results")
    parser.add_argument("--replica-jobs", default="", help="that are the servers of a router here, with commas")
    options = parser.parse_args(list(argv))
    force = [stage for stage in options.force.split(",") if stage]
    options.place.prepare(os.environ)
    os.environ.update({REPLICA_JOBS_VARIABLE: options.replica_jobs} if options.replica_jobs else {})
    try:
        plans = [StagePlan.from_json(file.read_text()) for file in options.plans]
        results = run_job(plans, options.place.wrap, force, options.stages_file, options.place.stop_signals)
    except OSError as error:
        console.say_error(str(worded(error)))
        return 1
    except TimeUp:
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        ending = options.place.cancelling([job for job in options.replica_jobs.split(",") if job])
        for command in (*ending, *options.place.clean_up_commands([plan.resources for plan in plans])):
            run_quietly(command, _FAREWELL_S)
    return failure_status(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
