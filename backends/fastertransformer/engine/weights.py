"""Read FasterTransformer's shards into tensors, or refuse; never serve anything else.

A shard is the raw little-endian content of one tensor's slice, without a header; layouts.py says which there are. They
are mapped, not read: each becomes a tensor of its own on the device, one after another. FasterTransformer only warns
where a file is missing or short and serves uninitialised memory; here that is an error which names every such file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .cache import free_bytes
from .config import ModelConfig, Stack
from .errors import WeightsError
from .layouts import (
    CrossFiles,
    LayerFiles,
    LinearFiles,
    ModelFiles,
    NormFiles,
    ShardedTensor,
    StackFiles,
    every_tensor,
    head_name,
    model_files,
)
from .linear import Int8Linear, Linear
from .precision import TORCH_TYPES, Precision
from .shards import Shards, made_up, mapped, planned


class Norm(NamedTuple):
    """Weight and bias, each [hidden]; no bias where it is a root mean square only."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class CrossWeights:
    """A decoder layer's attention to the encoder's output.

    Attributes:
        norm: of the residual stream before it.
        query: hidden -> heads * head_size.
        key_value: encoder's hidden -> 2 * heads * head_size: all k, then all v.
        out: heads * head_size -> hidden.
        ia3: what k and v are multiplied with, [tasks, heads * head_size] each.
    """

    norm: Norm
    query: Linear
    key_value: Linear
    out: Linear
    ia3: tuple[Tensor, ...] | None


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer.

    Attributes:
        input_norm: before attention, or behind it where norms follow.
        qkv: hidden -> 3 * heads * head_size: all q, then all k, then all v.
        attention_out: heads * head_size -> hidden.
        post_norm: likewise of the MLP; None where it works on attention's input.
        mlp_in: hidden -> inter.
        mlp_gate: likewise; multiplied in.
        mlp_out: inter -> hidden.
        cross: where there is an encoder.
        ia3: what k, v and the MLP's inner layer are multiplied with, [tasks, ...] each.
    """

    input_norm: Norm
    qkv: Linear
    attention_out: Linear
    post_norm: Norm | None
    mlp_in: Linear
    mlp_gate: Linear | None
    mlp_out: Linear
    cross: CrossWeights | None = None
    ia3: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class StackWeights:
    """This process's layers of a stack.

    Attributes:
        layers: those.
        final_norm: behind the last one.
        position_bias: by head: ALiBi's slopes [heads], or the bias by bucket [heads, buckets]; None otherwise.
    """

    layers: tuple[LayerWeights, ...]
    final_norm: Norm | None
    position_bias: Tensor | None


@dataclass(frozen=True)
class ModelWeights:
    """The tensors of a model that this process holds; see Share.

    Attributes:
        token_embedding: [vocab, hidden]; without rows where this process does not embed.
        position_embedding: [max_pos_seq_len, hidden]; None where there is none or this process does not embed.
        embedding_norm: behind the sum of the two.
        encoder, decoder: stacks; a GPT has the latter only, a T5 encoder alone the former only.
        head: hidden -> vocab; token_embedding's matrix where the checkpoint has no head. None where this process does
            not predict.
        like: an empty tensor on the device, in the format that is multiplied.
        size_bytes: of all of it.
        saved_bytes: how much more that would be without int8.
    """

    token_embedding: Tensor
    position_embedding: Tensor | None
    embedding_norm: Norm | None
    encoder: StackWeights | None
    decoder: StackWeights | None
    head: Linear | None
    like: Tensor
    size_bytes: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True)
class Share:
    """Which part of the network a process holds.

    Attributes:
        layers: indices; of the decoder where there is an encoder too.
        rank: whose shard of each split tensor; None: all shards, joined.
        embeds: whether it has the embeddings.
        predicts: whether it has the head.
        encoder_layers: of the encoder; None: all.
    """

    layers: range
    rank: int | None = None
    embeds: bool = True
    predicts: bool = True
    encoder_layers: range | None = None


def check_shards(directory: Path, config: ModelConfig, tensor_para_size: int) -> ModelFiles:
    """Compare the directory with what config.ini calls for, by name and size.

    Returns:
        The checkpoint's files.

    Raises:
        WeightsError: names every shard that is missing or has another size, or a tensor_para_size that does not fit.
    """
    if config.tensor_para_size not in (None, tensor_para_size):
        raise WeightsError(
            f"tensor_para_size = {tensor_para_size}, but the shards in {directory} were written for"
            f" {config.tensor_para_size}"
        )
    for stack in (config, config.encoder):
        if stack and (stack.head_num % tensor_para_size or stack.inter_size % tensor_para_size):
            raise WeightsError(
                f"tensor_para_size = {tensor_para_size} does not divide head_num = {stack.head_num}"
                f" and inter_size = {stack.inter_size}"
            )
    needs_head = config.family in ("gptj", "gptneox")
    files = model_files(config, needs_head or (directory / f"{head_name(config)}.bin").exists())
    item_bytes = TORCH_TYPES[config.weight_data_type].itemsize
    problems = [
        problem
        for tensor in every_tensor(files)
        for file in tensor.files(tensor_para_size)
        if (problem := _problem(directory / file, tensor.local_shape(tensor_para_size), item_bytes))
    ]
    if problems:
        noun = "shard is" if len(problems) == 1 else "shards are"
        raise WeightsError(f"{len(problems)} {noun} unusable in {directory}:\n  " + "\n  ".join(problems))
    return files


def _problem(path: Path, shape: tuple[int, ...], item_bytes: int) -> str:
    expected_bytes = torch.Size(shape).numel() * item_bytes
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"
    if size_bytes != expected_bytes:
        return f"{path.name}: {size_bytes} bytes, expected {expected_bytes} for {list(shape)}"
    return ""


def load_weights(
    directory: Path,
    config: ModelConfig,
    tensor_para_size: int,
    precision: Precision,
    device: torch.device,
    share: Share | None = None,
    sharers: int = 1,
    are_made_up: bool = False,
) -> ModelWeights:
    """Read shards, one tensor at a time, if there is room for all of them.

    Args:
        directory: holds the shards, ``<T>-gpu``.
        config: its config.ini.
        tensor_para_size: ranks that the shards were written for.
        precision: number formats.
        device: where the tensors go.
        share: None for the whole network: any number of shards, joined in this one process.
        sharers: processes that load an equal part into the same memory at the same time.
        are_made_up: whether the numbers are random instead: to measure a model whose shards nobody has.

    Raises:
        WeightsError: see check_shards; every rank looks at all files. Or the device has not the memory.
    """
    share = share or Share(range(config.num_layer))
    files = model_files(config, False) if are_made_up else check_shards(directory, config, tensor_para_size)
    source_type = TORCH_TYPES[config.weight_data_type]
    # What is read onto torch's meta device has shapes and no content: the same code tells how much memory it takes.
    plan = _Reader(
        planned(source_type), tensor_para_size, precision, torch.device("meta"), share.rank, device.type == "cpu"
    )
    need_bytes = _load(plan, files, config, share).size_bytes + 2 * plan.largest_bytes
    have_bytes = free_bytes(device) // sharers
    if need_bytes > have_bytes:
        each = f" for each of {sharers} processes" if sharers > 1 else ""
        raise WeightsError(
            f"{directory} does not fit: loading it as {precision.note} takes {need_bytes / 1e9:.3g} GB and {device} has"
            f" {have_bytes / 1e9:.3g} GB free{each}; serve it with int8_mode 1, as fp16 or bf16, or over more processes"
            " (tensor_para_size, pipeline_para_size)"
        )
    shards = made_up(precision.compute, device) if are_made_up else mapped(directory, source_type)
    reader = _Reader(shards, tensor_para_size, precision, device, share.rank, device.type == "cpu")
    return _load(reader, files, config, share)


def _load(reader: _Reader, files: ModelFiles, config: ModelConfig, share: Share) -> ModelWeights:
    predicts = share.predicts and files.decoder is not None
    table = None
    if share.embeds or (predicts and not files.head):
        table = reader.tensor(files.token_embedding, reader.head_type)
    head = reader.head(files.head, table, files.head_bias) if predicts else None
    has_positions = share.embeds and files.position_embedding is not None
    weights = ModelWeights(
        token_embedding=table if share.embeds and table is not None else reader.nothing(config.hidden_units),
        position_embedding=reader.optional(files.position_embedding) if has_positions else None,
        embedding_norm=reader.norm(files.embedding_norm) if share.embeds and files.embedding_norm else None,
        encoder=reader.stack(files.encoder, config.encoder, share.encoder_layers),
        decoder=reader.stack(files.decoder, config, share.layers),
        head=head,
        like=reader.nothing(0),
    )
    return replace(weights, size_bytes=reader.size_bytes, saved_bytes=reader.saved_bytes)


class _Reader:
    """Reads tensors of one checkpoint onto a device: one rank's shards, or all of them joined (rank None).

    Attributes:
        head_type: number format of the head; a CPU multiplies it in fp32 (see precision.py).
        size_bytes: of what was read, as it is kept.
        saved_bytes: by int8.
        largest_bytes: of the largest tensor.
    """

    def __init__(
        self,
        shards: Shards,
        tensor_para_size: int,
        precision: Precision,
        device: torch.device,
        rank: int | None,
        is_cpu: bool,
    ) -> None:
        self._shards, self._tensor_para_size, self._rank = shards, tensor_para_size, rank
        self._precision, self._device, self._is_cpu = precision, device, is_cpu
        self.head_type = torch.float32 if is_cpu else precision.compute
        self.size_bytes = self.saved_bytes = self.largest_bytes = 0
        self._buffers: dict[torch.dtype, Tensor] = {}

    def _copy(self, tensor: ShardedTensor, target: Tensor) -> None:
        """Copy this rank's shard of a tensor, or all ranks' side by side, into one of their shape together."""
        shape = tensor.local_shape(self._tensor_para_size)
        files = tensor.files(self._tensor_para_size)
        if self._rank is not None and tensor.split_axis is not None:
            files = files[self._rank : self._rank + 1]
        places = target.chunk(len(files), dim=tensor.split_axis or 0)
        for file, place in zip(files, places, strict=True):
            shard = self._shards(file, shape)
            if self._precision.rounded not in (shard.dtype, place.dtype):
                shard = self._scratch(shape, self._precision.rounded).copy_(shard)
            place.copy_(shard)

    def _scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Give memory for the time until the next tensor is read.

        It is the same memory each time: the C library's heap would grow to twice the weights if tensors that go and
        tensors that stay were allocated by turns.
        """
        size = torch.Size(shape).numel()
        if dtype not in self._buffers or self._buffers[dtype].numel() < size:
            self._buffers[dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return self._buffers[dtype][:size].view(shape)

    def _shape(self, tensor: ShardedTensor) -> tuple[int, ...]:
        """Shape of what is read of a tensor here."""
        return tensor.shape if self._rank is None else tensor.local_shape(self._tensor_para_size)

    def _count(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self.largest_bytes = max(self.largest_bytes, size_bytes)

    def tensor(self, tensor: ShardedTensor, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor as it is: a copy of our own, for the file may change under a running server."""
        target = torch.empty(self._shape(tensor), dtype=dtype or self._precision.compute, device=self._device)
        self._copy(tensor, target)
        self._count(target.numel() * target.dtype.itemsize)
        return target

    def optional(self, tensor: ShardedTensor | None) -> Tensor | None:
        """Read a tensor, where there is one."""
        return self.tensor(tensor) if tensor else None

    def nothing(self, width: int) -> Tensor:
        """Give a table without rows."""
        return torch.zeros(0, width, dtype=self._precision.compute, device=self._device)

    def norm(self, files: NormFiles) -> Norm:
        """Read a norm."""
        return Norm(self.tensor(files.weight), self.optional(files.bias))

    def head(self, files: ShardedTensor | None, table: Tensor | None, bias: ShardedTensor | None) -> Linear:
        """Read the head; None: it has the table's matrix, of which a CPU keeps a second form (see linear.py)."""
        matrix = self.tensor(files, self.head_type) if files else table
        assert matrix is not None
        if self._is_cpu and not files:
            self._count(matrix.numel() * matrix.dtype.itemsize)
        return Linear(matrix, self.tensor(bias, self.head_type) if bias else None)

    def linear(self, files: LinearFiles) -> Linear:
        """Read matrices side by side, [in, out] or [in, 3, out] -> [out, in], and their biases."""
        shapes = [self._shape(weight) for weight in files.weights]
        widths = [torch.Size(shape[1:]).numel() for shape in shapes]
        matrix = self._scratch((shapes[0][0], sum(widths)), self._precision.compute)  # [in, out]
        parts = matrix.split(widths, dim=1)  # type: ignore[no-untyped-call]
        for weight, shape, part in zip(files.weights, shapes, parts, strict=True):
            self._copy(weight, part.unflatten(1, shape[1:]))
        kind = Int8Linear if self._precision.is_int8 else Linear
        bias, full_bytes = self._bias(files), matrix.numel() * matrix.dtype.itemsize
        linear = kind(matrix.T, bias, is_lent=True)
        self._count(linear.size_bytes)
        self.saved_bytes += full_bytes + (bias.numel() * bias.dtype.itemsize if bias is not None else 0)
        self.saved_bytes -= linear.size_bytes
        self.largest_bytes = max(self.largest_bytes, full_bytes)
        return linear

    def _bias(self, files: LinearFiles) -> Tensor | None:
        is_part_of_a_sum = files.weights[0].split_axis == 0 and self._rank not in (None, 0) and not files.is_sum
        if not files.biases or is_part_of_a_sum:  # it is added once
            return None
        shapes = [self._shape(bias) for bias in files.biases]
        widths = [torch.Size(shape).numel() for shape in shapes]
        joined = torch.empty(sum(widths), dtype=self._precision.compute, device=self._device)
        parts = joined.split(widths)  # type: ignore[no-untyped-call]
        for bias, shape, part in zip(files.biases, shapes, parts, strict=True):
            self._copy(bias, part.view(shape))
        return joined * self._tensor_para_size if files.is_sum and self._rank is None else joined

    def stack(self, files: StackFiles | None, stack: Stack | None, layers: range | None) -> StackWeights | None:
        """Read some layers of a stack; None: all."""
        if files is None or stack is None:
            return None
        chosen = files.layers if layers is None else files.layers[layers.start : layers.stop]
        position_bias = self.optional(files.relative_bias)
        if stack.positions == "alibi":
            position_bias = self._slopes(stack.head_num)
        final_norm = self.norm(files.final_norm) if files.final_norm else None
        return StackWeights(tuple(self._layer(layer) for layer in chosen), final_norm, position_bias)

    def _slopes(self, head_num: int) -> Tensor:
        """Give ALiBi's slopes of this rank's heads, fp32."""
        slopes = alibi_slopes(head_num).to(self._device)
        return slopes if self._rank is None else slopes.chunk(self._tensor_para_size)[self._rank]

    def _layer(self, files: LayerFiles) -> LayerWeights:
        return LayerWeights(
            input_norm=self.norm(files.input_norm),
            qkv=self.linear(files.qkv),
            attention_out=self.linear(files.attention_out),
            post_norm=self.norm(files.post_norm) if files.post_norm else None,
            mlp_in=self.linear(files.mlp_in),
            mlp_gate=self.linear(files.mlp_gate) if files.mlp_gate else None,
            mlp_out=self.linear(files.mlp_out),
            cross=self._cross(files.cross) if files.cross else None,
            ia3=self._ia3(files.ia3),
        )

    def _ia3(self, files: tuple[ShardedTensor, ...] | None) -> tuple[Tensor, ...] | None:
        """Read vectors by task; a last row of ones is for rows without one (task -1)."""
        tables = map(self.tensor, files or ())
        return tuple(torch.cat((table, torch.ones_like(table[:1]))) for table in tables) or None

    def _cross(self, files: CrossFiles) -> CrossWeights:
        return CrossWeights(
            norm=self.norm(files.norm),
            query=self.linear(files.query),
            key_value=self.linear(files.key_value),
            out=self.linear(files.out),
            ia3=self._ia3(files.ia3),
        )


def alibi_slopes(head_num: int) -> Tensor:
    """Give the slope of each head's penalty on distance, fp32 [head_num].

    A geometric sequence for the largest power of two, then every other term of the next one's ("Train Short, Test
    Long", and FasterTransformer's ``invokeBuildAlibiSlopes``).
    """
    whole = 1 << (head_num.bit_length() - 1)
    first = [2.0 ** (-8.0 * (index + 1) / whole) for index in range(whole)]
    more = [2.0 ** (-4.0 * (2 * index + 1) / whole) for index in range(head_num - whole)]
    return torch.tensor(first + more)
