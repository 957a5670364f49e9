"""Write a run's jobs for other launchers; nothing is started here."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from handover.durable import write_atomically
from launcher.config.schema import Config
from launcher.config.secrets import is_secret, plain_variables
from launcher.plan.mounts import usual_mounts
from launcher.plan.paths import RunPaths
from launcher.plan.plan import PYTHON, Command, Resources, outermost
from launcher.run.place import interpreter_in
from launcher.submit import Job
from launcher.submit.elsewhere.script import Script
from launcher.submit.elsewhere.table import LAUNCHERS
from launcher.submit.kubernetes.pods import check_nodes, jobs_in

_CPUS = 4


class ElsewhereExecutor:
    """A directory below the run's results with a folder for each launcher, and in it a file a job, in their order."""

    def __init__(self, config: Config, paths: RunPaths) -> None:
        self.config, self.paths = config, paths
        self.directory = paths.results / "plans"

    def wrap(self, command: Command, resources: Resources, env: Mapping[str, str]) -> tuple[str, ...]:
        """Start below the runner, wherever that is."""
        return command.argv

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse a server over several nodes that one process on each cannot serve."""
        for job in jobs:
            check_nodes(job, self.config.deployment.engine)

    def preview(self, jobs: Sequence[Job], force: Collection[str]) -> str:
        """Return the files as they would be written, after what is not."""
        files = (f"=== {file}\n{text}" for file, text, _ in self._files(jobs, force))
        return "".join((*self._left_out(jobs, force), *files))

    def submit(self, jobs: Sequence[Job], force: Collection[str]) -> int:
        """Write the files, and print what starts each: one launcher's, each after the one before it has ended."""
        print("".join(self._left_out(jobs, force)), end="", flush=True)
        for file, text, start in self._files(jobs, force):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text)
            print(f"{file.parent.name:<10} {shlex.join(start)}", flush=True)
        return 0

    def _files(self, jobs: Sequence[Job], force: Collection[str]) -> Iterator[tuple[Path, str, list[str]]]:
        scripts = [self._script(job, force) for job in jobs_in(jobs)]
        for launcher in LAUNCHERS:
            for number, script in enumerate(scripts, 1):
                file = self.directory / launcher.name / f"{number}_{script.stage}{launcher.suffix}"
                if not launcher.lacks(script):
                    yield file, launcher.render(script, file), launcher.start(script, file)

    def _left_out(self, jobs: Sequence[Job], force: Collection[str]) -> Iterator[str]:
        scripts = [self._script(job, force) for job in jobs_in(jobs)]
        for launcher in LAUNCHERS:
            for script in scripts:
                if reason := launcher.lacks(script):
                    yield f"{launcher.name:<10} no file of {script.name}: {reason}\n"

    def _script(self, job: Job, force: Collection[str]) -> Script:
        config, image = self.config, job.plans[0].resources.container
        python = PYTHON if image else interpreter_in(str(self.paths.project))
        named = {name for name, value in config.env_vars.items() if value is not None and is_secret(name)}
        named |= set(filter(None, (config.deployment.endpoint_key_env, config.signing.password_env)))
        return Script(
            job=job,
            words=(python, "-m", "launcher.runner", *([f"--force={','.join(sorted(force))}"] if force else [])),
            directory=str(self.paths.project),
            image=image,
            gpu_type=config.cluster.gpu_type or "",
            cpus=config.cluster.cpus_per_task or _CPUS,
            cluster=config.cluster,
            given=config.kubernetes,
            variables=plain_variables(config),
            secrets=dict.fromkeys(sorted(named), "")
            | {n: str(place) for n, place in config.kubernetes.secrets.items()},
            mounts=outermost(usual_mounts(config, self.paths)),
        )


open_executor = ElsewhereExecutor
