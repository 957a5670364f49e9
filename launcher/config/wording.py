"""What Hydra and OmegaConf raise, in our words: what is wrong, where, what is legal, what to do next."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException, OverrideParseException

from handover.errors import ConfigError, SlipwayError, nearest, shortened
from handover.provenance import PROGRAM
from launcher.config import schema_help as legal
from launcher.config.nemo_keys import key_hint, option_hint

_AMBIGUOUS = re.compile(r"Ambiguous value for argument '(.*)'")


@contextmanager
def explained() -> Iterator[None]:
    """Word whatever is raised while a configuration is composed, of any class: it is about what the user wrote.

    Hydra and OmegaConf raise their own errors for most of what cannot be composed, and ValueError, AssertionError,
    TypeError, RecursionError and others for the rest.

    Raises:
        SlipwayError: in place of any other.
    """
    try:
        yield
    except (SlipwayError, BrokenPipeError):
        raise
    except Exception as error:
        raise explain(error) from error


def explain(error: BaseException) -> SlipwayError:
    """Translate an error of Hydra or OmegaConf."""
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"cannot read '{shortened(error.override)}': {shortened(_first_line(error.__cause__ or error))}",
            "a setting is key=value; what holds one of =,:[]{} in it is quoted, and all of it for the shell: "
            "'key=[a,\"b=c\"]'",
        )
    cause: BaseException = error
    while cause.__cause__ is not None and not getattr(cause, "full_key", None):
        cause = cause.__cause__
    key = str(getattr(cause, "full_key", "") or "")
    text = _first_line(cause)
    return _known(key, text) or _at_override(error, cause) or _any(error, key, text)


def _missing_option(error: MissingConfigException) -> ConfigError:
    """A group has no such option, or --config-name names no file."""
    file = error.missing_cfg_file or ""
    group, _, option = file.rpartition("/")
    root = group.split("/")[0]
    if not legal.options(root):
        return ConfigError(f"there is no {shortened(file) or 'such configuration'}", f"{PROGRAM} --info config-groups")
    named = file[len(root) + 1 :]
    known = option_hint(named) if root == "evaluation" else ""
    return ConfigError(f"there is no {root}={shortened(named)}", known or legal.legal_options(root, option))


def _known(key: str, text: str) -> ConfigError | None:
    """What is wrong with one key, where OmegaConf or Hydra says so."""
    if ambiguous := _AMBIGUOUS.match(text):
        name, _, value = ambiguous[1].partition("=")
        return ConfigError(
            f"{shortened(ambiguous[1])}: several values for one run",
            f"a sweep over them: -m; a list: '{name}=[{value}]'; one text with commas: '{name}=\"{value}\"'",
        )
    if "not in" in text and key:
        parent, _, word = key.rpartition(".")
        where = f" below {parent}" if parent else ""
        known = key_hint(key, sys.argv[1:])
        return ConfigError(f"unknown key '{shortened(word)}'{where}", known or nearest(word, legal.legal_keys(parent)))
    if "expected one of" in text and text.count("'") >= 2:
        value = text.split("'")[1]
        options = text.rpartition("[")[2].rstrip("]").split(", ")
        return ConfigError(f"{key}: there is no '{shortened(value)}'", _renamed(value) or nearest(value, options))
    if "is not a ListConfig" in text and key:
        return ConfigError(f"{key} is a list", f"'{key}=[a,b]', also where it has one element")
    return None


def _at_override(error: BaseException, cause: BaseException) -> ConfigError | None:
    """Name the setting at which Hydra stumbled over an error that is not its own."""
    override = _override_of(error)
    if override is None or type(cause).__module__.startswith(("omegaconf", "hydra")):
        return None
    written = shortened(override.input_line or "")
    key = override.key_or_group
    if section := re.match(r"evaluation\.(\w+)\.", key):
        name = section[1]
        return ConfigError(f"{written}: {name} is no evaluation of this run", f"choose it: evaluation=[{name}]")
    if "." not in key and legal.options(key):
        return ConfigError(f"{written}: {key} is one of its options, by name", legal.legal_options(key, ""))
    parent = legal.leaf_above(key)
    if parent:
        return ConfigError(f"{written}: {parent} is a value, nothing is below it", f"write {parent}=...")
    return ConfigError(f"{written}: {_reason(cause)}", "mend or leave out this setting")


def _any(error: BaseException, key: str, text: str) -> ConfigError:
    """Whatever else is wrong, with the key or the setting where that is known."""
    if isinstance(error, OSError):
        return ConfigError(f"{shortened(str(error.filename))}: {error.strerror}")
    override = _override_of(error)
    where = key or (override and override.input_line) or _first_line(error).removeprefix("Error merging override ")
    reason = text if isinstance(error, ValueError) or "." in type(error).__module__ else _reason(error)
    reason = shortened(reason, 600)
    return ConfigError(reason if where in reason else f"{shortened(where)}: {reason}")


def _override_of(error: BaseException) -> Override | None:
    """The setting that Hydra was at when this was raised: it goes over them one by one."""
    found: Override | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        local = frame.f_locals.get("override")
        found = local if isinstance(local, Override) else found
    return found


def _reason(error: BaseException) -> str:
    """Why a value cannot be what it should be, for errors whose text is for programmers."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"it cannot be set ({shortened(_first_line(error)) or type(error).__name__})"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


def _renamed(value: str) -> str:
    """Point from the stage names of NeMo-Megatron-Launcher to ours."""
    names = {"conversion": "convert", "evaluation": "evaluate"}
    return f"the stage is called '{names[value]}' here" if value in names else ""
