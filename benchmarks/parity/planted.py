"""Defects in shards of a GPT, one at a time: what ``benchmarks.parity.limits --defects=planted`` plants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from backends.fastertransformer.engine.model.families import read_config
from benchmarks.parity.damages import change_numbers

_QKV, _DENSE = "attention.query_key_value", "attention.dense"
_UP, _DOWN = "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
_NORM, _SECOND_NORM, _FINAL_NORM = "input_layernorm", "post_attention_layernorm", "model.final_layernorm"
_QUERIES, _KEYS = 0, 1


@dataclass(frozen=True)
class Shards:
    """A copy of a GPT's shards, which is damaged: where one shard is enough, the last rank's.

    Attributes:
        directory: of them.
        layer: whose tensors are damaged, by FasterTransformer's name of it.
        next_layer: the one behind it.
        ranks: that the shards are for, one or two.
        local_heads: heads of a rank.
        hidden: width of the residual stream.
    """

    directory: Path
    layer: str
    next_layer: str
    ranks: int
    local_heads: int
    hidden: int

    def change(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the numbers of each file whose name begins so, [n] in fp32, by what becomes of them."""
        for path in sorted(self.directory.glob(f"{name}*.bin")):
            change_numbers(self.directory, path.name, change)

    def swap(self, first: str, second: str) -> None:
        """Let two files change places."""
        one, other = self.directory / first, self.directory / second
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)


Damage = Callable[[Shards], None]


@dataclass(frozen=True)
class Defect:
    """What is done to shards; ``is_harmless`` where the function stays the same, so that parity has to hold."""

    damage: Damage
    is_harmless: bool = False


def open_shards(directory: Path) -> Shards:
    """Say what is where; the layer in the middle is damaged."""
    config = read_config(directory)
    ranks = len(list(directory.glob(f"model.layers.0.{_QKV}.weight.*.bin")))
    middle = config.num_layer // 2
    layer, next_layer = (f"model.layers.{number % config.num_layer}" for number in (middle, middle + 1))
    return Shards(directory, layer, next_layer, ranks, config.head_num // ranks, config.hidden_units)


def _swap_heads(parts: Sequence[int]) -> Damage:
    """Two heads' queries (0), keys (1) or values (2) change places in one rank's shard; its biases stay."""

    def damage(shards: Shards) -> None:
        def change(numbers: Tensor) -> Tensor:
            heads = numbers.view(shards.hidden, 3, shards.local_heads, -1)
            for part in parts:
                heads[:, part, [0, 1]] = heads[:, part, [1, 0]]
            return numbers

        shards.change(f"{shards.layer}.{_QKV}.weight.{shards.ranks - 1}", change)

    return damage


def _swap_queries_and_keys(shards: Shards) -> None:
    for kind, rows in (("weight", shards.hidden), ("bias", 1)):

        def change(numbers: Tensor, rows: int = rows) -> Tensor:
            return numbers.view(rows, 3, -1)[:, [_KEYS, _QUERIES, 2]]

        shards.change(f"{shards.layer}.{_QKV}.{kind}", change)


def _swap_rows_of_heads(shards: Shards) -> None:
    """Two heads' rows of the projection behind attention change places."""

    def change(numbers: Tensor) -> Tensor:
        heads = numbers.view(shards.local_heads, -1)
        return heads[[1, 0, *range(2, shards.local_heads)]]

    shards.change(f"{shards.layer}.{_DENSE}.weight.{shards.ranks - 1}", change)


def _swap_shards(tensor: str, is_cut_by_rows: bool) -> Damage:
    """Two ranks' shards change places or, on one rank, the halves that they would be."""

    def damage(shards: Shards) -> None:
        def change(numbers: Tensor) -> Tensor:
            return numbers.view(1 if is_cut_by_rows else shards.hidden, 2, -1)[:, [1, 0]]

        files = [f"{shards.layer}.{tensor}.weight.{rank}.bin" for rank in range(shards.ranks)]
        if len(files) == 1:
            shards.change(files[0].removesuffix(".bin"), change)
        else:
            shards.swap(*files)

    return damage


def _swap_layers(shards: Shards) -> None:
    for path in sorted(shards.directory.glob(f"{shards.layer}.*.bin")):
        shards.swap(path.name, path.name.replace(shards.layer, shards.next_layer, 1))


def _transpose(shards: Shards) -> None:
    """One shard is written with its axes the other way round."""
    shards.change(
        f"{shards.layer}.{_DENSE}.weight.{shards.ranks - 1}", lambda numbers: numbers.view(-1, shards.hidden).T
    )


def _scale(tensor: str, factor: float) -> Damage:
    """Multiply a tensor of the layer in the middle, or of the model."""

    def damage(shards: Shards) -> None:
        name = tensor if tensor.startswith("model.") else f"{shards.layer}.{tensor}"
        shards.change(name, lambda numbers: numbers * factor)

    return damage


def _zero_all_biases(shards: Shards) -> None:
    for path in sorted(shards.directory.glob("*.bias*.bin")):
        path.write_bytes(bytes(path.stat().st_size))


def _zero_biases_of_keys(shards: Shards) -> None:
    """It adds the same to each of a query's products with keys, and softmax takes that away again."""

    def change(numbers: Tensor) -> Tensor:
        numbers.view(3, -1)[_KEYS] = 0
        return numbers

    shards.change(f"{shards.layer}.{_QKV}.bias", change)


def _zero_positions(shards: Shards) -> None:
    """Positions behind the first 96 of 512, or as much of fewer."""

    def change(numbers: Tensor) -> Tensor:
        numbers[len(numbers) // shards.hidden * 96 // 512 * shards.hidden :] = 0
        return numbers

    shards.change("model.wpe", change)


def _shift_positions(shards: Shards) -> None:
    shards.change("model.wpe", lambda numbers: numbers.view(-1, shards.hidden).roll(1, 0))


PLANTED: dict[str, Defect] = {
    "sound": Defect(lambda shards: None, is_harmless=True),
    "two heads swapped": Defect(_swap_heads((0, 1, 2))),
    "q of two heads swapped": Defect(_swap_heads((0,))),
    "k of two heads swapped": Defect(_swap_heads((1,))),
    "v of two heads swapped": Defect(_swap_heads((2,))),
    "q and k swapped": Defect(_swap_queries_and_keys),
    "attention.dense: heads' rows swapped": Defect(_swap_rows_of_heads),
    "attention.dense: shards swapped": Defect(_swap_shards(_DENSE, is_cut_by_rows=True)),
    "attention.dense: a shard transposed": Defect(_transpose),
    "dense_h_to_4h: shards swapped": Defect(_swap_shards(_UP, is_cut_by_rows=False)),
    "dense_h_to_4h x 1.02": Defect(_scale(f"{_UP}.weight", 1.02)),
    "two layers swapped": Defect(_swap_layers),
    "input norm x 1.02": Defect(_scale(f"{_NORM}.weight", 1.02)),
    "input norm x 1.10": Defect(_scale(f"{_NORM}.weight", 1.1)),
    "post-attention norm x 1.02": Defect(_scale(f"{_SECOND_NORM}.weight", 1.02)),
    "post-attention norm x 1.10": Defect(_scale(f"{_SECOND_NORM}.weight", 1.1)),
    "final norm x 1.02": Defect(_scale(f"{_FINAL_NORM}.weight", 1.02)),
    "final norm x 1.10": Defect(_scale(f"{_FINAL_NORM}.weight", 1.1)),
    "input norm: bias zeroed": Defect(_scale(f"{_NORM}.bias", 0.0)),
    "final norm: bias zeroed": Defect(_scale(f"{_FINAL_NORM}.bias", 0.0)),
    "query_key_value: bias zeroed": Defect(_scale(f"{_QKV}.bias", 0.0)),
    "attention.dense: bias zeroed": Defect(_scale(f"{_DENSE}.bias", 0.0)),
    "dense_h_to_4h: bias zeroed": Defect(_scale(f"{_UP}.bias", 0.0)),
    "dense_4h_to_h: bias zeroed": Defect(_scale(f"{_DOWN}.bias", 0.0)),
    "all biases zeroed": Defect(_zero_all_biases),
    "positions from 96 on zeroed": Defect(_zero_positions),
    "positions shifted by one": Defect(_shift_positions),
    "bias of the keys zeroed": Defect(_zero_biases_of_keys, is_harmless=True),
}
"""26 defects, a sound model, and a change of the weights that changes nothing the model computes."""
