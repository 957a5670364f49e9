"""The words of main.py's command line, before Hydra reads them.

Those that it would read as numbers, and that stand for a key whose value is a text, stay texts.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from handover.errors import ConfigError
from launcher.config.choices import ClusterType
from launcher.config.schema_help import type_of
from launcher.config.secrets import check_command_line

_FLAG_IN_A_LIST = re.compile(r"(?<=[\[,])(\s*)(--?[^\s=,\[\]{}'\"]+=[^,\[\]{}'\"]*)(?=[,\]])")
_RERUN = "--experimental-rerun"
_CLUSTERS = {kind.name for kind in ClusterType} - {ClusterType.auto.name}


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
    read_words = [with_texts(_with_quoted_flags(word), is_sweep) for word in words]
    return read_words if is_sweep else [*read_words, *_group_of_cluster(words)]


def says_the_mode(words: Sequence[str]) -> bool:
    """Whether something beside -m may say that it is a sweep: else Hydra need not compose all to look for it."""
    return any(word.startswith(("-c", "--c")) or ("hydra" in word and "mode" in word) for word in words)


def _group_of_cluster(words: Sequence[str]) -> list[str]:
    """Choose the group of the cluster that is named: else all is composed again with it (launcher/compose.py)."""
    keys = [word.partition("=")[0].lstrip("+~").partition("@")[0] for word in words]
    if "cluster" in keys or keys.count("cluster_type") != 1 or any(word.startswith("-") for word in words):
        return []
    key, _, name = words[keys.index("cluster_type")].partition("=")
    return [f"cluster={name}"] if key == "cluster_type" and name in _CLUSTERS else []


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


_ASSIGNMENT = re.compile(r"(\+{0,2})([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_PARTS = re.compile(
    r"""(?P<quoted>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|\$\{[^}]*\}|(?P<bare>[^\s,\[\](){}"'$][^,\[\](){}"'$]*)"""
)
_OF_NUMBERS = re.compile(r"\s*(?:range|interval|glob|int|float|bool)\(")
_FLAGS = "cluster.additional_parameters"
"""Where ``true`` is the value of an option that takes none."""
_COMMA_LISTS = re.compile(r"cluster\.partition|(?:cluster\.additional_parameters|env_vars)\.[\w-]+")
"""Texts in which several names with commas, and ranges of nodes, are usual."""
_NAMES = re.compile(r"(?=.*[,\[])[\w.*/-][\w.,:*/\[\]-]*")


def with_texts(word: str, is_sweep: bool) -> str:
    """Quote what is a text by its key: ``1e5`` is a legal name, and would become ``100000.0``.

    Args:
        word: of the command line.
        is_sweep: the command line asks for one: commas then part the values of several runs.
    """
    found = _ASSIGNMENT.fullmatch(word)
    if not found or not _is_text(type_of(found[2])) or _OF_NUMBERS.match(found[3]) or "\\" in found[3]:
        return word
    sign, key, value = found.groups()
    if _COMMA_LISTS.fullmatch(key) and _NAMES.fullmatch(value) and not is_sweep:
        return f'{sign}{key}="{value}"'
    is_mapping, keeps_flags = value.lstrip().startswith("{"), key.startswith(_FLAGS)
    quoted = _PARTS.sub(lambda part: _quoted(part, is_mapping, keeps_flags), value)
    return f"{sign}{key}={quoted}" if quoted != value and _parsed(f"{key}={quoted}") is not None else word


def _is_text(hint: Any) -> bool:
    """Whether a key's value is a text, or holds texts; of a key without a type of its own it may be."""
    if hint in (str, Any):
        return True
    origin, arms = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return all(_is_text(arm) for arm in arms if arm is not type(None))
    return origin in (list, dict) and _is_text(arms[-1])


def _quoted(part: re.Match[str], is_mapping: bool, keeps_flags: bool) -> str:
    """Quote one value; of a mapping, ``{NAME: 1e5}``, what follows the name."""
    text: str | None = part["bare"]
    if text is None:
        return part[0]
    name, colon, own = text.rpartition(":") if is_mapping else ("", "", text)
    value = _parsed(f"key={own.strip()}")
    is_changed = isinstance(value, (int, float)) and str(value) != own.strip()
    if not is_changed or (keeps_flags and isinstance(value, bool)):
        return text
    return f'{name}{colon}"{own.strip()}"'


def _parsed(word: str) -> Any:
    try:
        return OverridesParser.create().parse_override(word).value()
    except (HydraException, ValueError, RecursionError):
        return None
