"""The draft model of speculation: a small model that one process has beside the model, or beside its part of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from ft_format.location import DRAFT, is_hub_directory
from models.engine_limits import draft_model_problem

from ..errors import EngineError
from ..ops.ops import Ops
from ..settings import Settings
from .config import ModelConfig
from .families import read_config
from .network import Network
from .precision import choose_precision
from .weights import load_weights


def load_draft_model(
    settings: Settings, config: ModelConfig, device: torch.device, ops: Ops, sharers: int
) -> Network | None:
    """Load the draft model whole, for texts no longer than the model's; None: there is none.

    Args:
        settings: of the model.
        config: of the model.
        device: of this process.
        ops: of this device.
        sharers: processes that load into the same memory.

    Raises:
        EngineError: it is missing or damaged, or cannot draft for the model.
    """
    if settings.speculation != DRAFT or not (directory := settings.draft_model):
        return None
    if not is_hub_directory(directory):
        raise EngineError(f"speculation = draft, and {directory} has no config.json: export it again with draft_model")
    draft = read_config(directory)
    problem = "an encoder-decoder has no draft model" if config.encoder or not config.has_decoder else ""
    problem = problem or draft_model_problem(draft.decoder, draft.vocab_size, config.vocab_size)
    if problem:
        raise EngineError(f"speculation = draft with {settings.checkpoint} and {directory}: {problem}")
    weights = load_weights(
        directory,
        draft,
        1,
        choose_precision(settings.data_type, device),
        device,
        sharers=sharers,
        are_made_up=settings.has_made_up_weights,
    )
    return Network(replace(draft, max_pos_seq_len=min(draft.max_pos_seq_len, config.max_pos_seq_len)), weights, ops=ops)
