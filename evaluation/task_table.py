"""Every evaluation by its name, which is that of its program ``evaluation.<name>`` and of its section ``evaluation``.

A new evaluation is its program with its arguments and their check, and a line in ``TASKS``: the launcher makes the keys
of the section, the option ``evaluation=<name>`` and the plan from these. The login node imports this module: no numpy,
no client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.arguments import (
    ConsistencyArguments,
    LambadaArguments,
    SquadArguments,
    TaskArguments,
    TextPairArguments,
)
from evaluation.divergence import arguments as divergence
from evaluation.monitor import arguments as monitor
from evaluation.parity import arguments as parity
from evaluation.tasks.lambada import data as lambada
from evaluation.tasks.squad import data as squad
from evaluation.tasks.texts import pairs


@dataclass(frozen=True)
class Task:
    """What the launcher knows of an evaluation.

    Attributes:
        arguments: of the program; what the run does not give itself are keys of the section.
        check_files: reads the files as the program will, and raises ConfigError; its second argument is the FT
            checkpoint's place if that was to be converted before this run, and None if this run converts.
    """

    arguments: type[
        TaskArguments
        | ConsistencyArguments
        | parity.ParityArguments
        | divergence.DivergenceArguments
        | monitor.MonitorArguments
    ]
    check_files: Callable[[Any, Path | None], None]


TASKS: Mapping[str, Task] = {
    "lambada": Task(LambadaArguments, lambada.check_files),
    "squad": Task(SquadArguments, squad.check_files),
    "translation": Task(TextPairArguments, pairs.check_files),
    "summarization": Task(TextPairArguments, pairs.check_files),
    "parity": Task(parity.ParityArguments, parity.check_files),
    "consistency": Task(ConsistencyArguments, divergence.check_texts),
    "divergence": Task(divergence.DivergenceArguments, divergence.check_files),
    "monitor": Task(monitor.MonitorArguments, monitor.check_files),
}
