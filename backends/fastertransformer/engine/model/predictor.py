"""The model's own predictor of further tokens: a layer beside it, which works on what it has computed of each token.

The predictor's input for a token is a projection of the embedding of the one behind it and of the model's output for
it, behind the final norm; its output says what comes after these two. To predict further ones it is applied again: its
own output, behind its norm, then stands for the model's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ft_format.location import MTP
from models.decoder import Decoder
from models.engine_limits import predictor_problem

from ..cache.kv_cache import KvCache
from ..errors import EngineError
from ..ops.ops import Ops
from ..ops.packed_rows import Rows
from ..parallel.partition import Partition
from ..settings import Settings
from .families.hub import read_predictor
from .layouts import ModelWeights
from .network import Network
from .precision import choose_precision
from .weights import load_weights


class Predictor(Network):
    """A predictor: the ids of its inputs are those of the tokens behind their positions."""

    def decode(self, ids: Tensor, positions: Tensor, slots: Tensor | slice, cache: KvCache, *more: Any) -> Tensor:
        """See Network; what it gives is kept as the model's output for the next position."""
        hidden = super().decode(ids, positions, slots, cache, *more)
        self.carry(hidden, cache, slots, positions + 1)
        return hidden

    def said(self, tokens: Tensor) -> Tensor:
        """Return the model's tokens for those that it predicts, int64; what is none stays."""
        return tokens

    def carry(self, hidden: Tensor, cache: KvCache, slots: Tensor | slice, positions: Tensor) -> None:
        """Take hidden states, [n, hidden], for the model's outputs at positions, until the model has run these."""
        cache.keep(self.normed(hidden), slots, positions)

    def _keep(
        self, hidden: Tensor, cache: KvCache, slots: Tensor | slice, positions: Tensor, tapped: list[Tensor]
    ) -> None:
        """Override Network: what the model has kept stays."""

    def _embed_rows(self, rows: Rows, cache: KvCache, embeddings: Tensor | None) -> Tensor:
        x = super()._embed_rows(rows, cache, embeddings)
        return self._enter(x, cache.kept(rows.slots, rows.positions))

    def _embed_next(self, ids: Tensor, positions: Tensor, slots: Tensor | slice, cache: KvCache) -> Tensor:
        x = super()._embed_next(ids, positions, slots, cache)
        return self._enter(x, cache.kept(slots, positions)[:, None])

    def _enter(self, embeddings: Tensor, outputs: Tensor) -> Tensor:
        assert self.weights.decoder and self.weights.decoder.entrance
        entrance = self.weights.decoder.entrance
        sides = self.ops.norm(embeddings, entrance.embedding_norm), self.ops.norm(outputs, entrance.hidden_norm)
        return self.ops.linear(entrance.projection, torch.cat(sides, -1))


def load_predictor(
    settings: Settings,
    decoder: Decoder | None,
    model: ModelWeights,
    device: torch.device,
    ops: Ops,
    sharers: int,
    has_whole_head: bool,
) -> Predictor | None:
    """Load the model's first predictor whole; None: it is not to draft.

    Args:
        settings: of the model.
        decoder: as its directory describes it; None: it has none.
        model: its weights, whose embedding it shares.
        device: of this process.
        ops: of this device.
        sharers: processes that load into the same memory.
        has_whole_head: whether it shares the head too; else this process has a part of it, or none.

    Raises:
        EngineError: the model has none, or its tensors are missing or damaged.
    """
    if settings.speculation != MTP:
        return None
    if problem := predictor_problem(decoder):
        raise EngineError(f"{settings.checkpoint}: {problem}", "leave speculation out")
    config = read_predictor(settings.checkpoint)
    weights = load_weights(
        settings.checkpoint,
        config,
        1,
        choose_precision(settings.data_type, device),
        device,
        Partition(range(config.num_layer), embeds=False, predicts=not has_whole_head),
        sharers=sharers,
        are_made_up=settings.has_made_up_weights,
    )
    weights = replace(weights, token_embedding=model.token_embedding, head=weights.head or model.head)
    return Predictor(config, weights, ops=ops)
