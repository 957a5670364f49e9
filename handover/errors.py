"""One small hierarchy of errors: a problem the user can mend, and a hint how."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches

from handover.output import reader_may_leave

_LONGEST_LINE, _MOST_LINES = 2_000, 200


def _presentable(text: str) -> str:
    """Cut what an error quotes, whose length is not limited, and show what would steer a terminal as its code."""
    lines = text.split("\n")
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"  ... and {len(lines) - _MOST_LINES} more"]
    return "\n".join(map(_presentable_line, lines))


def _presentable_line(line: str) -> str:
    if len(line) > _LONGEST_LINE:
        half = _LONGEST_LINE // 2
        line = f"{line[:half]} ... {len(line) - 2 * half} characters ... {line[-half:]}"
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() or each == "\t" else ascii(each)[1:-1] for each in line)


class SlipwayError(Exception):
    """A problem that the user can mend.

    Args:
        problem: what is wrong and where, without a trailing full stop; may span lines.
        hint: what is legal or what to do next.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = _presentable(problem)
        self.hint = _presentable(hint)

    def __str__(self) -> str:
        return f"{self.problem}\n  hint: {self.hint}" if self.hint else self.problem


class ConfigError(SlipwayError):
    """The configuration names something that does not exist or does not fit."""


class CheckpointError(SlipwayError):
    """A training checkpoint cannot be read or cannot be expressed in FasterTransformer's format."""


class ArtefactError(SlipwayError):
    """A directory that a stage made is missing, incomplete, altered or not ours."""


class ServerError(SlipwayError):
    """The inference server could not start, died, or gave an answer that it must not give."""


def nearest(word: str, legal: Iterable[str]) -> str:
    """Return which legal word was probably meant, and list all of them."""
    options = sorted(legal)
    close = get_close_matches(word, options, n=1, cutoff=0.5)
    meant = f"did you mean '{close[0]}'? " if close else ""
    return f"{meant}legal: {', '.join(options)}"


def shortened(text: str, most: int = 200) -> str:
    """Cut what a message quotes, which may be of any length, and say how long it was."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


_FREE_SPACE = "free some space, or choose another base_results_dir; the same command then continues"
_IS_IT_MOUNTED = "see whether the file system is mounted and healthy; the same command then continues"
_ALLOW = "give this user the right to it, or choose another path"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FREE_SPACE),
    errno.EROFS: "choose another base_results_dir; the same command then continues",
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ENXIO), _IS_IT_MOUNTED),
    errno.ENOENT: "see whether it was moved, or its file system unmounted",
    **dict.fromkeys((errno.EACCES, errno.EPERM), _ALLOW),
    errno.ENOTDIR: "a file is in the way of a directory: choose another path",
    errno.EEXIST: "move away what is there, or choose another path",
    errno.ENAMETOOLONG: "choose a shorter path",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files: ulimit -n"),
    **dict.fromkeys((errno.ENOMEM, errno.EAGAIN), "stop other programs, or raise the limits of memory and processes"),
}
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def worded(error: OSError) -> SlipwayError:
    """Word what the operating system refuses: which path, why, what to do."""
    paths = " -> ".join(shortened(str(path)) for path in (error.filename, error.filename2) if path is not None)
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in _WRITING:
        problem = f"cannot write{f' ({paths})' if paths else ''}: {reason}"
    else:
        problem = f"{paths or 'the operating system refuses'}: {reason}"
    return SlipwayError(problem, _ADVICE.get(error.errno or 0, ""))


def exit_status(main: Callable[[Sequence[str]], None], program: str) -> int:
    """Run a script's ``main`` and turn its outcome into an exit status.

    A SlipwayError and what the operating system refuses become one message on stderr and status 1, an interrupt status
    130; a reader that leaves (``| head``) ends it quietly; anything else is a defect of ours and keeps its traceback.
    """
    try:
        with reader_may_leave():
            main(sys.argv[1:])
    except SlipwayError as error:
        print(f"{program}: {str(error).removeprefix(f'{program}: ')}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{program}: {worded(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(" ".join((f"{program}: interrupted", *map(str, interrupt.args))), file=sys.stderr)
        return 130
    return 0
