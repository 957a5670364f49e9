"""What a network computes with: one object, chosen when a model is loaded, whose methods are all its operations.

torch_ops.py has every operation in torch. triton_ops.py has those on an NVIDIA GPU for which a profile has shown a gain
from a kernel of our own. The network, the cache and the sampler call these methods and do not ask what is behind them.

B: rows of a call; T: tokens of all of them together; H: heads; D: size of a head; V: vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ..cache.kv_cache import KvCache
from ..model.linear import Linear, Norm
from ..model.packed_rows import Rows
from ..model.positions import AttentionSpec
from .kernels import can_run_on

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""q, k, v and a layer's memory of the cache -> attended; q, k, v and the result are [B, H, 1, D] or [1, H, T, D]."""

CrossAttend = Callable[[Tensor, Tensor], Tensor]
"""q, [B, H, 1, D] or [1, H, T, D], and a layer's memory of the cache -> attended, of q's shape."""


class Ops(ABC):
    """The operations of a network on one device.

    Attributes:
        can_capture: whether steps can be captured as CUDA graphs: no operation needs a number on the host.
        is_head_major: how the cache lays out a page, see cache.sizing.CacheShape.
    """

    can_capture = False
    is_head_major = False

    @abstractmethod
    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalize x, [..., width]."""

    @abstractmethod
    def linear(
        self,
        linear: Linear,
        x: Tensor,
        norm: Norm | None = None,
        activation: str = "",
        residual: Tensor | None = None,
    ) -> Tensor:
        """Compute residual + activation(norm(x) @ weight.T + bias), [..., in] -> [..., out].

        Args:
            linear: weight and bias.
            x: [..., in].
            norm: of x; None: none.
            activation: gelu (by tanh), relu, silu or nothing.
            residual: [..., out], contiguous; is overwritten with the result. None: nothing is added.
        """

    @abstractmethod
    def partial_linear(self, linear: Linear, x: Tensor) -> Tensor:
        """Compute one rank's summand of a row-parallel product: in fp32 where that costs nothing, else in x's type."""

    @abstractmethod
    def linear_fp32(self, linear: Linear, x: Tensor, norm: Norm | None = None) -> Tensor:
        """Compute norm(x) @ weight.T + bias in fp32, whatever the types of x and the weight are."""

    @abstractmethod
    def embed(self, ids: Tensor, positions: Tensor, tokens: Tensor, table: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Look up the next token of each row and its position, and add them.

        Args:
            ids: int64 [B].
            positions: int64 [B]; those behind the table's last count as the last.
            tokens: [V, hidden].
            table: [positions, hidden], or None.
            dtype: of the result.

        Returns:
            [B, hidden].
        """

    @abstractmethod
    def argmax_step(self, logits: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """Choose each row's most likely token, and prepare the next step with it.

        Args:
            logits: fp32 [B, V], contiguous.
            ids: int64 [B]; is overwritten with the tokens.
            positions: int64 [B]; each is increased by 1.

        Returns:
            int64 [B]; see sampling.sampling.argmax.
        """

    @abstractmethod
    def draw_tokens(
        self, logits: Tensor, rows: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor, largest: int, is_narrow: bool
    ) -> Tensor:
        """Draw a token for some rows: top-k, then top-p, then by the uniform random number.

        Args:
            logits: fp32 [B, V].
            rows: int64 [n].
            top_k: int64 [n]; 0 keeps all.
            top_p: fp32 [n]; 1 keeps all.
            uniform: fp64 [n] in [0, 1).
            largest: of top_k, known on the host.
            is_narrow: whether no top_k is 0.

        Returns:
            int64 [n].
        """

    @abstractmethod
    def kv_write(self, memory: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v, [H, T, D], to the pages, int32 [T], and offsets, int64 [T], of a layer's memory."""

    @abstractmethod
    def encoder_attention(self, rows: Rows, spec: AttentionSpec, like: Tensor, scores: list[Tensor] | None) -> Attend:
        """Prepare attention of whole rows to themselves, in both directions.

        Args:
            rows: packed rows.
            spec: scale, bias and rotary.
            like: gives device and type of keys.
            scores: every call appends its attention weights, fp32 [B, H, S, S]; None: they are not wanted.
        """

    @abstractmethod
    def prefill_attention(self, cache: KvCache, rows: Rows, spec: AttentionSpec, like: Tensor) -> Attend:
        """Prepare causal attention of new rows to themselves; each call writes keys and values to the cache."""

    @abstractmethod
    def extend_attention(self, cache: KvCache, rows: Rows, longest: int, spec: AttentionSpec, like: Tensor) -> Attend:
        """Prepare causal attention of rows that continue what their slots hold, several tokens of each.

        Args:
            cache: holds the keys and values before them.
            rows: packed rows of known lengths; none has more tokens than its window.
            longest: at least the number of entries of each row.
            spec: scale, bias and rotary.
            like: gives device and type of keys.
        """

    @abstractmethod
    def decode_attention(
        self, positions: Tensor, tables: Tensor, windows: Tensor, spec: AttentionSpec, like: Tensor
    ) -> Attend:
        """Prepare attention of one token of each row; each call writes its key and value to the cache.

        Args:
            positions: int64 [B], of the token.
            tables: int32 [B, width], pages of each row.
            windows: int64 [B].
            spec: scale, bias and rotary.
            like: gives device and type of keys.
        """

    @abstractmethod
    def cross_attention(self, tables: Tensor, lengths: Tensor, scale: float) -> CrossAttend:
        """Prepare attention to the keys and values that the cache holds of the encoder's output.

        Args:
            tables: int32 [n, width], the pages of those, for each row of one token or each token of packed rows.
            lengths: int64 [n], all of which is seen.
            scale: of q k.
        """

    def warm_up_sampling(self, vocab_size: int) -> None:  # noqa: B027 (torch needs nothing)
        """Compile what draw_tokens needs for logits of this many columns."""


@lru_cache
def choose_ops(device: torch.device) -> Ops:
    """Choose the operations for a device: Triton's kernels where they can be compiled, else torch."""
    if can_run_on(device):
        from .triton_ops import TritonOps  # needs Triton, which torch for NVIDIA's GPUs brings along

        return TritonOps(device)
    from .torch_ops import TorchOps

    return TorchOps(device)
