"""Read FasterTransformer's shards into tensors, or refuse; never serve anything else.

A shard is the raw little-endian content of one tensor's slice, without a header. Layout: FasterTransformer,
``examples/pytorch/gpt/utils/nemo_ckpt_convert.py`` (writer), ``ParallelGptWeight.cc`` and
``ParallelGptDecoderLayerWeight.cc`` (reader). Matrices are stored [in, out]; the fused QKV is [in, 3, local out].
FasterTransformer only warns where a file is missing or short and serves uninitialised memory; here that is an error
which names every such file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .config import GptConfig
from .errors import WeightsError
from .linear import Linear
from .precision import TORCH_TYPES, Precision

HEAD_FILE = "model.lm_head.weight.bin"


@dataclass(frozen=True)
class ShardedTensor:
    """One tensor of the checkpoint.

    Attributes:
        name: file name up to ``.{rank}.bin`` or ``.bin``.
        shape: of the full tensor.
        split_axis: axis along which the ranks cut it; None where it is written once.
    """

    name: str
    shape: tuple[int, ...]
    split_axis: int | None = None

    def local_shape(self, tensor_para_size: int) -> tuple[int, ...]:
        """Shape of one rank's shard."""
        return tuple(
            size // tensor_para_size if axis == self.split_axis else size for axis, size in enumerate(self.shape)
        )

    def files(self, tensor_para_size: int) -> tuple[str, ...]:
        """File names, by rank."""
        if self.split_axis is None:
            return (f"{self.name}.bin",)
        return tuple(f"{self.name}.{rank}.bin" for rank in range(tensor_para_size))


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer.

    Attributes:
        input_norm, post_norm: (weight, bias), each [hidden].
        qkv: hidden -> 3 * heads * head_size: all q, then all k, then all v.
        attention_out: heads * head_size -> hidden.
        mlp_in: hidden -> inter.
        mlp_out: inter -> hidden.
    """

    input_norm: tuple[Tensor, Tensor]
    qkv: Linear
    attention_out: Linear
    post_norm: tuple[Tensor, Tensor]
    mlp_in: Linear
    mlp_out: Linear


@dataclass(frozen=True)
class GptWeights:
    """The tensors of a GPT that this process holds; see Share.

    Attributes:
        token_embedding: [vocab, hidden]; without rows where this process does not embed.
        position_embedding: [max_pos_seq_len, hidden]; without rows where this process does not embed.
        layers: this process's.
        final_norm: (weight, bias), each [hidden].
        head: hidden -> vocab; token_embedding's matrix where the checkpoint has no lm_head. None where this process
            does not predict.
    """

    token_embedding: Tensor
    position_embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: tuple[Tensor, Tensor]
    head: Linear | None


@dataclass(frozen=True)
class Share:
    """Which part of the network a process holds.

    Attributes:
        layers: indices.
        rank: whose shard of each split tensor; None: all shards, joined.
        embeds: whether it has the embeddings.
        predicts: whether it has the head.
    """

    layers: range
    rank: int | None = None
    embeds: bool = True
    predicts: bool = True


def checkpoint_tensors(config: GptConfig, has_head: bool) -> Iterator[ShardedTensor]:
    """List every tensor that config.ini calls for.

    Args:
        config: dimensions.
        has_head: whether the checkpoint has its own ``model.lm_head.weight.bin`` (untied).
    """
    hidden, inter = config.hidden_units, config.inter_size
    yield ShardedTensor("model.wte", (config.vocab_size, hidden))
    yield ShardedTensor("model.wpe", (config.max_pos_seq_len, hidden))
    if has_head:
        yield ShardedTensor(HEAD_FILE.removesuffix(".bin"), (config.vocab_size, hidden))
    for index in range(config.num_layer):
        layer = f"model.layers.{index}"
        yield from _norm(f"{layer}.input_layernorm", hidden)
        yield ShardedTensor(f"{layer}.attention.query_key_value.weight", (hidden, 3, hidden), split_axis=2)
        yield ShardedTensor(f"{layer}.attention.query_key_value.bias", (3, hidden), split_axis=1)
        yield ShardedTensor(f"{layer}.attention.dense.weight", (hidden, hidden), split_axis=0)
        yield ShardedTensor(f"{layer}.attention.dense.bias", (hidden,))
        yield from _norm(f"{layer}.post_attention_layernorm", hidden)
        yield ShardedTensor(f"{layer}.mlp.dense_h_to_4h.weight", (hidden, inter), split_axis=1)
        yield ShardedTensor(f"{layer}.mlp.dense_h_to_4h.bias", (inter,), split_axis=0)
        yield ShardedTensor(f"{layer}.mlp.dense_4h_to_h.weight", (inter, hidden), split_axis=0)
        yield ShardedTensor(f"{layer}.mlp.dense_4h_to_h.bias", (hidden,))
    yield from _norm("model.final_layernorm", hidden)


def _norm(name: str, hidden: int) -> Iterator[ShardedTensor]:
    yield ShardedTensor(f"{name}.weight", (hidden,))
    yield ShardedTensor(f"{name}.bias", (hidden,))


def check_shards(directory: Path, config: GptConfig, tensor_para_size: int) -> dict[str, ShardedTensor]:
    """Compare the directory with what config.ini calls for, by name and size.

    Returns:
        The tensors by name.

    Raises:
        WeightsError: names every shard that is missing or has another size, or a tensor_para_size that does not fit.
    """
    if config.tensor_para_size not in (None, tensor_para_size):
        raise WeightsError(
            f"tensor_para_size = {tensor_para_size}, but the shards in {directory} were written for"
            f" {config.tensor_para_size}"
        )
    if config.head_num % tensor_para_size or config.inter_size % tensor_para_size:
        raise WeightsError(
            f"tensor_para_size = {tensor_para_size} does not divide head_num = {config.head_num}"
            f" and inter_size = {config.inter_size}"
        )
    tensors = {tensor.name: tensor for tensor in checkpoint_tensors(config, (directory / HEAD_FILE).exists())}
    item_bytes = TORCH_TYPES[config.weight_data_type].itemsize
    problems = [
        problem
        for tensor in tensors.values()
        for file in tensor.files(tensor_para_size)
        if (problem := _problem(directory / file, tensor.local_shape(tensor_para_size), item_bytes))
    ]
    if problems:
        noun = "shard is" if len(problems) == 1 else "shards are"
        raise WeightsError(f"{len(problems)} {noun} unusable in {directory}:\n  " + "\n  ".join(problems))
    return tensors


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
    config: GptConfig,
    tensor_para_size: int,
    precision: Precision,
    device: torch.device,
    share: Share | None = None,
) -> GptWeights:
    """Read shards, one tensor at a time.

    Args:
        directory: holds the shards, ``<T>-gpu``.
        config: its config.ini.
        tensor_para_size: ranks that the shards were written for.
        precision: number formats.
        device: where the tensors go.
        share: None for the whole network: any number of shards, joined in this one process.

    Raises:
        WeightsError: see check_shards; every rank looks at all files.
    """
    share = share or Share(range(config.num_layer))
    reader = _Reader(directory, config, tensor_para_size, precision, device, share.rank)
    # A CPU multiplies the head in fp32 (see precision.py).
    head_type = torch.float32 if device.type == "cpu" else precision.compute
    nothing = torch.zeros(0, config.hidden_units, dtype=precision.compute, device=device)
    token_embedding = reader.matrix("model.wte", head_type) if share.embeds else nothing
    head = None
    if share.predicts:
        name = HEAD_FILE.removesuffix(".bin")
        head = Linear(reader.matrix(name, head_type) if name in reader.tensors else token_embedding)
    return GptWeights(
        token_embedding=token_embedding,
        position_embedding=reader.matrix("model.wpe", precision.compute) if share.embeds else nothing,
        layers=tuple(reader.layer(index) for index in share.layers),
        final_norm=reader.norm("model.final_layernorm"),
        head=head,
    )


class _Reader:
    """Reads tensors of one checkpoint onto a device: one rank's shards, or all of them joined (rank None)."""

    def __init__(
        self,
        directory: Path,
        config: GptConfig,
        tensor_para_size: int,
        precision: Precision,
        device: torch.device,
        rank: int | None,
    ) -> None:
        self.tensors = check_shards(directory, config, tensor_para_size)
        self._directory, self._tensor_para_size, self._rank = directory, tensor_para_size, rank
        self._source_type = TORCH_TYPES[config.weight_data_type]
        self._precision, self._device = precision, device

    def _read(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        shape = tensor.local_shape(self._tensor_para_size)
        files = tensor.files(self._tensor_para_size)
        if self._rank is not None and tensor.split_axis is not None:
            files = files[self._rank : self._rank + 1]
        size = torch.Size(shape).numel()
        shards = [torch.from_file(str(self._directory / file), size=size, dtype=self._source_type) for file in files]
        views = [shard.view(shape) for shard in shards]
        return torch.cat(views, dim=tensor.split_axis or 0)  # a copy: the file may change under a running server

    def _place(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(self._precision.rounded).to(device=self._device, dtype=dtype).contiguous()

    def matrix(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._place(self._read(name), dtype)

    def _vector(self, name: str) -> Tensor:
        return self._place(self._read(name).reshape(-1), self._precision.compute)

    def _linear(self, name: str) -> Linear:
        weight = self._read(f"{name}.weight")  # [in, out] or [in, 3, out]
        is_part_of_a_sum = self.tensors[f"{name}.weight"].split_axis == 0 and self._rank not in (None, 0)
        bias = None if is_part_of_a_sum else self._vector(f"{name}.bias")  # it is added once
        return Linear(self._place(weight.reshape(weight.shape[0], -1).T, self._precision.compute), bias)

    def norm(self, name: str) -> tuple[Tensor, Tensor]:
        return self._vector(f"{name}.weight"), self._vector(f"{name}.bias")

    def layer(self, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        return LayerWeights(
            input_norm=self.norm(f"{prefix}.input_layernorm"),
            qkv=self._linear(f"{prefix}.attention.query_key_value"),
            attention_out=self._linear(f"{prefix}.attention.dense"),
            post_norm=self.norm(f"{prefix}.post_attention_layernorm"),
            mlp_in=self._linear(f"{prefix}.mlp.dense_h_to_4h"),
            mlp_out=self._linear(f"{prefix}.mlp.dense_4h_to_h"),
        )
