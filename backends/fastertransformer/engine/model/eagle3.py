"""An EAGLE-3 head beside the model, which drafts from hidden states within it; see models/eagle3.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ft_format.location import EAGLE3, is_hub_directory
from models.decoder import Decoder
from models.eagle3 import Eagle3, read_eagle3
from models.engine_limits import head_problem, longest_text

from ..cache.kv_cache import KvCache
from ..errors import EngineError
from ..ops.adapted_rows import AdaptedRows
from ..ops.host.layers import HostLayers
from ..ops.ops import Ops
from ..ops.packed_rows import Rows
from ..ops.positions import AttentionSpec
from ..ops.state_rows import StateRows
from ..parallel.partition import Partition
from ..settings import Settings
from .attention_specs import PreparedAttention
from .blocks.context import LayerContext
from .config import NO_POSITION_LIMIT, ModelConfig
from .families.hub import config_of_head
from .layers import run_layer
from .layouts import ModelWeights
from .network import Taps
from .precision import choose_precision
from .predictor import Predictor
from .weights import load_weights


class Eagle3Head(Predictor):
    """A head: a predictor whose layer has the embedding and what is kept of the model side by side.

    What it predicts are its own tokens, and so are the ids of its decode steps, which are those that it has predicted.
    Inputs of several tokens have the model's.

    Args:
        head: its description.
        config: of the head.
        weights: of the head.
        ops: see Network.

    Attributes:
        taps_of_model: of the model whose head it is, see Network.
    """

    def __init__(self, head: Eagle3, config: ModelConfig, weights: ModelWeights, ops: Ops) -> None:
        super().__init__(config, weights, ops=ops)
        self._norms_residual, self._norms_output = head.norms_residual, head.norms_output
        self._targets = torch.tensor(head.targets, device=weights.like.device) if head.targets else None
        assert weights.decoder and weights.decoder.entrance
        self._entrance, (self._layer,) = weights.decoder.entrance, weights.decoder.layers
        self.taps_of_model = Taps(head.taps, lambda x: self.ops.linear(self._entrance.projection, x))

    def said(self, tokens: Tensor) -> Tensor:
        """See Predictor."""
        return tokens if self._targets is None else torch.where(tokens < 0, tokens, self._targets[tokens.clamp(min=0)])

    def carry(self, hidden: Tensor, cache: KvCache, slots: Tensor | slice, positions: Tensor) -> None:
        """See Predictor."""
        cache.keep(self.normed(hidden) if self._norms_output else hidden, slots, positions)

    def _embed_next(self, ids: Tensor, positions: Tensor, slots: Tensor | slice, cache: KvCache) -> Tensor:
        return super()._embed_next(self.said(ids), positions, slots, cache)

    def _enter(self, embeddings: Tensor, outputs: Tensor) -> Tensor:
        return torch.cat((embeddings, outputs), -1)

    def _decoder(
        self,
        x: Tensor,
        prepare: Callable[[AttentionSpec], PreparedAttention],
        slots: Tensor | slice,
        cache: KvCache,
        tapped: list[Tensor],
        rows: Rows | None = None,
        adapted: AdaptedRows | None = None,
        state_rows: StateRows | None = None,
    ) -> Tensor:
        """Override Network: x is [..., 2 * hidden], embeddings first; what is kept is the residual stream."""
        (spec,), (kv,), layer = self._specs.values(), cache.kv, self._layer
        embeddings, hidden = (half.contiguous() for half in x.chunk(2, -1))
        normed = self.ops.norm(hidden, self._entrance.hidden_norm)
        context = LayerContext(self.ops, self.comm, prepare(spec))
        assert layer.attention
        sides = self.ops.norm(embeddings, self._entrance.embedding_norm), normed
        attended = layer.attention.inner(torch.cat(sides, -1), None, context, kv)
        x = self.comm.all_reduce_add(normed if self._norms_residual else hidden, layer.attention.out, attended)
        return run_layer(self.config, replace(layer, attention=None), x, context, kv)

    @cached_property
    def _whole_step(self) -> HostLayers | None:
        return None


def load_eagle3(
    settings: Settings,
    decoder: Decoder | None,
    model: ModelWeights,
    device: torch.device,
    ops: Ops,
    sharers: int,
    has_whole_head: bool,
) -> Eagle3Head | None:
    """Load an EAGLE-3 head whole; None: none is to draft. Arguments: see load_predictor.

    Raises:
        EngineError: it is missing or damaged, or does not fit the model.
    """
    if settings.speculation != EAGLE3:
        return None
    assert (directory := settings.draft_model)
    if problem := head_problem(decoder, settings.pipeline_para_size):
        raise EngineError(f"{settings.checkpoint}: {problem}", "leave speculation out")
    assert decoder
    if not is_hub_directory(directory):
        raise EngineError(f"speculation = eagle3, and {directory} has no config.json: export it again with draft_model")
    head = read_eagle3(directory, decoder, 1 if has_whole_head else settings.tensor_para_size, EngineError)
    config, longest = config_of_head(head), longest_text(decoder) or NO_POSITION_LIMIT
    config = replace(config, max_pos_seq_len=min(config.max_pos_seq_len, longest))
    weights = load_weights(
        directory,
        config,
        1,
        choose_precision(settings.data_type, device),
        device,
        Partition(range(1), embeds=head.has_embedding, predicts=head.has_head),
        sharers=sharers,
        are_made_up=settings.has_made_up_weights,
    )
    embedding = weights.token_embedding if head.has_embedding else model.token_embedding
    return Eagle3Head(head, config, replace(weights, token_embedding=embedding, head=weights.head or model.head), ops)
