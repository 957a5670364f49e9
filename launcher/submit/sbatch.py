"""sbatch, as it is called here: in an environment that says nothing of a job, and read for the id that it gives."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from submitit import SlurmExecutor
from submitit.core.utils import FailedSubmissionError

from handover.slurm_variables import for_clients

_SUBMITTED = re.compile(r"^Submitted batch job (\d+)", re.MULTILINE)
_PARSABLE = re.compile(r"^(\d+)(?:;\S+)?$", re.MULTILINE)


class Sbatch(SlurmExecutor):
    """submitit's, with an environment of its own and another reading of what sbatch prints."""

    def submit_script(self, command: str) -> str:
        """Submit a command line; returns the job's id."""
        with _environment():
            return str(self._submit_command(command).job_id)

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        """Find the id in sbatch's own last words: a site's wrapper may speak of other jobs before."""
        text = string if isinstance(string, str) else string.decode(errors="replace")
        found = _SUBMITTED.findall(text) or _PARSABLE.findall(text)
        if not found:
            raise FailedSubmissionError(f"sbatch named no job: {text.strip() or 'it printed nothing'}")
        return str(found[-1])


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Take the session's variables out of the environment, as submitit passes none to sbatch."""
    before = dict(os.environ)
    kept = for_clients(before)
    try:
        for name in before.keys() - kept.keys():
            del os.environ[name]
        yield
    finally:
        os.environ.update(before)
