"""docs/shown.md is made from the cases that the tests of conversions run; every architecture has a row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from math import ceil, log10
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import test_delta_rule  # type: ignore[import-not-found]
import test_hybrids  # type: ignore[import-not-found]
import test_megatron_fsdp  # type: ignore[import-not-found]
import torch
import transformers
from support.checkpoints.hybrid_models import hybrid
from support.checkpoints.llama_sources import write_source
from support.tiny_models.llama_models import MODELS, Saved
from support.tiny_models.same_model import assert_same_model
from test_huggingface_target import MODELS as OLDER  # type: ignore[import-not-found]
from test_huggingface_target import T5S
from test_llama_huggingface import CASES  # type: ignore[import-not-found]
from test_megatron_bridge import LLAMAS, NEWER  # type: ignore[import-not-found]

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.huggingface.decoder import ARCHITECTURES
from export_scripts.convert import convert

PAGE = Path(__file__).resolve().parents[2] / "docs/shown.md"
MEASURED = Path(__file__).resolve().parents[1] / "data/shown.json"
"""The largest difference of logits by architecture and form, rounded up to a power of ten, where it is not 0."""
BEGIN, END = "<!-- made by make golden from the cases of the tests: begin -->\n", "<!-- end -->"
TENSORS, BOTH, LOGITS = "tensors", "tensors; logits, 1e-5", "logits, 1e-5"


class Shown(NamedTuple):
    """One case: transformers' model_type, the source's form, the training's ranks, the type, what is compared.

    What ``compared`` says of logits, ``measure`` converts once more, given a folder, and measures.
    """

    model_type: str
    form: str
    ranks: int
    data_type: str
    compared: str
    measure: Callable[[Path], float] | None = None

    @property
    def key(self) -> str:
        """Name of a row's measurement."""
        return f"{self.model_type}, {self.form}"


def shown() -> Iterator[Shown]:
    """List the cases of all tests."""
    for name in MODELS:
        yield Shown(_type_of(name), "Hugging Face", 1, "bf16", TENSORS)
    for family, _ in OLDER.values():
        for data_type in ("fp32", "bf16"):
            yield Shown(family, "Hugging Face", 1, data_type, "tensors; logits, equal")
    for _ in T5S:
        yield Shown("t5", "Hugging Face", 1, "fp32", "tensors; logits, 1e-6")
    yield from _compared_as_a_whole()
    for name in (*LLAMAS, *NEWER):
        yield Shown(_type_of(name), "Megatron-Bridge", 2, "fp32", LOGITS)
    for name, ranks in _cases(test_megatron_fsdp.test_megatron_bridges):
        yield Shown(_type_of(name), "Megatron-Bridge, fsdp_dtensor", ranks, "bf16", TENSORS)
    for name, ranks, dtype in _cases(test_megatron_fsdp.test_megatron_lms):
        yield Shown(_type_of(name), "Megatron-LM, fsdp_dtensor", ranks, _short(dtype), TENSORS)


def _compared_as_a_whole() -> Iterator[Shown]:
    """List the cases whose tensors and logits are those of transformers' model."""
    for case in CASES:
        measure = partial(_measured, partial(write_source, case), partial(getattr, case, "source"), case.dtype)
        yield Shown(_type_of(case.name), _form(case.form), case.tensor, _short(case.dtype), BOTH, measure)
    for module in (test_hybrids, test_delta_rule):
        for name, form, ranks, dtype in _cases(module.test_the_same_model_comes_out):
            source = partial(hybrid, name, dtype)
            measure = partial(_measured, partial(_written, module.FORMS[form], source, ranks), source, dtype)
            yield Shown(_type_of(name), _form(form), ranks, _short(dtype), BOTH, measure)


def _written(write: Callable[..., Path], source: Callable[[], Saved], ranks: int, folder: Path) -> Path:
    return write(folder, source(), ranks)


def _measured(write: Callable[[Path], Path], source: Callable[[], Saved], dtype: torch.dtype, folder: Path) -> float:
    """Convert a case and measure the largest difference of its logits."""
    given: dict[str, Any] = {"weight_data_type": _short(dtype), "format": "huggingface"}
    convert(ConvertArguments(write(folder / "source"), folder / "out", **given))
    return assert_same_model(folder / "out", source())


def measured() -> dict[str, float]:
    """Measure all cases; those of one row together, rounded up to a power of ten."""
    found: dict[str, float] = {}
    for case in shown():
        if case.measure:
            with TemporaryDirectory() as folder:
                found[case.key] = max(found.get(case.key, 0.0), case.measure(Path(folder)))
    return {key: 10.0 ** ceil(log10(value)) for key, value in sorted(found.items()) if value}


def _cases(test: Any) -> list[tuple[Any, ...]]:
    return list(test.pytestmark[0].args[1])


def _type_of(name: str) -> str:
    return str(getattr(transformers, f"{MODELS[name][0]}Config").model_type)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def _form(words: str) -> str:
    """Name the form as docs/sources.md does; how layers, experts and gates are stored is the tests' matter."""
    parts = words.split(", ")
    if parts[0] in ("legacy", "core", "zarr", "torch_dist"):
        return f"NeMo 1, {parts[0]}"
    name = "Megatron-Bridge" if parts[0] == "Bridge" else parts[0]
    return ", ".join([name, *(each for each in ("torch_dist", "fsdp_dtensor") if each in parts)])


def table() -> str:
    """Render one row for each architecture, form and comparison."""
    rows: dict[tuple[str, str, str], list[Shown]] = {}
    for case in shown():
        rows.setdefault((case.model_type, case.form, case.compared), []).append(case)
    largest = json.loads(MEASURED.read_text())
    lines = ["| `model_type` | source | ranks | types | compared | largest difference |", "|---|---|---|---|---|---|"]
    for (model_type, form, compared), cases in sorted(rows.items()):
        ranks = ", ".join(str(number) for number in sorted({case.ranks for case in cases}))
        types = ", ".join(sorted({case.data_type for case in cases}))
        found = f"{largest.get(cases[0].key, 0):.0g}" if cases[0].measure else "0" if "equal" in compared else ""
        lines.append(f"| `{model_type}` | {form} | {ranks} | {types} | {compared} | {found} |")
    return BEGIN + "\n" + "\n".join(lines) + "\n\n"


def test_the_page_has_the_cases_of_now(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-golden"):
        MEASURED.write_text(json.dumps(measured(), indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    page = before + table() + END + rest.partition(END)[2]
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run make golden"
    assert "| `llama` | Megatron-LM, torch_dist | 4 | bf16 | tensors; logits, 1e-5 | " in page


def test_every_architecture_has_a_row() -> None:
    missing = {"t5", *(each.model_type for each in ARCHITECTURES)} - {case.model_type for case in shown()}
    assert not missing, "its conversion is compared with nothing"
