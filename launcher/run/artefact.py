"""One artefact's life: is it current, begin work in ``.partial``, verify, publish; see ``work_directory`` for kills.

Standard library only.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from handover.durable import sync_tree
from handover.errors import ArtefactError, SlipwayError
from handover.identity import files_of, identify
from handover.manifest import FILE_NAME, REPLACED, Manifest, artefact_files, record_files
from handover.provenance import CODE, made_by
from launcher.plan.plan import StagePlan, partial
from launcher.run import work_directory


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


def code_remark(plan: StagePlan) -> str:
    """Return words for an output that was made by other code than this; empty where it was not, or is not known."""
    then, now = Manifest.read(plan.output).made_by, made_by()
    if then.get(CODE, now[CODE]) == now[CODE]:
        return ""
    made, here = (content.get("commit", "")[:8] or "an unknown commit" for content in (then, now))
    return f", made by commit {made}, now {here}" if made != here else f", the code was edited since (commit {here})"


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

    @contextmanager
    def publishing_verdict(self) -> Iterator[None]:
        """Publish the verdict of commands that end with another status than 0: NO-GO is a result, as GO is."""
        verdict = self.directory / self.plan.verdict_file if self.plan.verdict_file else None
        if verdict is not None:
            verdict.unlink(missing_ok=True)  # of a run that was cut off
        try:
            yield
        except SlipwayError:
            if verdict is not None and verdict.is_file():
                self.finish_command()
                self.publish()
            raise

    def finish_command(self) -> None:
        """Remember that one more command is done, once what it wrote is on the disk."""
        if not (self.directory / FILE_NAME).is_file():  # a manifest is written only when it is
            sync_tree(self.directory)
        self._note(self.commands_done + 1)

    def _note(self, commands_done: int) -> None:
        self.commands_done = commands_done
        work_directory.note(self.directory, self.fingerprint, commands_done)

    def publish(self) -> Path | None:
        """Verify what the commands made, seal its manifest, move it into place.

        Returns:
            Where an earlier artefact of that name was moved, if there was one.

        Raises:
            ArtefactError: files are missing, or present but not in the manifest; the next run makes them again.
        """
        try:
            manifest = self._verified_manifest()
        except ArtefactError:
            self._note(0)
            raise
        sealed = replace(manifest, fingerprint=self.fingerprint, made_by={**made_by(), **manifest.made_by})
        sealed.save(self.directory)
        kept = self._name_of_replaced()
        work_directory.publish(self.plan.output, kept)
        return kept

    def _name_of_replaced(self) -> Path | None:
        """Name under which an earlier artefact is kept; None if there is none, or if it need not be kept."""
        output = self.plan.output
        if not output.exists() or (self.plan.always and _is_untouched(output)):
            return None  # what every run derives again: no copies pile up
        kept = output.with_name(f"{output.name}{REPLACED}{time.strftime('%Y%m%d-%H%M%S')}")
        while kept.exists():
            kept = kept.with_name(kept.name + "x")
        return kept

    def _verified_manifest(self) -> Manifest:
        present = artefact_files(self.directory)
        if not present:
            raise ArtefactError(f"{self.plan.stage}: its commands succeeded but wrote nothing to {self.directory}")
        if not (self.directory / FILE_NAME).is_file():
            return Manifest(self.plan.stage, record_files(self.directory))
        manifest = Manifest.read(self.directory)
        unlisted = set(present) - {record.path for record in manifest.files}
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


@contextmanager
def begin(plan: StagePlan) -> Iterator[Work]:
    """Take up work on an artefact, continuing where an earlier run of the same plan was cut off.

    Raises:
        ArtefactError: another run is at it, or a directory in the way was not made by Slipway.
    """
    fingerprint = run_fingerprint(plan)
    if plan.output.exists() and not (plan.output / FILE_NAME).is_file() and any(plan.output.iterdir()):
        raise ArtefactError(
            f"{plan.output} exists and was not made by Slipway", "move it away, or choose another results directory"
        )
    with work_directory.locked(plan.output):
        work = Work(plan, fingerprint, work_directory.take_up(plan.output, fingerprint))
        with work.publishing_verdict():
            yield work
