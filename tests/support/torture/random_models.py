"""What campaigns of random models share: each is converted and asked, or refused before that."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from backends.fastertransformer.engine.engine import Engine
from handover.errors import CheckpointError
from support.engines.stranger import change_json, engine_of
from support.tiny_models.huggingface_models import filling, write_tokenizer

if TYPE_CHECKING:
    from support.torture.campaign import Tally

TOLERANCE = 2e-3  # the exact GELU against its tanh form, through layers
EPSILONS = (1e-5, 1e-6, 1e-12, 0.0, 0.3, 1.0, 2.0, -1e-5)
IDS = (5, 90, 50256, -1, -7, None)


@dataclass(frozen=True)
class Candidate:
    """One random model.

    Attributes:
        label: what its configuration says.
        model: transformers' own.
        ids: names of the special tokens' ids in its configuration.
        prompt: is given to both.
        found, expected: log probabilities by the engine and by transformers.
    """

    label: str
    model: Any
    ids: tuple[str, ...]
    prompt: list[int]
    found: Callable[[Engine, list[int]], np.ndarray]
    expected: Callable[[Any, list[int]], np.ndarray]


def build(make: Callable[[], Any], **probe: torch.Tensor) -> Any:
    """Make a model, fill its weights and ask it once; None: transformers itself cannot."""
    try:
        model = make().eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(filling(key, tuple(parameter.shape))))
            is_sound = bool(model(**probe).logits.isfinite().all())
    except (ValueError, RuntimeError, ZeroDivisionError, IndexError, TypeError, AssertionError):
        return None
    return model if is_sound else None


def try_models(wanted: int, tally: Tally, memory: Path, draw_one: Callable[[int, random.Random], Candidate]) -> None:
    """Convert and ask that many models, and fail where one was neither refused nor served as transformers computes."""
    served = 0
    for trial in range(wanted):
        draw = random.Random(trial)
        candidate = draw_one(trial, draw)
        if candidate.model is None:
            continue
        folder = memory / "random model"
        shutil.rmtree(folder, ignore_errors=True)
        candidate.model.save_pretrained(folder / "source")
        write_tokenizer(folder / "source")
        change_json(folder / "source/config.json", **{key: draw.choice(IDS) for key in candidate.ids})
        (folder / "source/generation_config.json").unlink(missing_ok=True)
        fault, is_served = _fault(candidate, folder, draw)
        served += is_served
        tally.record(f"trial {trial}: {candidate.label}: {fault}" if fault else None)
    tally.check()
    assert served >= tally.tried // 5, f"only {served} of {tally.tried} were served: the rest proves little"


def _fault(candidate: Candidate, folder: Path, draw: random.Random) -> tuple[str | None, bool]:
    """Say what is wrong, and whether it was served."""
    expected = candidate.expected(candidate.model, candidate.prompt)
    try:
        with engine_of(folder / "source", folder / "out", ranks=draw.choice((1, 1, 2))) as engine:
            difference = np.abs(candidate.found(engine, candidate.prompt) - expected).max()
            return (None if difference < TOLERANCE else f"differs by {difference:.2g}"), True
    except CheckpointError:
        return None, False
    except Exception as error:  # whatever it is, it came too late
        return f"{type(error).__name__}: {error}", True
