"""Read FasterTransformer's shards into tensors, or refuse them.

A shard is the raw little-endian content of one tensor's slice, without a header; ft_format says which files there are.
FasterTransformer only warns where a file is missing or short and serves uninitialised memory; here that is an error
which names every such file.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor

from ..cache.sizing import free_bytes
from ..errors import WeightsError
from .config import ModelConfig, Stack
from .layouts import ModelWeights, Partition, read_model, vocabulary_part
from .linear import Int8Linear, Linear, Norm
from .positions import alibi_slopes
from .precision import TORCH_TYPES, Precision
from .shards import Order, Shards, made_up, mapped, planned, problems_of
from .staging import AHEAD_BYTES, StagedFiles


def load_weights(
    directory: Path,
    config: ModelConfig,
    tensor_para_size: int,
    precision: Precision,
    device: torch.device,
    partition: Partition | None = None,
    sharers: int = 1,
    are_made_up: bool = False,
) -> ModelWeights:
    """Read shards, one tensor at a time, if they are complete and the device has memory for all of them.

    Args:
        directory: of the shards, ``<T>-gpu``.
        config: of the whole model.
        tensor_para_size: ranks that the shards were written for.
        precision: number formats.
        device: of the tensors.
        partition: None for the whole network: any number of shards, concatenated in this process.
        sharers: processes that load an equal part into the same memory at the same time.
        are_made_up: whether the weights are random and no shard is read: to measure a model without a checkpoint.

    Raises:
        WeightsError: shards of any rank are missing or have another size (all are named), tensor_para_size does not
            fit, or the device has too little memory.
    """
    _check_ranks(directory, config, tensor_para_size)
    source_type, whole = TORCH_TYPES[config.weight_data_type], Partition(range(config.num_layer))
    is_cpu = device.type == "cpu"
    is_staged = not (is_cpu or are_made_up)
    with StagedFiles(directory, source_type, device) if is_staged else nullcontext() as staged:
        has_head = not are_made_up and (directory / f"{config.head}.bin").exists()  # a tied one may lack it
        partition, plans = partition or whole, {}
        for each in {whole, partition}:
            # On torch's meta device tensors have no content: the code that loads also counts the memory and the files.
            order: Order = []
            how = config, tensor_para_size, precision, torch.device("meta"), is_cpu, each.rank
            plans[each] = Reader(*how, planned(source_type, order)), order
            read_model(plans[each][0], config, each, has_head)
        problems = [] if are_made_up else problems_of(directory, plans[whole][1], source_type)
        if problems:
            noun = "shard is" if len(problems) == 1 else "shards are"
            raise WeightsError(f"{len(problems)} {noun} unusable in {directory}:\n  " + "\n  ".join(problems))
        plan, order = plans[partition]
        need_bytes = plan.size_bytes + 2 * plan.largest_bytes + AHEAD_BYTES * is_staged
        _check_room(directory, precision, need_bytes, device, sharers)
        if staged:
            # Allocate everything once: torch caches and divides it, where the driver is slow for each tensor's memory.
            with suppress(torch.OutOfMemoryError):  # there may be no such contiguous piece
                torch.empty(need_bytes, dtype=torch.uint8, device=device)
            shards = staged.in_order(order)
        else:
            shards = made_up(precision.compute, device) if are_made_up else mapped(directory, source_type)
        reader = Reader(config, tensor_para_size, precision, device, is_cpu, partition.rank, shards)
        return read_model(reader, config, partition, has_head)


def _check_room(directory: Path, precision: Precision, need_bytes: int, device: torch.device, sharers: int) -> None:
    have_bytes = free_bytes(device) // sharers
    if need_bytes > have_bytes:
        each = f" for each of {sharers} processes" if sharers > 1 else ""
        raise WeightsError(
            f"{directory} does not fit: loading it as {precision.note} takes {need_bytes / 1e9:.3g} GB and {device} has"
            f" {have_bytes / 1e9:.3g} GB free{each}; serve it with int8_mode 1, as fp16 or bf16, or over more processes"
            " (tensor_para_size, pipeline_para_size)"
        )


def _check_ranks(directory: Path, config: ModelConfig, tensor_para_size: int) -> None:
    way_out = (
        f"cut them again: python3 -m export_scripts.convert --checkpoint={directory}"
        f" --output={tensor_para_size}-gpu --tensor-para-size={tensor_para_size}"
    )
    if config.tensor_para_size not in (None, tensor_para_size):
        written = f"the shards in {directory} were written for {config.tensor_para_size}"
        raise WeightsError(f"tensor_para_size = {tensor_para_size}, but {written}; {way_out}")
    for stack in (config, config.encoder):
        if stack and any(n % tensor_para_size for n in (stack.head_num, stack.kv_heads, stack.inter_size)):
            can_be_copied = tensor_para_size % stack.kv_heads == stack.head_num % tensor_para_size == 0
            grouped = f", kv_head_num = {stack.kv_head_num}" if stack.kv_head_num else ""
            raise WeightsError(
                f"tensor_para_size = {tensor_para_size} does not divide head_num = {stack.head_num}{grouped}"
                f" and inter_size = {stack.inter_size}"
                + (f"; each rank can have a copy of a key head: {way_out}" if can_be_copied else "")
            )


class Reader:
    """Reads tensors of one checkpoint onto a device: one rank's shards, or all of them concatenated (rank None).

    Attributes:
        head_type: number format of the head; a CPU multiplies it in fp32 (see precision.py).
        size_bytes: of what was read, as it is stored.
        saved_bytes: how much larger that would be without int8.
        largest_bytes: of the largest tensor.
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
        self._tensors = config.tensors
        self.head_type = torch.float32 if is_cpu else precision.compute
        self.size_bytes = self.saved_bytes = self.largest_bytes = 0
        self._buffers: dict[torch.dtype, Tensor] = {}

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
            shard = self._shards(file, shape)
            if self._precision.rounded not in (shard.dtype, target.dtype):
                shard = self._scratch(shape, self._precision.rounded).copy_(shard)
            for whole, part in zip(wholes, torch.split(shard, shares, axis or 0), strict=True):
                whole.chunk(len(files), axis or 0)[rank].copy_(part)

    def _scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Give memory that is valid until the next tensor is read.

        The same memory is reused: the C library's heap would grow to twice the weights if temporary and permanent
        tensors were allocated by turns.
        """
        size = torch.Size(shape).numel()
        if dtype not in self._buffers or self._buffers[dtype].numel() < size:
            self._buffers[dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return self._buffers[dtype][:size].view(shape)

    def _here(self, name: str) -> tuple[int, ...]:
        """Give the shape of this process's part of a tensor."""
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
        """Read the head, or this rank's rows of it; see linear.py. With int8 weights a GPU's is int8 too.

        Args:
            name: None: the head is tied to the table, which a CPU then stores in a second form.
            table: token embedding, [vocab, hidden]; None with a name.
            bias: of the whole vocabulary, or None.
        """
        is_int8 = self._precision.is_int8 and not self._is_cpu
        if name and is_int8:
            matrix: Tensor | None = self._side_by_side([name], first=1)
        else:
            matrix = self.tensor(name, dtype=self.head_type) if name else table
        assert matrix is not None
        shape = matrix.shape
        if self._rank is not None:
            part = vocabulary_part(shape[0], self._rank, self._tensor_para_size)
            rows = slice(part.start, part.stop)
            self.size_bytes -= matrix[len(part) :].nbytes if name and not is_int8 else 0
            matrix, bias = matrix[rows], None if bias is None else bias[rows]
        if is_int8:
            linear, bias_bytes = Int8Linear(matrix, bias), 0 if bias is None else bias.nbytes
            self._count(linear.size_bytes - bias_bytes)
            self.saved_bytes += (matrix.nbytes if name else 0) + bias_bytes - linear.size_bytes
            self.largest_bytes = max(self.largest_bytes, matrix.nbytes)
            return linear
        if self._is_cpu and not name:
            self._count(matrix.nbytes)
        return Linear(matrix, bias, is_lent=name is not None and len(matrix) < shape[0])

    def column_parallel(self, *names: str) -> Linear:
        """Read matrices that are split by their output; the matrices of several names follow each other."""
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in self]
        return self._linear([f"{name}.weight" for name in names], self._side_by_side(biases) if biases else None)

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
        """Read matrices side by side, [in, out] or [in, 3, out] -> [out, in]."""
        matrix = self._side_by_side(names, first=1)  # [in, out]
        kind = Int8Linear if self._precision.is_int8 else Linear
        linear, full_bytes = kind(matrix.T, bias, is_lent=True), matrix.nbytes
        self._count(linear.size_bytes)
        self.saved_bytes += full_bytes + (bias.nbytes if bias is not None else 0) - linear.size_bytes
        self.largest_bytes = max(self.largest_bytes, full_bytes)
        return linear

    def _side_by_side(self, names: Sequence[str], first: int = 0) -> Tensor:
        """Read tensors of one shape: their axes from ``first`` on become one, along which they are concatenated.

        A matrix (first 1) is in memory that the next one reuses.
        """
        here = self._here(names[0])
        target_shape = (*here[:first], len(names) * torch.Size(here[first:]).numel())
        target = self._scratch(target_shape, self._precision.compute) if first else self.empty(target_shape)
        for name, part in zip(names, target.chunk(len(names), first), strict=True):
            self._copy(name, part.view(here))
        return target

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Give memory on the device, of the type that is computed in if no other is named."""
        return torch.empty(shape, dtype=dtype or self._precision.compute, device=self._device)

    def slopes(self, head_num: int) -> Tensor:
        """Give ALiBi's slopes of this rank's heads, fp32."""
        slopes = alibi_slopes(head_num).to(self._device)
        return slopes if self._rank is None else slopes.chunk(self._tensor_para_size)[self._rank]

    def ia3(self, *names: str) -> tuple[Tensor, ...] | None:
        """Read IA3 vectors by task; a last row of ones is for rows without a task (-1). None: the model has none."""
        tables = [self.tensor(f"{name}.ia3.weight") for name in names if f"{name}.ia3.weight" in self]
        return tuple(torch.cat((table, torch.ones_like(table[:1]))) for table in tables) or None
