"""Read FasterTransformer's shards, or the tensors of a Hugging Face directory, or refuse them.

A shard is the raw little-endian content of one tensor's slice, without a header; ft_format says which files there are.
FasterTransformer only warns where a file is missing or short and serves uninitialised memory; here that is an error
which names every such file. A directory of Hugging Face's has whole tensors, of which each rank reads its slices.

The family's table in ft_format, or models, lists the tensors, with their shapes and the axes that ranks split.
``read_model`` and the family's Layout say once which tensors a network reads; a Reader checks the files, counts the
memory, or loads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ft_format.weight_format import INT8, KEY
from models.described import (
    find_model_tensors,
    fp8_blocks,
    has_static_inputs,
    is_mxfp4,
    made_up_places,
    quantized_kind,
)
from models.engine_limits import experts_problem, fp8_problem, groups_problem, int8_problem, ranks_problem
from models.fp8 import with_made_scales
from models.fused import places_of_parts

from ..cache.sizing import free_bytes
from ..errors import WeightsError
from ..parallel.partition import Partition
from .config import ModelConfig
from .hub_experts import ExpertsReader
from .layouts import ModelWeights
from .precision import Precision
from .reader import Reader
from .shards import Order, made_up, mapped, planned, problems_of
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
    """Read weights, one tensor at a time, if they are complete and the device has memory for all of them.

    Args:
        directory: of the shards, ``<T>-gpu``, or of Hugging Face's.
        config: of the whole model.
        tensor_para_size: ranks that the shards were written for; any number for Hugging Face's.
        precision: number formats.
        device: of the tensors.
        partition: None for the whole network: any number of shards, concatenated in this process.
        sharers: processes that load an equal part into the same memory at the same time.
        are_made_up: whether the weights are random and no shard is read: to measure a model without a checkpoint.

    Raises:
        WeightsError: shards of any rank, or tensors, are missing or have another size (all are named),
            tensor_para_size does not fit, or the device has too little memory.
    """
    partition, is_cpu = partition or Partition(range(config.num_layer)), device.type == "cpu"
    if config.has_expert_parallel and (problem := experts_problem(config.decoder, tensor_para_size)):
        raise WeightsError(f"{directory}: {problem}")
    if not config.decoder:
        _check_ranks(directory, config, tensor_para_size)
    elif partition.rank is not None and (problem := _ranks_problem(directory, config, tensor_para_size)):
        raise WeightsError(f"{directory}: {problem}")
    is_staged = not (is_cpu or are_made_up)
    with StagedFiles(directory, device) if is_staged else nullcontext() as staged:
        kind, has_head = _kind_of_reader(directory, config, are_made_up, precision)
        # On a CPU to multiply FP8 for every product takes several times as long: where the products fit, they are made
        # once.
        for keeps_fp8 in (False, True) if is_cpu else (True,):
            make = partial(kind, config, tensor_para_size, replace(precision, keeps_fp8=keeps_fp8))
            on_meta = partial(make, torch.device("meta"), is_cpu)
            plan, order = _planned(on_meta, config, partition, has_head)
            need_bytes = plan.size_bytes + 2 * plan.largest_bytes + AHEAD_BYTES * is_staged
            if need_bytes <= free_bytes(device) // sharers:
                break
        if not (are_made_up or config.decoder):
            _check_shards(directory, _planned(on_meta, config, Partition(range(config.num_layer)), has_head)[1])
        _check_room(directory, precision, need_bytes, device, sharers)
        if staged:
            # Allocate everything once: torch caches and divides it, where the driver is slow for each tensor's memory.
            with suppress(torch.OutOfMemoryError):  # there may be no such contiguous piece
                torch.empty(need_bytes, dtype=torch.uint8, device=device)
            shards = staged.in_order(order)
        else:
            shards = made_up(precision.compute, device) if are_made_up else mapped(directory)
        return read_model(make(device, is_cpu, partition.rank, shards), config, partition, has_head)


def _ranks_problem(directory: Path, config: ModelConfig, ranks: int) -> str:
    """Return why ranks cannot share the layers of a directory; empty: they can."""
    assert config.decoder, "config.json was not read"
    has_slices = not config.has_expert_parallel and is_mxfp4(directory, WeightsError)
    return ranks_problem(config.decoder, ranks) or (groups_problem(config.decoder, ranks) if has_slices else "")


def _kind_of_reader(
    directory: Path, config: ModelConfig, are_made_up: bool, precision: Precision
) -> tuple[Callable[..., Reader], bool]:
    """Return what makes the checkpoint's reader, and whether the head is there; a tied one may lack it.

    Raises:
        WeightsError: tensors of a Hugging Face directory are missing, or not the model's, or have another format.
    """
    decoder, form = config.decoder, precision.quantization
    are_fp8 = bool(decoder and fp8_blocks(directory, WeightsError))
    if precision.rounds_activations and not (are_fp8 or form):
        raise WeightsError(f"{directory}: fp8_activations = 1, and no matrix is FP8")
    if precision.rounds_activations and has_static_inputs(directory, WeightsError):
        raise WeightsError(f"{directory}: fp8_activations = 1, and the files have scales by which these are rounded")
    problem = fp8_problem(decoder, are_fp8) if form else ""
    if decoder and precision.weights:
        problem = problem or int8_problem(quantized_kind(directory, WeightsError))
    if problem:
        raise WeightsError(f"{directory}: {problem}")
    if not decoder:
        return Reader, not are_made_up and (directory / f"{config.head}.bin").exists()
    if are_made_up:
        places = made_up_places(directory, decoder, config.weight_data_type, WeightsError)
    else:
        places = find_model_tensors(directory, decoder, WeightsError, config.is_part)
    has_head = not are_made_up and config.head in places
    return partial(
        ExpertsReader, places_of_parts(decoder, with_made_scales(places, form) if form else places)
    ), has_head


def _planned(
    make: Callable[..., Reader], config: ModelConfig, partition: Partition, has_head: bool
) -> tuple[Reader, Order]:
    """Read a partition on torch's meta device: what loads also counts the memory, and lists the pieces of the files."""
    order: Order = []
    reader = make(partition.rank, planned(order))
    read_model(reader, config, partition, has_head)
    return reader, order


def _check_shards(directory: Path, order: Order) -> None:
    """Raise a WeightsError if shards of any rank are missing or have another size."""
    if problems := problems_of(directory, order):
        noun = "shard is" if len(problems) == 1 else "shards are"
        raise WeightsError(f"{len(problems)} {noun} unusable in {directory}:\n  " + "\n  ".join(problems))


def _check_room(directory: Path, precision: Precision, need_bytes: int, device: torch.device, sharers: int) -> None:
    have_bytes = free_bytes(device) // sharers
    if need_bytes > have_bytes:
        each = f" for each of {sharers} processes" if sharers > 1 else ""
        raise WeightsError(
            f"{directory} does not fit: loading it as {precision.note} takes {need_bytes / 1e9:.3g} GB and {device} has"
            f" {have_bytes / 1e9:.3g} GB free{each}; serve it with {KEY} {INT8.mode}, as fp16 or bf16, or over more"
            " processes (tensor_para_size, pipeline_para_size)"
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


def read_model(read: Reader, config: ModelConfig, partition: Partition, has_head: bool) -> ModelWeights:
    """Read a process's part of a checkpoint.

    Args:
        read: gives the tensors.
        config: of the whole model.
        partition: which part.
        has_head: whether there is a file for the head; a family without tied heads must have it.
    """
    layout = config.layout
    assert layout, "config.ini was not read"
    predicts = partition.predicts and config.has_decoder
    has_head = bool(config.head) and (has_head or not config.has_tied_head)
    table, positions, norm, head = None, None, None, None
    if partition.embeds or (predicts and not has_head):
        table = read.tensor(layout.embedding, dtype=read.head_type)
    if predicts:
        bias = read.tensor(layout.head_bias, dtype=read.head_type) if layout.head_bias in read else None
        head = read.head(config.head if has_head else None, table, bias)
    if partition.embeds:
        positions = read.tensor(layout.positions) if layout.positions in read else None
        norm = read.norm(layout.embedding_norm, config)
    embedding = table if partition.embeds and table is not None else read.empty((0, config.hidden_units))
    encoder = decoder = None
    if layout.encoder and config.encoder:
        indices = partition.encoder_layers
        encoder = layout.encoder(read, config, range(config.encoder.num_layer) if indices is None else indices)
    if config.has_decoder:
        decoder = layout.decoder(read, config, partition.layers)
    return ModelWeights(
        embedding,
        positions,
        norm,
        encoder,
        decoder,
        head,
        like=read.empty((0, 0)),
        size_bytes=read.size_bytes,
        saved_bytes=read.saved_bytes,
        matrices=read.matrices,
    )
