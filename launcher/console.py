"""What the launcher says: one line a fact, and one message an error.

Standard library only at import time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from handover.errors import ConfigError, SlipwayError, nearest, worded
from handover.progress import human_time

if TYPE_CHECKING:
    from launcher.results import StageResult


def stage_line(position: int, total: int, result: StageResult, note: str = "") -> None:
    """Print a stage's state in stable columns; a failure with its log, for who reads a job's output, and the reason."""
    elapsed = human_time(result.elapsed_s) if result.elapsed_s else ""
    note = note or (f"log {result.log}" if result.error else "")
    print(f"[{position}/{total}] {result.stage:<10} {result.state:<12} {elapsed:>8}  {note}".rstrip(), flush=True)
    if result.error:
        # Indented lines quote what the command printed; that has been on the terminal already.
        own = "\n".join(line for line in result.error.splitlines() if not line.startswith("    "))
        print(own, file=sys.stderr, flush=True)


@contextmanager
def worded_errors() -> Iterator[None]:
    """Word whatever goes wrong as one message and exit: 1 for what the user can mend, 130 for an interrupt.

    Our own defects keep their traceback.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except SlipwayError as error:
        message, status = str(error), 1
    except (HydraException, OmegaConfBaseException) as error:
        message, status = str(explain(error)), 1
    except AssertionError as error:
        section = _section_not_chosen(sys.argv[1:])
        if section is None or "root" not in str(error):  # OmegaConf's, of a key below null
            raise
        message, status = str(section), 1
    except OSError as error:  # after Hydra's, some of which are of this kind too
        message, status = str(worded(error)), 1
    except KeyboardInterrupt:
        message, status = "interrupted; run the same command again to continue", 130
    else:
        return
    say_error(message)
    sys.exit(status)


def say_error(message: str) -> None:
    """Print an error as everything here words it."""
    print(f"slipway: {message}", file=sys.stderr, flush=True)


def explain(error: BaseException) -> SlipwayError:
    """Translate a configuration error of Hydra or OmegaConf: what, where, what is legal."""
    from hydra.errors import MissingConfigException, OverrideParseException

    from launcher.legal import legal_keys, legal_options
    from launcher.nemo_keys import key_hint, option_hint

    cause: BaseException = error
    while cause.__cause__ is not None and not getattr(cause, "full_key", None):
        cause = cause.__cause__
    key = str(getattr(cause, "full_key", "") or "")
    text = str(cause).splitlines()[0]
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        root = group.split("/")[0]
        named = error.missing_cfg_file[len(root) + 1 :]
        known = option_hint(named) if root == "evaluation" else ""
        return ConfigError(f"there is no {root}={named}", known or legal_options(root, option))
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"cannot read '{error.override}': {text}", "a setting is key=value; quote it for the shell: 'key=[a,b]'"
        )
    if "not in" in text and key:
        parent, _, word = key.rpartition(".")
        where = f" below {parent}" if parent else ""
        known = key_hint(key, sys.argv[1:])
        return ConfigError(f"unknown key '{word}'{where}", known or nearest(word, legal_keys(parent)))
    if "expected one of" in text:
        value = text.split("'")[1]
        legal = text.rpartition("[")[2].rstrip("]").split(", ")
        return ConfigError(f"{key}: there is no '{value}'", _renamed(value) or nearest(value, legal))
    if "is not a ListConfig" in text and key:
        return ConfigError(f"{key} is a list", f"'{key}=[a,b]', also where it has one element")
    where = key or str(error).splitlines()[0].removeprefix("Error merging override ")
    return ConfigError(text if where in text else f"{where}: {text}")


def _section_not_chosen(overrides: Sequence[str]) -> ConfigError | None:
    """Find the key of an evaluation that its group does not name; such a section is null."""
    for override in overrides:
        if match := re.match(r"evaluation\.(\w+)\.", override):
            name = match.group(1)
            return ConfigError(f"{override}: {name} is no evaluation of this run", f"choose it: evaluation=[{name}]")
    return None


def _renamed(value: str) -> str:
    """Point from the stage names of NeMo-Megatron-Launcher to ours."""
    names = {"conversion": "convert", "evaluation": "evaluate"}
    return f"the stage is called '{names[value]}' here" if value in names else ""
