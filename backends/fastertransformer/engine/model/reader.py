"""Read tensors of one checkpoint onto a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.linear import PACKED, Linear, Norm
from ..ops.positions import alibi_slopes
from ..parallel.partition import vocabulary_part
from .adapters import Matrix
from .config import ModelConfig, Stack
from .precision import TORCH_TYPES, Precision
from .shards import Piece, Shards


class Reader:
    """Reads tensors of one checkpoint onto a device: one rank's shards, or all of them concatenated (rank None).

    Attributes:
        head_type: number format of the head; the logits are fp32 whatever it is (see precision.py).
        exact_type: number format of small matrices whose products decide, as a router's.
        size_bytes: of what was read, as it is stored.
        saved_bytes: how much larger that would be without int8.
        largest_bytes: of the largest tensor.
        matrices: those that adapters may change, by name.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensor_para_size: int,
        precision: Precision,
        device: torch.device,
        is_cpu: bool,
        rank: int | None,
        shards: Shards,
    ) -> None:
        self._shards, self._tensor_para_size, self._rank = shards, tensor_para_size, rank
        self._ranks = range(tensor_para_size) if rank is None else range(rank, rank + 1)
        self._precision, self._device, self._is_cpu = precision, device, is_cpu
        self._tensors, self._dtype = config.tensors, TORCH_TYPES[config.weight_data_type]
        self.exact_type = torch.float32 if is_cpu else precision.compute
        self.head_type = precision.narrow or self.exact_type
        self.size_bytes = self.saved_bytes = self.largest_bytes = 0
        self.matrices: dict[str, Matrix] = {}
        self._buffers: dict[torch.dtype, Tensor] = {}

    @property
    def ranks(self) -> int:
        """How many ranks share the tensors, each of which reads its part; 1: this one has all."""
        return 1 if self._rank is None else self._tensor_para_size

    def __contains__(self, name: str) -> bool:
        """Whether the model has a tensor."""
        return name in self._tensors

    def _copy(self, name: str, target: Tensor) -> None:
        """Copy a tensor's file, or the ranks' files side by side, into a tensor of their common shape.

        Where a rank's file has shares of several tensors, each tensor's shares are put side by side.
        """
        axis, parts = self._tensors[name].split_axis, self._tensors[name].parts
        files = [f"{name}.bin"] if axis is None else [f"{name}.{rank}.bin" for rank in self._ranks]
        shape = tuple(n // len(files) if index == axis else n for index, n in enumerate(target.shape))
        shares = [width // self._tensor_para_size for width in parts] or [shape[axis or 0]]
        wholes = torch.split(target, [share * len(files) for share in shares], axis or 0)
        for rank, file in enumerate(files):
            shard = self._bring(Piece(file, shape, self._dtype, file), target.dtype)
            for whole, part in zip(wholes, torch.split(shard, shares, axis or 0), strict=True):
                whole.chunk(len(files), axis or 0)[rank].copy_(part)

    def _bring(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """Read a piece of a file, rounded to the type of the computation if it is to be stored in another one."""
        shard = self._shards(piece)
        if self._precision.rounded in (shard.dtype, dtype):
            return shard
        return self._scratch(piece.shape, self._precision.rounded).copy_(shard)

    def _scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that is valid until the next tensor is read.

        The same memory is reused: the C library's heap would grow to twice the weights if temporary and permanent
        tensors were allocated by turns.
        """
        size = torch.Size(shape).numel()
        if dtype not in self._buffers or self._buffers[dtype].numel() < size:
            self._buffers[dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return self._buffers[dtype][:size].view(shape)

    def _here(self, name: str) -> tuple[int, ...]:
        """Return the shape of this process's part of a tensor."""
        part, shape, split_axis = len(self._ranks), self._tensors[name].shape, self._tensors[name].split_axis
        return tuple(n * part // self._tensor_para_size if axis == split_axis else n for axis, n in enumerate(shape))

    def _count(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self.largest_bytes = max(self.largest_bytes, size_bytes)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor in its stored layout: a copy, for the file may change under a running server.

        Args:
            name: file name up to ``.{rank}.bin`` or ``.bin``.
            dtype: None for the type that is computed in.
        """
        target = self.empty(self._here(name), dtype)
        self._copy(name, target)
        self._count(target.nbytes)
        return target

    def norm(self, name: str, stack: Stack) -> Norm | None:
        """Read a norm of a stack's residual stream; None where the model has none of that name."""
        if f"{name}.weight" not in self:
            return None
        dtype = torch.float32 if stack.has_zero_centred_norms else None  # 1 more would round a half's small weights off
        bias = self.tensor(f"{name}.bias", dtype) if f"{name}.bias" in self else None
        weight = self.tensor(f"{name}.weight", dtype)
        if stack.has_zero_centred_norms:
            weight += 1
        return Norm(weight, bias, stack.layernorm_eps, stack.is_rms)

    def head(self, name: str | None, table: Tensor | None, bias: Tensor | None) -> Linear:
        """Read the head, or this rank's rows of it; see linear.py. With int8 weights it is int8 too.

        Args:
            name: None: the head is tied to the table, which a CPU then stores in a second form.
            table: token embedding, [vocab, hidden]; None with a name.
            bias: of the whole vocabulary, or None.
        """
        is_packed, is_lent = bool(self._precision.weights), False
        vocab_size = self._tensors[name].shape[0] if name else 0 if table is None else len(table)
        part = range(vocab_size)
        if self._rank is not None:
            part = vocabulary_part(vocab_size, self._rank, self._tensor_para_size)
        if name:
            matrix, is_lent = self._head_rows(name, part, is_packed)
        else:
            assert table is not None
            matrix = table[part.start : part.stop]
        bias = None if bias is None else bias[part.start : part.stop]
        if is_packed:
            linear, bias_bytes = PACKED[self._precision.weights](matrix, bias), 0 if bias is None else bias.nbytes
            self._count(linear.size_bytes - bias_bytes)
            self.saved_bytes += (matrix.nbytes if name or self._is_cpu else 0) + bias_bytes - linear.size_bytes
            self.largest_bytes = max(self.largest_bytes, matrix.nbytes)
            return linear
        if self._is_cpu and not name:
            self._count(matrix.nbytes)
        return Linear(matrix, bias, is_lent)

    def _head_rows(self, name: str, part: range, is_packed: bool) -> tuple[Tensor, bool]:
        """Read rows of the head, which the caller quantizes if it is int8 -> these, and whether others lie beside."""
        matrix = self._side_by_side([name], first=1) if is_packed else self.tensor(name, dtype=self.head_type)
        self.size_bytes -= matrix[len(part) :].nbytes if not is_packed else 0
        return matrix[part.start : part.stop], len(part) < len(matrix)

    def column_parallel(self, *names: str) -> Linear:
        """Read matrices that are split by their output; the matrices of several names follow each other."""
        biases, weights = [f"{name}.bias" for name in names], [f"{name}.weight" for name in names]
        if all(bias in self for bias in biases):
            return self._linear(weights, self._side_by_side(biases))
        if not any(bias in self for bias in biases):
            return self._linear(weights, None)
        pairs = zip(weights, biases, strict=True)
        parts = [
            self.tensor(each) if each in self else self.empty(self._here(name)[:1]).zero_() for name, each in pairs
        ]
        return self._linear(weights, torch.cat(parts))

    def row_parallel(self, name: str, *biases: str) -> Linear:
        """Read a matrix that is split by its input.

        Args:
            name: of the matrix, without ``.weight``.
            biases: names of which the model has one at most; by default the matrix's own. One rank adds the bias; or
                every rank adds its part, where the family's table says that the ranks' parts are summed.
        """
        bias = None
        for found in (each for each in biases or (f"{name}.bias",) if each in self):
            is_summed = self._tensors[found].is_summed
            if is_summed or self._rank in (None, 0):
                bias = self._side_by_side([found])
                if is_summed and self._rank is None:
                    bias *= self._tensor_para_size
        return self._linear([f"{name}.weight"], bias)

    def _linear(self, names: Sequence[str], bias: Tensor | None) -> Linear:
        """Read matrices behind each other -> [out, in]."""
        matrix, is_lent = self._matrix(names)
        packed = PACKED[self._precision.weights]
        linear, full_bytes = packed(matrix, bias, is_lent), matrix.nbytes
        self._count(linear.size_bytes)
        self.saved_bytes += full_bytes + (bias.nbytes if bias is not None else 0) - linear.size_bytes
        self.largest_bytes = max(self.largest_bytes, full_bytes)
        return linear

    def _matrix(self, names: Sequence[str]) -> tuple[Tensor, bool]:
        """Read matrices side by side, [in, out] or [in, 3, out] -> [out, in], in memory that the next one reuses."""
        return self._side_by_side(names, first=1).T, True

    def _side_by_side(self, names: Sequence[str], first: int = 0) -> Tensor:
        """Read tensors of one shape: their axes from ``first`` on become one, along which they are concatenated.

        A matrix (first 1) is in memory that the next one reuses.
        """
        here = self._here(names[0])
        target_shape = (*here[:first], len(names) * torch.Size(here[first:]).numel())
        target = self._scratch(target_shape, self._precision.kept) if first else self.empty(target_shape)
        for name, part in zip(names, target.chunk(len(names), first), strict=True):
            self._copy(name, part.view(here))
        return target

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return memory on the device, of the type that is computed in if no other is named."""
        return torch.empty(shape, dtype=dtype or self._precision.compute, device=self._device)

    def slopes(self, head_num: int) -> Tensor:
        """Return ALiBi's slopes of this rank's heads, fp32."""
        slopes = alibi_slopes(head_num).to(self._device)
        return slopes if self._rank is None else slopes.chunk(self._tensor_para_size)[self._rank]

    def ia3(self, *names: str) -> tuple[Tensor, ...] | None:
        """Read IA3 vectors by task; a last row of ones is for rows without a task (-1). None: the model has none."""
        tables = [self.tensor(f"{name}.ia3.weight") for name in names if f"{name}.ia3.weight" in self]
        return tuple(torch.cat((table, torch.ones_like(table[:1]))) for table in tables) or None
