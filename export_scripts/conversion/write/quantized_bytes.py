"""Bytes of quantized tensors: some rows at a time are read, checked as those of any tensor, and quantized."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from export_scripts.conversion.move.assembly import Assembly
from export_scripts.conversion.write.journal import QuantizationRecord
from export_scripts.conversion.write.safetensors_layout import Rows
from export_scripts.conversion.write.shards import ShardSettings, Workspace, blocks, nonfinite_error
from export_scripts.quantization.record import Quantization
from export_scripts.tensors.dtypes import Array, is_finite


def quantized_contents(
    rows: Rows, box: Assembly, quantization: Quantization, settings: ShardSettings, workspace: Workspace
) -> Generator[memoryview, None, QuantizationRecord]:
    """Yield the quantized numbers of some rows, then their scales, then what is there once for a tensor.

    Args:
        rows: of which tensor.
        box: what they are put together from.
        quantization: what they become.
        settings: the data type that is quantized.
        workspace: of this process.

    Returns:
        What it has cost.

    Raises:
        CheckpointError: a value is NaN, infinite or too large for the data type, or the source cannot be read.
    """
    tensor, kept = rows.tensor, list[list[memoryview]]()
    squared_errors, squares = [], []
    count = max(1, box.shape[0])
    for _, values in blocks(box, count, tensor.name, settings, workspace, tensor.together, is_checked=False):
        with np.errstate(all="ignore"):
            encoded = quantization.encode(values.reshape(-1, *tensor.shape[1:]), settings.data_type)
        # One number that is not finite spoils its row's sum, which costs less to look at than all numbers.
        if not np.isfinite(encoded.squares).all() and not is_finite(values, settings.data_type):
            raise nonfinite_error(box, max(1, len(values)), tensor.name, settings, workspace)
        numbers, *scales = (np.ascontiguousarray(each).reshape(-1).view(np.uint8).data for each in encoded.contents)
        yield numbers
        kept.append(scales)
        squared_errors.append(encoded.squared_errors)
        squares.append(encoded.squares)
    for scales_of_all in zip(*kept, strict=True):
        yield from scales_of_all
    if not rows.start:
        yield from (memoryview(output.content) for output in tensor.outputs(settings.data_type) if output.content)
    return _summed_up(rows, np.concatenate(squared_errors), np.concatenate(squares))


def _summed_up(rows: Rows, squared_errors: Array, squares: Array) -> QuantizationRecord:
    first = len(squares) // (rows.stop - rows.start) * rows.start
    ratios = np.sqrt(np.divide(squared_errors, squares, out=np.zeros_like(squares), where=squares > 0))
    worst = int(ratios.argmax())
    sums = float(squared_errors.sum()), float(squares.sum())
    return QuantizationRecord(rows.tensor.name, first, *sums, first + worst, float(ratios[worst]))
