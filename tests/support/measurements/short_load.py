"""Arguments of a load that ends after a few requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from evaluation.speed.load_arguments import LoadArguments


def short_load(endpoint: str, output: Path, **changes: Any) -> LoadArguments:
    """One repeat of six requests of five tokens in and six out, two at once, unless they are changed."""
    base = LoadArguments(
        endpoint=endpoint,
        output=output,
        lengths=("5/6",),
        concurrencies=(2,),
        requests=6,
        repeats=1,
        min_repeats=1,
        vocab_size=100,
        timeout_s=20.0,
    )
    return dataclasses.replace(base, **changes)
