"""What the launcher says: one line a fact, and one message an error.

Standard library only at import time.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from handover.errors import SlipwayError, worded
from handover.output import discard_output, reader_may_leave
from handover.progress import human_time

if TYPE_CHECKING:
    from launcher.run.results import StageResult

_DEFECT = "this is a defect of Slipway, please report it with the lines above"


def stage_line(position: int, total: int, result: StageResult, note: str = "") -> None:
    """Print a stage's state in stable columns; a failure with its log, for who reads a job's output, and the reason."""
    elapsed = human_time(result.elapsed_s) if result.elapsed_s else ""
    note = note or (f"log {result.log}" if result.error else "")
    line = f"[{position}/{total}] {result.stage:<10} {result.state:<12} {elapsed:>8}  {note}".rstrip()
    try:
        print(line, flush=True)
    except BrokenPipeError:  # whoever read our progress has left; the run goes on
        if not discard_output():
            raise
    if result.error:
        # Indented lines quote what the command printed; that has been on the terminal already.
        own = "\n".join(line for line in result.error.splitlines() if not line.startswith("    "))
        print(own, file=sys.stderr, flush=True)


@contextmanager
def worded_errors() -> Iterator[None]:
    """Word whatever goes wrong as one message and exit: 1 for what the user can mend, 130 for an interrupt.

    A reader of the output that leaves ends the program quietly. Our own defects show their traceback here and leave as
    an exit too, so that what is raised further out is known to be about what the user wrote.
    """
    try:
        with reader_may_leave():
            yield
    except SlipwayError as error:
        message, status = str(error), 1
    except OSError as error:
        message, status = str(worded(error)), 1
    except KeyboardInterrupt:
        message, status = "interrupted; run the same command again to continue", 130
    except Exception as error:
        traceback.print_exception(error)
        message, status = _DEFECT, 1
    else:
        return
    say_error(message)
    sys.exit(status)


def say_error(message: str) -> None:
    """Print an error as everything here words it."""
    print(f"slipway: {message}", file=sys.stderr, flush=True)
