"""The one line of a long error that says most, for a table. Standard library only."""

from __future__ import annotations

import re

_SLURMS_OWN = re.compile(r"(srun|slurmstepd|slurmd|mpirun|prterun|bcprun)(: |\[)")
"""What starts a failed process speaks after it, and says only that it has failed."""
_PROGRAM = re.compile(r"(?!(hint|warning|note|usage|info|last lines of \S+): )[a-z_][\w./-]*: (?!exit status )\S")
"""How a script names its error: ``convert: ...``, ``bash: ...``; a traceback's last line begins with a capital."""


def reason_of(error: str) -> str:
    """The line of an error's text that says most; empty if there is none.

    That is the first error that the failed process named, else the last line that it printed. What Slurm said about
    it counts only where no other process said anything, and what to do next never does.

    Args:
        error: of a stage: what failed, then what the process printed, indented; or an error of one piece.
    """
    lines = [line for line in error.splitlines() if line.strip() and not line.strip().startswith("hint:")]
    if not lines:
        return ""
    printed = [line.strip() for line in lines if line.startswith("    ")]
    return reason_in(printed) or lines[0].strip()


def reason_in(printed: list[str]) -> str:
    """The same of what a process printed; empty if it printed nothing."""
    own = [line.strip() for line in printed if line.strip() and not _SLURMS_OWN.match(line.strip())]
    own = [line for line in own if not line.startswith("hint:")]
    named = [line for line in own if _PROGRAM.match(line)]
    said = [line.strip() for line in printed if line.strip()]
    return (named[:1] or own[-1:] or said[:1] or [""])[0]
