"""docs/tensors.md has the tables of ft_format/tensors.py; ``make golden`` writes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from ft_format import tensors
from ft_format.tensors import Tensor

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tensors.md"
_TYPES = {
    **{tensors.BOOL: "bool", tensors.FLOAT: "fp32", tensors.HALF: "fp16", tensors.TEXT: "string"},
    **{tensors.INT: "int32", tensors.UINT: "uint32", tensors.SEED: "uint64"},
}
_FAMILIES = {
    tensors.GENERATORS: "",
    tensors.ALL: "encoders too",
    tensors.DECODERS: "decoders",
    tensors.T5: "T5",
    tensors.ENCODER: "T5-Encoder",
    tensors.T5 | tensors.ENCODER: "T5, T5-Encoder",
}
BEGIN, END = "<!-- the table of ft_format/tensors.py -->\n", "<!-- its end -->\n"


def tables() -> str:
    columns = "tensor", "type, shape", "default", "legal", "of", "ours", "beams", "meaning"
    inputs = _table(tensors.INPUTS.values(), columns)
    outputs = _table(tensors.OUTPUTS, ("tensor", "type, shape", "of", "ours", "meaning"))
    return f"{BEGIN}\n{inputs}\nWhat is answered:\n\n{outputs}\n{END}"


def _table(rows: Iterable[Tensor], columns: Sequence[str]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cells(each)[name] for name in columns] for each in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(tensor: Tensor) -> Mapping[str, str]:
    axes = ", ".join("n" if size < 0 else str(size) for size in tensor.shape or (1,))
    default = "" if tensor.default is None else f"{tensor.default:.10g}"
    limits = (("at least", tensor.legal.least), ("at most", tensor.legal.most))
    return {
        "tensor": tensor.name,
        "type, shape": f"{' or '.join(_TYPES[kind] for kind in (tensor.kind, *tensor.older_kinds))} [B, {axes}]",
        "default": default if tensor.is_optional else "required",
        "legal": ", ".join(f"{words} {limit:.3g}" for words, limit in limits if math.isfinite(limit)),
        "of": _FAMILIES[tensor.families],
        "ours": "yes" if tensor.is_ours else "",
        "beams": "" if tensor.works_with_beams else "no",
        "meaning": tensor.meaning,
    }


def test_the_page_has_the_tables_of_now(request: pytest.FixtureRequest) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    page = before + tables() + rest.partition(END)[2]
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run make golden"
    assert "| min_p | fp32 [B, 1] | 0 | at least 0, at most 1 |  | yes | no |" in page
