"""One artefact's life: is it current, begin work in ``.partial``, verify, publish. Nothing else renames results.

Standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from handover.errors import ArtefactError
from handover.identity import files_of, identify
from handover.manifest import FILE_NAME, REPLACED, Manifest, record_files
from handover.provenance import made_by
from launcher.plan import StagePlan, partial


def run_fingerprint(plan: StagePlan) -> str:
    """Digest of the plan and of what its inputs are now."""
    identities = [plan.fingerprint, *(_identity(path) for path in plan.inputs)]
    return hashlib.sha256("\n".join(identities).encode()).hexdigest()[:16]


def _identity(path: Path) -> str:
    """Content digest of an artefact; of anything else, what tells it from others without reading all of it."""
    if (path / FILE_NAME).is_file():
        return Manifest.read(path).digest
    return identify(files_of(path))


def missing_inputs(plan: StagePlan) -> list[Path]:
    """Inputs that are not there."""
    return [path for path in plan.inputs if not path.exists()]


def is_current(plan: StagePlan) -> bool:
    """Whether the published output was made by this plan from these inputs and is still whole, as far as is cheap."""
    if missing_inputs(plan) or not (plan.output / FILE_NAME).is_file():
        return False
    try:
        manifest = Manifest.read(plan.output)
    except ArtefactError:
        return False
    return manifest.fingerprint == run_fingerprint(plan) and not manifest.damages(plan.output)


@dataclass
class Work:
    """Work in progress on one artefact.

    Attributes:
        plan: what is being made.
        fingerprint: of the plan on these inputs.
        commands_done: how many of its commands have finished, maybe in an earlier run.
    """

    plan: StagePlan
    fingerprint: str
    commands_done: int

    @property
    def directory(self) -> Path:
        """Where the commands write."""
        return partial(self.plan.output)

    def finish_command(self) -> None:
        """Remember across a kill that one more command is done."""
        self.commands_done += 1
        self._record()

    def _record(self) -> None:
        content = {"fingerprint": self.fingerprint, "commands_done": self.commands_done, "pid": os.getpid()}
        marker_of(self.plan).write_text(json.dumps(content))

    def publish(self) -> Path | None:
        """Verify what the commands made, seal its manifest, move it into place.

        Returns:
            Where an earlier artefact of that name was moved, if there was one.

        Raises:
            ArtefactError: files are missing, or present but not in the manifest.
        """
        manifest = self._verified_manifest()
        sealed = replace(manifest, fingerprint=self.fingerprint, made_by=manifest.made_by or made_by())
        sealed.write(self.directory)
        kept = None
        if self.plan.output.exists():
            kept = self.plan.output.with_name(f"{self.plan.output.name}{REPLACED}{time.strftime('%Y%m%d-%H%M%S')}")
            while kept.exists():
                kept = kept.with_name(kept.name + "x")
            self.plan.output.rename(kept)
        self.directory.rename(self.plan.output)
        if kept and self.plan.always and _is_untouched(kept):  # derived anew by every run: no copies pile up
            shutil.rmtree(kept)
            kept = None
        return kept

    def _verified_manifest(self) -> Manifest:
        if not self.directory.is_dir():
            raise ArtefactError(f"{self.plan.stage}: its commands succeeded but wrote nothing to {self.directory}")
        if not (self.directory / FILE_NAME).is_file():
            return Manifest(self.plan.stage, record_files(self.directory))
        manifest = Manifest.read(self.directory)
        present = {p.relative_to(self.directory).as_posix() for p in self.directory.rglob("*") if p.is_file()}
        unlisted = present - {record.path for record in manifest.files} - {FILE_NAME}
        problems = manifest.problems(self.directory, check_digests=False)
        problems += [f"{name}  not in the manifest" for name in sorted(unlisted)]
        if problems:
            raise ArtefactError(f"{self.plan.stage}: {self.directory} is not whole\n  " + "\n  ".join(problems))
        return manifest


def _is_untouched(directory: Path) -> bool:
    try:
        return not Manifest.read(directory).problems(directory)
    except ArtefactError:
        return False


def marker_of(plan: StagePlan) -> Path:
    """File beside the partial directory that says whose work it is, and is locked while work goes on."""
    return partial(plan.output).with_name(partial(plan.output).name + ".json")


@contextmanager
def begin(plan: StagePlan) -> Iterator[Work]:
    """Take up work on an artefact, continuing where an earlier run of the same plan was cut off.

    Raises:
        ArtefactError: another run is at it, or a directory in the way was not made by Slipway.
    """
    fingerprint = run_fingerprint(plan)
    if plan.output.exists() and not (plan.output / FILE_NAME).is_file() and any(plan.output.iterdir()):
        raise ArtefactError(
            f"{plan.output} exists and was not made by Slipway",
            "move it away, or choose another results directory",
        )
    marker = marker_of(plan)
    marker.parent.mkdir(parents=True, exist_ok=True)
    with marker.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ArtefactError(
                f"another run is making {plan.output}", f"wait for it, or stop the process named in {marker}"
            ) from None
        work = Work(plan, fingerprint, _resume(plan, fingerprint, marker))
        work._record()
        yield work
        marker.unlink(missing_ok=True)


def _resume(plan: StagePlan, fingerprint: str, marker: Path) -> int:
    """Number of commands that an interrupted run of the same plan has finished; discards other work of ours."""
    directory = partial(plan.output)
    if not directory.exists():
        return 0
    try:
        recorded = json.loads(marker.read_text())
        if recorded["fingerprint"] == fingerprint:
            return int(recorded["commands_done"])
    except (ValueError, KeyError):
        raise ArtefactError(
            f"{directory} is in the way and was not made by Slipway", "move it away or delete it"
        ) from None
    shutil.rmtree(directory)
    return 0
