"""The engine behind two functions: open a checkpoint, answer requests."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from .cache import CacheShape, KvCache, free_bytes
from .config import GptConfig, read_config
from .generate import Generated, generate
from .network import Network
from .parallel import Group, Leader
from .precision import choose_device, choose_precision
from .request import Array, Request, join_requests, parse_request
from .steps import Steps
from .weights import Share, load_weights

_log = logging.getLogger(__name__)


class Engine:
    """A loaded model that answers requests, one call at a time.

    Attributes:
        config: dimensions.
        description: one line for a log: what runs, where and how.
    """

    def __init__(self, steps: Steps, description: str) -> None:
        self._steps = steps
        self.config: GptConfig = steps.config
        self.description = description

    def parse(self, tensors: Mapping[str, Array]) -> Request:
        """Check one request; see request.parse_request."""
        return parse_request(tensors, self.config)

    def generate(self, requests: Sequence[Request], max_rows: int = 1024) -> list[dict[str, Array]]:
        """Answer several requests together.

        Args:
            requests: as parse gave them.
            max_rows: of one batch; requests beyond it wait for the next one. A larger single request runs alone.

        Returns:
            The output tensors of each request, by FasterTransformer's names; see output_tensors.
        """
        answers: list[dict[str, Array]] = []
        for group in _groups(requests, max_rows):
            generated = generate(self._steps, join_requests(group))
            first = 0
            for request in group:
                rows = slice(first, first + request.batch_size)
                answers.append(output_tensors(request, generated, rows))
                first = rows.stop
        return answers

    def close(self) -> None:
        """End the other processes of a group in good order."""
        self._steps.close()


def open_engine(
    directory: Path,
    tensor_para_size: int,
    data_type: str,
    device: torch.device | None = None,
    cpu_threads: int = 0,
    group: Group | None = None,
) -> Engine:
    """Load a checkpoint.

    Args:
        directory: ``<T>-gpu``: shards and config.ini.
        tensor_para_size: ranks that the shards were written for.
        data_type: fp32, fp16 or bf16 at run time.
        device: None for a GPU where there is one, else the CPU.
        cpu_threads: of torch, for the whole process; 0 for one a core that this process may use.
        group: the processes that hold the network together, of which this is the first; None: this one holds it all.

    Raises:
        EngineError: config.ini or shards are not as they must be, or another process of the group was lost; the
            message names them.
    """
    steps, description = load_steps(directory, tensor_para_size, data_type, device, cpu_threads, group)
    if group:
        group.wait_until_loaded()
    return Engine(steps, description)


def load_steps(
    directory: Path,
    tensor_para_size: int,
    data_type: str,
    device: torch.device | None = None,
    cpu_threads: int = 0,
    group: Group | None = None,
) -> tuple[Steps, str]:
    """Load this process's part of a checkpoint, and describe it in one line; see open_engine."""
    local_size = group.ranks.local_size if group else 1
    torch.set_num_threads(cpu_threads or max(1, _available_cores() // local_size))
    device = device or choose_device()
    config = read_config(directory)
    precision = choose_precision(data_type, device)
    start = time.perf_counter()
    share = group.share(config) if group else Share(range(config.num_layer))
    with torch.inference_mode():
        weights = load_weights(directory, config, tensor_para_size, precision, device, share)
    heads = config.head_num // (1 if share.rank is None else tensor_para_size)
    shape = CacheShape(len(share.layers), heads, config.size_per_head, precision.compute)
    cache = KvCache(shape, device, free_bytes(device) // 2)
    what = f"{tensor_para_size} shards" if share.rank is None else f"shard {share.rank} of {tensor_para_size}"
    description = (
        f"GPT {config.num_layer} layers, hidden {config.hidden_units}, vocabulary {config.vocab_size} from {directory}"
        f" ({config.weight_data_type}, {what}) in {time.perf_counter() - start:.1f} s;"
        f" {precision.note}; {torch.get_num_threads()} CPU threads"
    )
    if group:
        description += f"; rank {group.ranks.rank} of {group.ranks.world_size}, layers {share.layers}"
    _log.info(description)
    model = Network(config, weights, group.links(config, precision.compute, device) if group else None)
    return (Leader(model, cache, group) if group and group.ranks.rank == 0 else Steps(model, cache)), description


def _available_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else torch.get_num_threads()


def _groups(requests: Sequence[Request], max_rows: int) -> Iterator[list[Request]]:
    group: list[Request] = []
    for request in requests:
        if group and sum(member.batch_size for member in group) + request.batch_size > max_rows:
            yield group
            group = []
        group.append(request)
    if group:
        yield group


def output_tensors(request: Request, generated: Generated, rows: slice) -> dict[str, Array]:
    """Lay out the answer to one request as FasterTransformer does.

    Returns:
        output_ids: uint32 [B, 1, L + max request_output_len]: each row's input, its tokens right behind it, then its
            end_id.
        sequence_length: uint32 [B, 1]: input and generated tokens, a final end_id included. (FasterTransformer counts
            from the longest input of the batch; here it is the row's own, so it does not depend on other rows.)
        response_input_lengths: int32 [B, 1].
        cum_log_probs: fp32 [B, 1], and output_log_probs: fp32 [B, 1, max request_output_len]: only where a row has
            is_return_log_probs; see generate.Generated.
    """
    longest_output = int(request.output_lengths.max())
    tokens, counts = generated.tokens[rows, :longest_output], generated.counts[rows]
    width = 0 if request.hides_input else request.input_ids.shape[1]
    input_lengths = np.zeros_like(counts) if request.hides_input else request.input_lengths
    output_ids = np.repeat(request.end_id[:, None], width + longest_output, axis=1)
    for row, (length, count) in enumerate(zip(input_lengths, counts, strict=True)):
        output_ids[row, :length] = request.input_ids[row, :length]
        output_ids[row, length : length + count] = tokens[row, :count]
    tensors: dict[str, Array] = {
        "output_ids": output_ids[:, None].astype(np.uint32),
        "sequence_length": (input_lengths + counts)[:, None].astype(np.uint32),
        "response_input_lengths": input_lengths[:, None].astype(np.int32),
    }
    if request.wants_log_probs.any():
        tensors["cum_log_probs"] = generated.cum_log_probs[rows, None]
        tensors["output_log_probs"] = generated.output_log_probs[rows, None, :longest_output]
    return tensors
