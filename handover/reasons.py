"""The one line of a long error that says most, for a table. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence

OUR_PROGRAMS = (
    *("benchmark", "compare", "consistency", "convert", "deploy", "divergence", "evaluate", "export", "gate", "guard"),
    *("gemm_autotune", "generate", "harness", "inspect", "launcher", "load", "metrics", "monitor", "nemo_ids"),
    *("openai", "parity", "recommend", "recompute", "report", "request", "slipway", "sweep", "track"),
)
"""As what scripts name themselves in their errors; see ``handover.errors.exit_status``."""

_STARTERS = re.compile(r"(srun|slurmstepd(-\S+)?|slurmd(-\S+)?|sbatch|pyxis|mpirun|prterun|bcprun)(: |\[)")
"""What starts a failed process speaks after it, and mostly says only that it has failed."""
_SAYS_LITTLE = re.compile(
    r"[Ee]xited with exit code|Terminat(?:ing|ed) StepId|CANCELLED AT \S+ \*|step aborted|Waiting up to"
    r"|spank plugin stack|couldn't start container|printing \w+ log|task \S+: (Killed|Terminated|running|Aborted)"
    r"|retrying$|queued and waiting|has been allocated|^pyxis: |Run job, step, or task"
)
"""Lines of those that report an end, or that something begins, and no cause."""
_ONE_OF_SEVERAL = re.compile(r"task [1-9]\d*: (Killed|Aborted)")
"""How a task ended, on which node: where there are several, that says more than the status of them all."""
_OUT_OF_MEMORY = re.compile(r"oom[-_ ]kill|out-of-memory handler", re.IGNORECASE)
_ENROOTS = re.compile(r"\[ERROR\]")
_NO_ERROR = r"(?!(?i:hint|warning|note|usage|info|last lines of \S+): |exit status |interrupted)"
_PROGRAM = re.compile(rf"{_NO_ERROR}[a-z_][\w./-]*: {_NO_ERROR}\S")
"""How a script names its error: ``convert: ...``, ``bash: ...``."""
_REMARK = re.compile(r"(?:[\w./-]+: )?(?i:hint|warning|note|usage|info): ")
_OURS = re.compile(rf"(?:{'|'.join(OUR_PROGRAMS)}): {_NO_ERROR}\S")
_LOSS = re.compile(r"rank \d+ is lost: .*")
_OF_ANOTHER = re.compile(r"rank \d+ of \d+ ended with exit status|rank \d+ is lost")
"""What a rank says that has ended because another one has."""
_TRACEBACK = "Traceback (most recent call last)"


def reason_of(error: str) -> str:
    """The line of an error's text that says most; empty if there is none.

    That is the error that the failed process named, the end of its traceback, or else the last line that it printed;
    of several ranks that of the one which the others ended after. What Slurm said about it counts only where no other
    process said anything, except that memory ran out; what to do next never does.

    Args:
        error: of a stage: what failed, then what the process printed, indented; or an error of one piece.
    """
    lines = [line for line in error.splitlines() if line.strip() and not line.strip().startswith("hint:")]
    if not lines:
        return ""
    return reason_in([line[4:] for line in lines if line.startswith("    ")]) or lines[0].strip()


def reason_in(printed: Sequence[str]) -> str:
    """The same of what a process printed; empty where that says nothing."""
    said = [line.rstrip() for line in printed if line.strip() and not line.strip().startswith("hint:")]
    starters = [line for line in said if _STARTERS.match(line)]
    own = [line for line in said if not _STARTERS.match(line) and not line[0].isspace()]
    if memory := [line for line in starters if _OUT_OF_MEMORY.search(line)]:
        return memory[0]
    if named := [line for line in own if names_error(line)]:
        return _first_cause(named, said)
    others = [line for line in own if _PROGRAM.match(line)]
    ends = others[:1] or [line for line in own if not _REMARK.match(line)][-1:]
    victims = [line for line in starters if _ONE_OF_SEVERAL.search(line)]
    return (_ends_of_tracebacks(said)[-1:] or ends or _causes(starters) or victims or [""])[0].strip()


def names_error(line: str) -> bool:
    """Whether a line is the error of one of our scripts, which is kept when others' output follows it."""
    return bool(_OURS.match(line) or _OUT_OF_MEMORY.search(line))


def _first_cause(named: Sequence[str], said: Sequence[str]) -> str:
    """A script names its error once, at its end; of several ranks the first to do so has not ended after another."""
    causes = [line for line in named if not _OF_ANOTHER.search(line)]
    if causes:
        return causes[0]
    plain = [line for line in named if not _LOSS.search(line)]
    losses = [found[0] for line in said if (found := _LOSS.search(line))]
    return f"{named[0].partition(': ')[0]}: {losses[0]}" if losses and plain == list(named) else named[0]


def _ends_of_tracebacks(said: Sequence[str]) -> list[str]:
    """The line after each traceback, which names what was raised."""
    begun, found = False, []
    for line in said:
        if line.startswith(_TRACEBACK):
            begun = True
        elif begun and not line[0].isspace():
            found.append(line)
            begun = False
    return found


def _causes(starters: Sequence[str]) -> list[str]:
    """What the starter said of why, at last; enroot's own word is among what pyxis quotes."""
    causes = [line for line in starters if not _SAYS_LITTLE.search(line)]
    return [line for line in causes if _ENROOTS.search(line)][-1:] or causes[-1:]
