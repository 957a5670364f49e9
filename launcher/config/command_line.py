"""The words of main.py's command line, before Hydra reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from handover.errors import ConfigError
from launcher.config.secrets import check_command_line
from launcher.config.text_values import with_texts

_FLAG_IN_A_LIST = re.compile(r"(?<=[\[,])(\s*)(--?[^\s=,\[\]{}'\"]+=[^,\[\]{}'\"]*)(?=[,\]])")
_RERUN = "--experimental-rerun"


def read(words: Sequence[str]) -> list[str]:
    """Make words of a command line those that Hydra takes.

    Hydra's grammar has no ``=`` in a list, where ``cluster.srun_args=[--mpi=none]`` means a flag: it is quoted, and
    so is a text that looks like a number.

    Raises:
        ConfigError: a secret is written there, or Hydra is asked to load a pickle.
    """
    check_command_line(words)
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--e") and _RERUN.startswith(flag):  # argparse takes a flag's beginning for the flag
            raise ConfigError(f"{_RERUN} loads a pickle, which may run anything", "give the command line itself again")
    is_sweep = any(word in ("-m", "hydra.mode=MULTIRUN") or word.startswith("--multi") for word in words)
    return [with_texts(_with_quoted_flags(word), is_sweep) for word in words]


def _with_quoted_flags(word: str) -> str:
    """Quote flags in lists, if that is what Hydra could not read."""
    quoted = _FLAG_IN_A_LIST.sub(r'\1"\2"', word)
    return quoted if quoted != word and not _is_legal(word) and _is_legal(quoted) else word


def _is_legal(word: str) -> bool:
    try:
        OverridesParser.create().parse_override(word)
    except (HydraException, ValueError, RecursionError):
        return False
    return True
