"""Communication between the processes that hold a network together: tensor and pipeline parallelism.

The processes of a stage (see group.py) hold its layers; each has its shard of every matrix and computes with its own
heads, and the two row-parallel products that lead back into the residual stream are all-reduced over the stage
(``mlp.dense_4h_to_h``, ``attention.dense``). A stage sends its output to the next one, and the last stage to the first,
each process of which computes the logits of a part of the vocabulary. These processes find the argmax together; if
sampling, penalties or log-probabilities need more, rank 0 gathers all logits and broadcasts the tokens that it chooses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..ops import scoring
from ..ops.linear import Linear
from ..ops.logits import NOT_FINITE
from ..ops.ops import Ops
from .group import Group
from .partition import vocabulary_part
from .peer_memory import open_peer_memory

PEER_MEMORY = "through peer memory"  # in the note of a process whose small all-reduces are
_PEER_ROWS = 16  # of hidden states, at most, that are all-reduced through peer memory
_LAST = (1 << 32) - 1
_NOT_FINITE_KEY = (1 << 63) - 1


class Comm:
    """Communication of a process with the others of a group; without a group every collective returns its input.

    Args:
        ops: of this process.
        like: has device and type of hidden states.
        vocab_size: tokens that the network predicts.
        width: of a hidden state.
        group: of all processes that hold the network.

    Attributes:
        is_split: whether several processes share each layer, and the vocabulary.
    """

    def __init__(self, ops: Ops, like: Tensor, *, vocab_size: int, width: int, group: Group | None = None) -> None:
        self._ops, self._like, self._width, self._group = ops, like, width, group
        self._stage, self._stages = (group.stage, group.stages) if group else (0, 1)
        self._tensor_rank, self._tensor_size = (group.tensor_rank, group.tensor_size) if group else (0, 1)
        self._neighbours = group.neighbours if group else None
        self.is_split = self._tensor_size > 1
        self._peer_memory = open_peer_memory(group, like.device, _PEER_ROWS * width) if group else None
        size = self._tensor_size
        self._parts = [vocabulary_part(vocab_size, rank, size) for rank in range(size)]

    @property
    def note(self) -> str:
        """How the processes of a stage all-reduce, for a log."""
        if self._peer_memory:
            return f"all-reduce of up to {_PEER_ROWS} rows {PEER_MEMORY}"
        return "all-reduce by NCCL" if self._like.device.type == "cuda" else "all-reduce by gloo"

    def has_timed_out(self) -> bool:
        """Return whether a kernel has stopped waiting for another process's numbers."""
        return self._peer_memory is not None and self._peer_memory.has_timed_out()

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite x in every process with rank 0's."""
        if self._group:
            dist.broadcast(x, 0)
        return x

    def recv_input(self, embed: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Return the input of this stage, [*shape, hidden]: the embedding, or the output of the stage before."""
        if not self._group or self._stage == 0:
            return embed()
        x = self._like.new_empty((*shape, self._width))
        dist.recv(x, self._group.rank - self._tensor_size)
        return x

    def all_reduce_add(self, x: Tensor, linear: Linear | None, inner: Tensor, ops: Ops | None = None) -> Tensor:
        """Add a product to x in place: the sum of all processes' parts of it, through peer memory if it is small.

        Where there is no product, ``inner`` is this process's part. ``ops`` are the call's, if not this process's.
        """
        ops = ops or self._ops
        if not self.is_split:
            return ops.linear(linear, inner, residual=x) if linear else x.add_(inner)
        part = ops.partial_linear(linear, inner) if linear else inner
        if self._peer_memory and self._peer_memory.has_room_for(part):
            return self._peer_memory.all_reduce_add(x, part)
        dist.all_reduce(part, group=self._neighbours)
        x += part
        return x

    def average(self, x: Tensor) -> Tensor:
        """Average numbers of one shape over the processes that share a layer, in place."""
        if self.is_split:
            dist.all_reduce(x, group=self._neighbours)
            x /= self._tensor_size
        return x

    def send_output(self, x: Tensor) -> Tensor:
        """Send this stage's output to the next stage, and the last one's to the first, which returns it."""
        if not self._group or self._stages == 1:
            return x
        last = self._stages - 1
        if self._stage == last:
            dist.send(x.contiguous(), self._tensor_rank)
            return x
        dist.send(x.contiguous(), self._group.rank + self._tensor_size)
        if self._stage == 0:
            dist.recv(x, last * self._tensor_size + self._tensor_rank)
        return x

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Concatenate the processes' parts of the vocabulary, [N, part] -> [N, V] in rank 0."""
        if not self.is_split:
            return logits
        widest = max(map(len, self._parts))  # gather takes tensors of one shape
        gathered = self._gather(F.pad(logits, (0, widest - logits.shape[1])))
        if gathered is None:
            return logits
        return torch.cat([each[:, : len(part)] for each, part in zip(gathered, self._parts, strict=True)], 1)

    def gather_summaries(self, logits: Tensor, tokens: Tensor, most: int) -> list[Tensor]:
        """Summarize the processes' parts of the vocabulary, see scoring.py: [N, part], [N] -> all parts' in rank 0."""
        first = self._parts[self._tensor_rank].start
        return self._gather(scoring.summarize_part(logits, tokens, first, most)) or []

    def _gather(self, mine: Tensor) -> list[Tensor] | None:
        """Collect tensors of one shape from the processes that share a stage in its first one; None in the others."""
        mine = mine.contiguous()
        gathered = [torch.empty_like(mine) for _ in self._parts] if self._tensor_rank == 0 else None
        dist.gather(mine, gathered, 0, group=self._neighbours)
        return gathered

    def argmax(self, logits: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """Find the argmax over all parts of the vocabulary, and prepare the next step; see Ops.argmax_step."""
        if not self.is_split:
            return self._ops.argmax_step(logits, ids, positions)
        first = self._parts[self._tensor_rank].start
        if self._peer_memory:
            tokens = self._ops.argmax_step(logits, ids, positions)
            self._peer_memory.all_reduce_argmax(tokens, ids, logits, first)
            return tokens
        columns = logits.argmax(dim=-1)
        values = logits.gather(1, columns[:, None])[:, 0]
        keys = argmax_keys(values, columns + first).masked_fill_(~logits[:, 0].isfinite(), _NOT_FINITE_KEY)
        dist.all_reduce(keys, op=dist.ReduceOp.MAX, group=self._neighbours)
        tokens = torch.where(keys == _NOT_FINITE_KEY, NOT_FINITE, _LAST - (keys & _LAST))
        ids.copy_(tokens.clamp(min=0))
        positions += 1
        return tokens

    def broadcast_output(self, x: Tensor) -> Tensor:
        """Broadcast the last stage's output, which send_output has given rank 0; with one stage all have it."""
        return self.broadcast(x.contiguous()) if self._stages > 1 else x

    def gather_attentions(self, parts: list[Tensor], layers: int, shape: tuple[int, int, int]) -> list[Tensor]:
        """Collect the attentions of all encoder layers and heads: each process fills in its own, and all are summed.

        Args:
            parts: of this process's layers and heads, fp32 [B, H's part, S, S] each.
            layers: of the whole encoder.
            shape: B, H and S.
        """
        if not self._group:
            return parts
        size = (layers, *shape, shape[-1])
        whole = torch.zeros(size, dtype=torch.float32, device=self._like.device)
        for layer, part in zip(self._group.part_of(layers), parts, strict=True):
            heads = self._tensor_rank * part.shape[1]
            whole[layer, :, heads : heads + part.shape[1]] = part
        dist.all_reduce(whole)
        return list(whole)


def argmax_keys(values: Tensor, tokens: Tensor) -> Tensor:
    """Return integers whose maximum is the argmax's, the first token of equal values: fp32 [N], [N] -> int64 [N]."""
    bits = (values + 0.0).view(torch.int32)  # -0 is 0
    return (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32) + (_LAST - tokens)
