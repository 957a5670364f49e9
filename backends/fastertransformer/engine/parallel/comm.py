"""Communication between the processes that hold a network together: tensor and pipeline parallelism.

The processes of a stage (see group.py) hold its layers; each has its shard of every matrix, computes with its own
heads, and the two products that lead back into the residual stream are all-reduced over the stage
(``mlp.dense_4h_to_h``, ``attention.dense``). A stage sends its result to the next one, and the last stage to the first,
each process of which predicts a part of the vocabulary. These processes find the argmax together; where sampling,
penalties or log-probabilities need more, rank 0 gathers all logits and broadcasts the tokens that it has chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..model.config import ModelConfig
from ..model.layouts import vocabulary_part
from ..model.linear import Linear
from ..ops.ops import Ops
from ..sampling.sampling import NOT_FINITE
from .group import Group
from .peer_memory import open_peer_memory

_PEER_ROWS = 16  # of hidden numbers that are summed through the peers' memory
_LAST = (1 << 32) - 1
_NOT_FINITE_KEY = (1 << 63) - 1


class Comm:
    """Communication of a process that holds the whole network: every collective returns its input.

    Args:
        ops: operations of this process.

    Attributes:
        is_split: whether several processes share each layer, and the vocabulary.
    """

    is_split = False

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite x in every process with rank 0's."""
        return x

    def recv_input(self, embed: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Give the input of this stage's first layer, [*shape, hidden]: the embedding, or the previous stage's."""
        return embed()

    def all_reduce_add(self, x: Tensor, linear: Linear, inner: Tensor) -> Tensor:
        """Add a product to x in place: this process's alone, or the sum of all processes' parts of it."""
        return self._ops.linear(linear, inner, residual=x)

    def send_output(self, x: Tensor) -> Tensor:
        """Send this stage's result to the next one; returns the last stage's result where this process predicts."""
        return x

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Concatenate the processes' parts of the vocabulary, [N, part] -> [N, V] in rank 0."""
        return logits

    def argmax(self, logits: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """Find the argmax over all parts of the vocabulary, and prepare the next step; see Ops.argmax_step."""
        return self._ops.argmax_step(logits, ids, positions)

    def broadcast_output(self, x: Tensor) -> Tensor:
        """Overwrite x in every process with the last stage's result, which send_output has given rank 0."""
        return x

    def gather_attentions(self, parts: list[Tensor], shape: tuple[int, int]) -> list[Tensor]:
        """Collect the attentions of all encoder layers and heads.

        Args:
            parts: of this process's layers and heads, fp32 [B, H, S, S] each.
            shape: B and S.
        """
        return parts


class GroupComm(Comm):
    """Communication with the processes of a group.

    Args:
        group: the processes.
        config: dimensions.
        dtype: of hidden states.
        device: of this process.
        ops: operations of this process.
    """

    def __init__(self, group: Group, config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: Ops) -> None:
        super().__init__(ops)
        self._group, self._config, self._dtype, self._device = group, config, dtype, device
        self.is_split = group.tensor_size > 1
        self._peer_memory = open_peer_memory(group, device, _PEER_ROWS * config.hidden_units)
        self._part = vocabulary_part(config.vocab_size, group.tensor_rank, group.tensor_size)

    @property
    def note(self) -> str:
        """How the processes of a stage all-reduce, for a log."""
        if self._peer_memory:
            return f"all-reduce of up to {_PEER_ROWS} rows through peer memory"
        return "all-reduce by NCCL" if self._device.type == "cuda" else "all-reduce by gloo"

    def has_timed_out(self) -> bool:
        """Say whether a kernel has stopped waiting for another process's numbers."""
        return self._peer_memory is not None and self._peer_memory.has_timed_out()

    def broadcast(self, x: Tensor) -> Tensor:
        """Broadcast from rank 0 to all processes."""
        dist.broadcast(x, 0)
        return x

    def recv_input(self, embed: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Embed in the first stage; receive in the others."""
        if self._group.stage == 0:
            return embed()
        x = torch.empty((*shape, self._config.hidden_units), dtype=self._dtype, device=self._device)
        dist.recv(x, self._group.rank - self._group.tensor_size)
        return x

    def all_reduce_add(self, x: Tensor, linear: Linear, inner: Tensor) -> Tensor:
        """All-reduce over the stage, through peer memory where the product is small enough."""
        if not self.is_split:
            return super().all_reduce_add(x, linear, inner)
        part = self._ops.partial_linear(linear, inner)
        if self._peer_memory and self._peer_memory.has_room_for(part):
            return self._peer_memory.all_reduce_add(x, part)
        dist.all_reduce(part, group=self._group.neighbours)
        x += part
        return x

    def send_output(self, x: Tensor) -> Tensor:
        """Send to the next stage, and from the last one to the first; the first stage returns what it receives."""
        group, last = self._group, self._group.stages - 1
        if group.stage < last:
            dist.send(x.contiguous(), group.rank + group.tensor_size)
            if group.stage == 0:
                dist.recv(x, last * group.tensor_size + group.tensor_rank)
        elif last:
            dist.send(x.contiguous(), group.tensor_rank)
        return x

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Gather in rank 0."""
        size, width = self._group.tensor_size, logits.shape[1]
        if size == 1:
            return logits
        widest = -(-self._config.vocab_size // size)  # gather takes tensors of one shape
        mine = F.pad(logits, (0, widest - width)).contiguous()
        parts = [torch.empty_like(mine) for _ in range(size)] if self._group.tensor_rank == 0 else None
        dist.gather(mine, parts, 0, group=self._group.neighbours)
        if parts is None:
            return logits
        widths = [len(vocabulary_part(self._config.vocab_size, rank, size)) for rank in range(size)]
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def argmax(self, logits: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """Find the argmax over all parts of the vocabulary, and prepare the next step; see Ops.argmax_step."""
        if not self.is_split:
            return super().argmax(logits, ids, positions)
        if self._peer_memory:
            tokens = super().argmax(logits, ids, positions)
            self._peer_memory.all_reduce_argmax(tokens, ids, logits, self._part.start)
            return tokens
        places = logits.argmax(dim=-1)
        values = logits.gather(1, places[:, None])[:, 0]
        keys = argmax_keys(values, places + self._part.start).masked_fill_(~logits[:, 0].isfinite(), _NOT_FINITE_KEY)
        dist.all_reduce(keys, op=dist.ReduceOp.MAX, group=self._group.neighbours)
        tokens = torch.where(keys == _NOT_FINITE_KEY, NOT_FINITE, _LAST - (keys & _LAST))
        ids.copy_(tokens.clamp(min=0))
        positions += 1
        return tokens

    def broadcast_output(self, x: Tensor) -> Tensor:
        """Broadcast rank 0's to all processes; with one stage all have it."""
        return self.broadcast(x.contiguous()) if self._group.stages > 1 else x

    def gather_attentions(self, parts: list[Tensor], shape: tuple[int, int]) -> list[Tensor]:
        """All-reduce a tensor of all layers and heads, in which each process fills in its own."""
        encoder, partition, (batch, length) = self._config.encoder, self._group.partition(self._config), shape
        assert encoder and partition.encoder_layers is not None
        size = (encoder.num_layer, batch, encoder.head_num, length, length)
        whole = torch.zeros(size, dtype=torch.float32, device=self._device)
        for layer, part in zip(partition.encoder_layers, parts, strict=True):
            heads = self._group.tensor_rank * part.shape[1]
            whole[layer, :, heads : heads + part.shape[1]] = part
        dist.all_reduce(whole)
        return list(whole)


def argmax_keys(values: Tensor, tokens: Tensor) -> Tensor:
    """Give integers whose maximum is the argmax's, the first token of equal values: fp32 [N], [N] -> int64 [N]."""
    bits = (values + 0.0).view(torch.int32)  # -0 is 0
    return (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32) + (_LAST - tokens)
